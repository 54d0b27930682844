//! Serves a certificate from files. They are read periodically and compared, not watched with
//! inotify, because mounted Secrets change by replacing a symbolic link.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{config::CertificatesConfig, error::RepeatedError, files};

use super::{
    super::ca_bundle::{self, CaBundle, Published},
    CertResolver, CertificateError, KeyPairPem,
};

/// How often the files are read. The kubelet updates mounted Secrets once a minute.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);

/// How long to wait for the replica that publishes the authority. It may see changed files later
/// than this replica, because each kubelet updates mounted Secrets once a minute.
const PUBLISH_DELAY: Duration = Duration::from_mins(2);

/// Reads certificate, key and optionally the authority from files.
pub(in crate::admission) struct FromFiles {
    pub(in crate::admission) config: CertificatesConfig,
    /// The name under which the API server reaches the webhook.
    pub(in crate::admission) name: String,
    /// The published `caBundle`, if this replica maintains it.
    pub(in crate::admission) published: watch::Receiver<Published>,
    pub(in crate::admission) served: Arc<CertResolver>,
    pub(in crate::admission) authorities: watch::Sender<CaBundle>,
}

impl FromFiles {
    /// Reads the files periodically until `stop`. While they are unusable, the previous certificate
    /// is served.
    pub(in crate::admission) async fn run(self, stop: CancellationToken) {
        let (mut active, mut since) = (None, Instant::now());
        let mut failing = RepeatedError::default();
        loop {
            // A file system may hang, which must not delay shutdown.
            let iteration = self.reload_once(&mut active, &mut since);
            let Some(result) = stop.run_until_cancelled(iteration).await else {
                return;
            };
            match result {
                Ok(()) => failing.clear(),
                // While two files are replaced one after the other, they do not match.
                Err(error) => {
                    if let Some(error) = failing.changed(&error) {
                        let CertificatesConfig {
                            certificate,
                            key,
                            authority,
                            ..
                        } = &self.config;
                        tracing::warn!(
                            ?certificate,
                            ?key,
                            ?authority,
                            error,
                            "cannot use the files of the admission certificate; trying again"
                        );
                    }
                }
            }
            let pause = tokio::time::sleep(REREAD_INTERVAL);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    async fn reload_once(
        &self,
        active: &mut Option<KeyPairPem>,
        since: &mut Instant,
    ) -> Result<(), CertificateError> {
        let pair = KeyPairPem {
            certificate: read(&self.config.certificate).await?,
            key: read(&self.config.key).await?,
        };
        pair.load()?;
        if !self.config.authority.as_os_str().is_empty() {
            let authority = read(&self.config.authority).await?;
            if ca_bundle::with_authority(&authority, "").is_empty() {
                return Err(CertificateError::NoAuthority);
            }
            let changed = self.authorities.send_if_modified(|old| {
                let new = ca_bundle::with_authority(&authority, old.as_deref().unwrap_or_default());
                let changed = old.as_deref() != Some(&*new);
                *old = Some(new.into());
                changed
            });
            // The authority must be published before its certificate is served. The replica that
            // publishes the authority may see the changed files later than this replica.
            if changed {
                *since = Instant::now();
            }
            let is_known = match &*self.published.borrow() {
                Published::Bundle(bundle) => ca_bundle::contains_authority(bundle, &authority),
                Published::Unknown | Published::NoBundle => false,
            };
            let wait = if is_known {
                REREAD_INTERVAL
            } else {
                PUBLISH_DELAY
            };
            let serves = self
                .served
                .expires()
                .is_some_and(|at| at > SystemTime::now());
            if serves && active.as_ref() != Some(&pair) && since.elapsed() < wait {
                return Ok(());
            }
        }
        if active.as_ref() != Some(&pair) {
            self.served.activate(&pair)?;
            if !pair.is_for(std::slice::from_ref(&self.name)) {
                let name = &self.name;
                let certificate = self.config.certificate.display();
                tracing::warn!(
                    name,
                    %certificate,
                    "the admission certificate is not valid for the name that the API server uses; issue it for this name"
                );
            }
            tracing::info!(certificate = %self.config.certificate.display(), "admission certificate loaded from file");
            *active = Some(pair);
        }
        Ok(())
    }
}

/// `spawn_blocking`, because a file system may hang.
async fn read(path: &Path) -> Result<String, CertificateError> {
    let path = path.to_owned();
    let failed = files::failed("", &path);
    let read = tokio::task::spawn_blocking(move || files::read_text("", &path)).await;
    Ok(read.unwrap_or_else(|panic| Err(failed(std::io::Error::other(panic))))?)
}
