//! A certificate that somebody else makes, in files that are read again when they change. Mounted Secrets
//! change by the swap of a link, so the bytes are looked at, not the file system's notices.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{config::CertificatesConfig, error::RepeatedError, files};

use super::{super::configuration::Published, Authorities, CertificateError, Pair, Served, bundle};

/// How often the files are read. The kubelet takes a minute to bring a changed Secret.
const PERIOD: Duration = Duration::from_secs(5);

/// How much later than this replica the one that publishes may have its files: kubelets look at Secrets once
/// a minute.
const LAG: Duration = Duration::from_mins(2);

/// Certificate, key, and perhaps the authority.
pub(in crate::admission) struct Files {
    certificate: PathBuf,
    key: PathBuf,
    authority: Option<PathBuf>,
    /// What the API server calls the webhook.
    name: String,
    /// What the API server has been told to trust, if this replica tells it.
    published: watch::Receiver<Published>,
    served: Arc<Served>,
    authorities: watch::Sender<Authorities>,
}

impl Files {
    pub(in crate::admission) fn new(
        config: &CertificatesConfig,
        name: String,
        published: watch::Receiver<Published>,
        served: Arc<Served>,
        authorities: watch::Sender<Authorities>,
    ) -> Self {
        let authority = Some(config.authority.clone()).filter(|path| !path.as_os_str().is_empty());
        Self {
            certificate: config.certificate.clone(),
            key: config.key.clone(),
            authority,
            name,
            published,
            served,
            authorities,
        }
    }

    /// Reads the files again and again, until `stop`. While they are not usable, what was served before is.
    pub(in crate::admission) async fn run(self, stop: CancellationToken) {
        let (mut shown, mut since) = (None, Instant::now());
        let mut failing = RepeatedError::default();
        loop {
            match self.turn(&mut shown, &mut since).await {
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
            certificate: read(&self.certificate).await?,
            key: read(&self.key).await?,
        };
        pair.load()?;
        if let Some(authority) = self.authority.as_deref() {
            let authority = read(authority).await?;
            if bundle::with(&authority, "").is_empty() {
                return Err(CertificateError::NoAuthority);
            }
            let news = self.authorities.send_if_modified(|old| {
                let new = bundle::with(&authority, old.as_deref().unwrap_or_default());
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
                Published::Bundle(bundle) => bundle::holds(bundle, &authority),
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
            tracing::info!(certificate = %self.certificate.display(), "certificate read");
            *shown = Some(pair);
        }
        Ok(())
    }
}

async fn read(path: &Path) -> Result<String, CertificateError> {
    let read = files::read_text_async(path.to_owned()).await;
    read.map_err(|source| CertificateError::Read {
        path: path.to_owned(),
        source,
    })
}
