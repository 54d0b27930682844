//! Serves a certificate that archaware issues, from a Secret that all replicas share.
//!
//! Each certificate has its own authority. A new certificate is issued after two thirds of the old
//! certificate's lifetime. First the new authority is stored in the Secret and published in the
//! `caBundle`. When all API servers know this authority, the new certificate replaces the old one.
//! So the API server trusts both certificates while some replicas still serve the old one.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use k8s_openapi::api::core::v1::Secret;
use serde::de::IgnoredAny;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        ADMISSION_SECRET as NAME,
        api::{ApiClient, ApiError},
        name::NamespacedName,
        patch,
    },
    error::RepeatedError,
};

use super::{
    super::ca_bundle::{self, CaBundle, Published},
    CertResolver, CertificateError,
    issue::issue,
    stored::{RenewalStep, StoredCertificates, renewal_step},
};

/// Consecutive conflicts that are retried at once.
const MAX_CONFLICTS: u32 = 5;

/// Maintains the Secret and serves its certificate.
pub(in crate::admission) struct SelfSigned {
    pub(in crate::admission) api: ApiClient,
    /// Namespace of the Secret.
    pub(in crate::admission) namespace: String,
    /// The names under which the API server reaches the webhook.
    pub(in crate::admission) names: Vec<String>,
    pub(in crate::admission) lifetime: Duration,
    /// Only the leader replaces a valid certificate.
    pub(in crate::admission) leadership: watch::Receiver<bool>,
    /// The published `caBundle`.
    pub(in crate::admission) published: watch::Receiver<Published>,
    pub(in crate::admission) served: Arc<CertResolver>,
    pub(in crate::admission) authorities: watch::Sender<CaBundle>,
}

/// Why an iteration failed.
#[derive(Debug, thiserror::Error)]
enum SelfSignedError {
    #[error("Secret {NAME}: {0}")]
    Secret(#[from] ApiError),
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// State between iterations.
#[derive(Default)]
struct RenewalState {
    /// Last content of the Secret.
    stored: Option<StoredCertificates>,
    /// The authorities in the Secret, and since when all of them count as published.
    settled: Option<(String, Instant)>,
}

impl SelfSigned {
    /// How often every replica reads the Secret.
    fn period(&self) -> Duration {
        (self.lifetime / 60).clamp(Duration::from_secs(1), Duration::from_secs(15))
    }

    /// How long an authority is published before its certificate is served. API servers read the
    /// published `caBundle` in much less time.
    fn grace(&self) -> Duration {
        (self.lifetime / 20).clamp(Duration::from_secs(2), Duration::from_mins(1))
    }

    /// Runs until `stop`.
    pub(in crate::admission) async fn run(self, stop: CancellationToken) {
        let (mut state, mut failing) = (RenewalState::default(), RepeatedError::default());
        let (mut conflicts, mut leadership) = (0, self.leadership.clone());
        loop {
            let iteration = self.reconcile_once(&mut state);
            let Some(result) = stop.run_until_cancelled(iteration).await else {
                return;
            };
            let changed = match result {
                Ok(changed) => {
                    failing.clear();
                    conflicts = 0;
                    changed
                }
                // Another replica wrote the Secret first: read it now.
                Err(SelfSignedError::Secret(ApiError::Conflict(_)))
                    if conflicts < MAX_CONFLICTS =>
                {
                    conflicts += 1;
                    true
                }
                Err(error) => {
                    if let Some(error) = failing.changed(&error) {
                        tracing::warn!(
                            error,
                            "cannot maintain the admission certificate; trying again"
                        );
                    }
                    false
                }
            };
            let pause = if changed {
                Duration::from_millis(100)
            } else {
                self.period()
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                // A new leader may have to renew the certificate.
                _ = leadership.changed() => {}
            }
        }
    }

    /// Reads the Secret, serves its certificate, and writes the Secret if due. Returns whether it
    /// was written.
    async fn reconcile_once(&self, state: &mut RenewalState) -> Result<bool, SelfSignedError> {
        let Some(secret) = self.api.find::<Secret>(&self.name()).await? else {
            let secret = self.fresh(state.stored.as_ref())?.to_secret();
            let namespace = Some(self.namespace.as_str());
            let created = self.api.create::<Secret, IgnoredAny>(namespace, &secret);
            created.await?;
            tracing::info!(secret = NAME, "admission certificate issued");
            return Ok(true);
        };
        let stored = StoredCertificates::parse(&secret);
        let leads = *self.leadership.borrow();
        // Only the leader's clock decides whether the certificate has expired.
        let is_good = |stored: &StoredCertificates| {
            stored.is_usable() || (!leads && stored.current.load().is_ok())
        };
        let Some(stored) = stored.filter(is_good) else {
            let fresh = self.fresh(state.stored.as_ref())?;
            self.write(&secret, &fresh).await?;
            tracing::warn!(
                secret = NAME,
                "the Secret had no usable certificate; issued a new certificate"
            );
            return Ok(true);
        };
        // The authorities are sent before the certificate is activated, because the `caBundle` is
        // written as soon as there is a certificate.
        self.authorities.send_if_modified(|old| {
            let changed = old.as_deref() != Some(&*stored.authorities);
            *old = Some((*stored.authorities).into());
            changed
        });
        let has_expired = stored
            .current
            .expires()
            .is_none_or(|at| at <= SystemTime::now());
        if has_expired && !leads {
            return Ok(false);
        }
        let is_served = state.stored.as_ref().map(|old| &old.current) == Some(&stored.current);
        if !is_served {
            self.served.activate(&stored.current)?;
            tracing::info!("admission certificate served");
        }
        state.stored = Some(stored.clone());
        if !leads {
            state.settled = None;
            return Ok(false);
        }
        let settled = self.is_settled(state, &stored);
        let now = SystemTime::now();
        let (after, message) = match renewal_step(&stored, now, self.lifetime, &self.names, settled)
        {
            RenewalStep::Nothing => return Ok(false),
            RenewalStep::Prepare => {
                let made =
                    issue(&self.names, now, self.lifetime).map_err(CertificateError::from)?;
                let after = StoredCertificates {
                    authorities: ca_bundle::with_authority(&made.authority, &stored.authorities),
                    next: Some(made.pair),
                    ..stored
                };
                (
                    after,
                    "issued the next admission certificate; it is served once its authority is published",
                )
            }
            RenewalStep::Promote => {
                let after = StoredCertificates {
                    current: stored.next.unwrap_or(stored.current),
                    next: None,
                    ..stored
                };
                (after, "the next admission certificate replaces the old one")
            }
            RenewalStep::Prune => {
                let after = StoredCertificates {
                    authorities: ca_bundle::without_expired(&stored.authorities),
                    ..stored
                };
                (
                    after,
                    "removed expired authorities of the admission certificate",
                )
            }
        };
        self.write(&secret, &after).await?;
        tracing::info!(secret = NAME, "{message}");
        Ok(true)
    }

    /// Whether all API servers know the authorities.
    fn is_settled(&self, state: &mut RenewalState, stored: &StoredCertificates) -> bool {
        let known = match &*self.published.borrow() {
            Published::Unknown => false,
            // Without a `MutatingWebhookConfiguration` the API server does not call the webhook.
            Published::NoBundle => true,
            Published::Bundle(bundle) => **bundle == *stored.authorities,
        };
        let since = state
            .settled
            .take()
            .filter(|(authorities, _)| known && *authorities == stored.authorities);
        let since = since.map_or_else(Instant::now, |(_, since)| since);
        if known {
            state.settled = Some((stored.authorities.clone(), since));
        }
        known && since.elapsed() >= self.grace()
    }

    /// Issues a certificate. It is served at once, or becomes `next` if the previous one is still
    /// usable.
    fn fresh(
        &self,
        before: Option<&StoredCertificates>,
    ) -> Result<StoredCertificates, CertificateError> {
        let made = issue(&self.names, SystemTime::now(), self.lifetime)?;
        Ok(match before.filter(|before| before.is_usable()) {
            None => StoredCertificates {
                authorities: made.authority,
                current: made.pair,
                next: None,
            },
            Some(before) => StoredCertificates {
                authorities: ca_bundle::with_authority(&made.authority, &before.authorities),
                current: before.current.clone(),
                next: Some(made.pair),
            },
        })
    }

    fn name(&self) -> NamespacedName {
        NamespacedName::new(&self.namespace, NAME)
    }

    async fn write(&self, seen: &Secret, after: &StoredCertificates) -> Result<(), ApiError> {
        let patch = patch::secret(seen, &after.fields());
        self.api.patch::<Secret>(&self.name(), patch).await
    }
}
