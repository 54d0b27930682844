//! A certificate that somebody else makes, in files that are read again when they change. Mounted Secrets
//! change by the swap of a link, so the bytes are looked at, not the file system's notices.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{config::CertificatesConfig, error::RepeatedError, files};

use super::{
    super::ca_bundle::{self, Authorities, Published},
    CertificateError, Pair, Served,
};

/// How often the files are read. The kubelet takes a minute to bring a changed Secret.
const PERIOD: Duration = Duration::from_secs(5);

/// How much later than this replica the one that publishes may have its files: kubelets look at Secrets once
/// a minute.
const LAG: Duration = Duration::from_mins(2);

/// Certificate, key, and perhaps the authority.
pub(in crate::admission) struct Files {
    pub(in crate::admission) config: CertificatesConfig,
    /// What the API server calls the webhook.
    pub(in crate::admission) name: String,
    /// What the API server has been told to trust, if this replica tells it.
    pub(in crate::admission) published: watch::Receiver<Published>,
    pub(in crate::admission) served: Arc<Served>,
    pub(in crate::admission) authorities: watch::Sender<Authorities>,
}

impl Files {
    /// Reads the files again and again, until `stop`. While they are not usable, what was served before is.
    pub(in crate::admission) async fn run(self, stop: CancellationToken) {
        let (mut shown, mut since) = (None, Instant::now());
        let mut failing = RepeatedError::default();
        loop {
            // A file system may hang; a process that is told to stop may not.
            let turn = self.turn(&mut shown, &mut since);
            let Some(result) = stop.run_until_cancelled(turn).await else {
                return;
            };
            match result {
                Ok(()) => failing.clear(),
                // Between two files that are replaced one after the other they do not fit.
                Err(error) => {
                    if let Some(error) = failing.changed(&error) {
                        tracing::warn!(error, "admission certificate not usable; looking again");
                    }
                }
            }
            let pause = tokio::time::sleep(PERIOD);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    async fn turn(
        &self,
        shown: &mut Option<Pair>,
        since: &mut Instant,
    ) -> Result<(), CertificateError> {
        let pair = Pair {
            certificate: read(&self.config.certificate).await?,
            key: read(&self.config.key).await?,
        };
        pair.load()?;
        if !self.config.authority.as_os_str().is_empty() {
            let authority = read(&self.config.authority).await?;
            if ca_bundle::with(&authority, "").is_empty() {
                return Err(CertificateError::NoAuthority);
            }
            let news = self.authorities.send_if_modified(|old| {
                let new = ca_bundle::with(&authority, old.as_deref().unwrap_or_default());
                let changed = old.as_deref() != Some(&*new);
                *old = Some(new.into());
                changed
            });
            // The API server hears of a new authority before it meets a certificate of it. Who publishes
            // may have its files later.
            if news {
                *since = Instant::now();
            }
            let is_known = match &*self.published.borrow() {
                Published::Bundle(bundle) => ca_bundle::holds(bundle, &authority),
                Published::Unknown | Published::Nowhere => false,
            };
            let wait = if is_known { PERIOD } else { LAG };
            let serves = self
                .served
                .expires()
                .is_some_and(|at| at > SystemTime::now());
            if serves && shown.as_ref() != Some(&pair) && since.elapsed() < wait {
                return Ok(());
            }
        }
        if shown.as_ref() != Some(&pair) {
            self.served.show(&pair)?;
            if !pair.is_for(std::slice::from_ref(&self.name)) {
                let name = &self.name;
                tracing::warn!(
                    name,
                    "the admission certificate is not for what the API server calls us"
                );
            }
            tracing::info!(certificate = %self.config.certificate.display(), "certificate read");
            *shown = Some(pair);
        }
        Ok(())
    }
}

/// Off the runtime's workers: a file system may hang.
async fn read(path: &Path) -> Result<String, CertificateError> {
    let path = path.to_owned();
    let failed = files::failed("", &path);
    let read = tokio::task::spawn_blocking(move || files::read_text("", &path)).await;
    Ok(read.unwrap_or_else(|panic| Err(failed(std::io::Error::other(panic))))?)
}
