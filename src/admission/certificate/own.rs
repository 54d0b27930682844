//! A certificate of archaware's own making, in one Secret that all replicas share.
//!
//! Each certificate has its own authority. A new one is made when two thirds of the old one's time are
//! over: first its authority is published in the Secret, and by the configuration's keeper in the
//! `caBundle`; when it has been there long enough for every API server to know it, the certificate takes
//! the old one's place. So whichever of the two a replica still serves, it is trusted.

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
    super::ca_bundle::{self, Authorities, Published},
    CertificateError, Served,
    issue::issue,
    stored::{Step, Stored, step},
};

/// In a row: more are no race.
const MAX_CONFLICTS: u32 = 5;

/// Keeps the certificate of all replicas.
pub(in crate::admission) struct Own {
    pub(in crate::admission) api: ApiClient,
    /// Where the Secret is.
    pub(in crate::admission) namespace: String,
    /// What the API server calls the webhook.
    pub(in crate::admission) names: Vec<String>,
    pub(in crate::admission) lifetime: Duration,
    /// Only the leader replaces what is good.
    pub(in crate::admission) leadership: watch::Receiver<bool>,
    /// What the API server has been told to trust.
    pub(in crate::admission) published: watch::Receiver<Published>,
    pub(in crate::admission) served: Arc<Served>,
    pub(in crate::admission) authorities: watch::Sender<Authorities>,
}

/// Why a turn failed.
#[derive(Debug, thiserror::Error)]
enum OwnError {
    #[error("Secret {NAME}: {0}")]
    Secret(#[from] ApiError),
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// What a replica remembers from turn to turn.
#[derive(Default)]
struct Memory {
    /// What the Secret held last.
    stored: Option<Stored>,
    /// What is published, and since when that is what the Secret asks for.
    settled: Option<(String, Instant)>,
}

impl Own {
    /// How often the Secret is read, by every replica.
    fn period(&self) -> Duration {
        (self.lifetime / 60).clamp(Duration::from_secs(1), Duration::from_secs(15))
    }

    /// How long an authority is published before a certificate of it is served: what an API server takes to
    /// hear of it, many times over.
    fn grace(&self) -> Duration {
        (self.lifetime / 20).clamp(Duration::from_secs(2), Duration::from_mins(1))
    }

    /// Runs until `stop`.
    pub(in crate::admission) async fn run(self, stop: CancellationToken) {
        let (mut memory, mut failing) = (Memory::default(), RepeatedError::default());
        let (mut conflicts, mut leadership) = (0, self.leadership.clone());
        loop {
            let turn = self.turn(&mut memory);
            let Some(result) = stop.run_until_cancelled(turn).await else {
                return;
            };
            let changed = match result {
                Ok(changed) => {
                    failing.clear();
                    conflicts = 0;
                    changed
                }
                // Another replica was quicker: what it wrote is read now.
                Err(OwnError::Secret(ApiError::Conflict(_))) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    true
                }
                Err(error) => {
                    if let Some(error) = failing.changed(&error) {
                        tracing::warn!(error, "admission certificate not kept; trying again");
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
                // Whoever leads now has something to do, perhaps.
                _ = leadership.changed() => {}
            }
        }
    }

    /// Reads the Secret, serves what it holds, and changes it if that is due: then `true`.
    async fn turn(&self, memory: &mut Memory) -> Result<bool, OwnError> {
        let Some(secret) = self.api.find::<Secret>(&self.name()).await? else {
            let secret = self.fresh(memory.stored.as_ref())?.to_secret();
            let namespace = Some(self.namespace.as_str());
            let created = self.api.create::<Secret, IgnoredAny>(namespace, &secret);
            created.await?;
            tracing::info!(secret = NAME, "admission certificate made");
            return Ok(true);
        };
        let stored = Stored::parse(&secret);
        let leads = *self.leadership.borrow();
        // Whether it has expired is for one clock to say: the leader's.
        let is_good =
            |stored: &Stored| stored.is_usable() || (!leads && stored.current.load().is_ok());
        let Some(stored) = stored.filter(is_good) else {
            let fresh = self.fresh(memory.stored.as_ref())?;
            self.write(&secret, &fresh).await?;
            tracing::warn!(
                secret = NAME,
                "it held no usable certificate; another one was made"
            );
            return Ok(true);
        };
        // First whom to trust, then what is shown: the registration waits for the second.
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
        let is_shown = memory.stored.as_ref().map(|old| &old.current) == Some(&stored.current);
        if !is_shown {
            self.served.show(&stored.current)?;
            tracing::info!("admission certificate served");
        }
        memory.stored = Some(stored.clone());
        if !leads {
            memory.settled = None;
            return Ok(false);
        }
        let settled = self.is_settled(memory, &stored);
        let now = SystemTime::now();
        let after = match step(&stored, now, self.lifetime, &self.names, settled) {
            Step::Nothing => return Ok(false),
            Step::Prepare => {
                tracing::info!("the next admission certificate is prepared");
                let made =
                    issue(&self.names, now, self.lifetime).map_err(CertificateError::from)?;
                Stored {
                    authorities: ca_bundle::with(&made.authority, &stored.authorities),
                    next: Some(made.pair),
                    ..stored
                }
            }
            Step::Promote => {
                tracing::info!("the next admission certificate takes its place");
                Stored {
                    current: stored.next.unwrap_or(stored.current),
                    next: None,
                    ..stored
                }
            }
            Step::Prune => Stored {
                authorities: ca_bundle::pruned(&stored.authorities),
                ..stored
            },
        };
        self.write(&secret, &after).await?;
        Ok(true)
    }

    /// Whether the API servers know all authorities by now.
    fn is_settled(&self, memory: &mut Memory, stored: &Stored) -> bool {
        let known = match &*self.published.borrow() {
            Published::Unknown => false,
            // Nobody asks.
            Published::Nowhere => true,
            Published::Bundle(bundle) => **bundle == *stored.authorities,
        };
        let since = memory
            .settled
            .take()
            .filter(|(of, _)| known && *of == stored.authorities);
        let since = since.map_or_else(Instant::now, |(_, since)| since);
        if known {
            memory.settled = Some((stored.authorities.clone(), since));
        }
        known && since.elapsed() >= self.grace()
    }

    /// A new certificate, to be served at once; or later, if there is one that still serves.
    fn fresh(&self, before: Option<&Stored>) -> Result<Stored, CertificateError> {
        let made = issue(&self.names, SystemTime::now(), self.lifetime)?;
        Ok(match before.filter(|before| before.is_usable()) {
            None => Stored {
                authorities: made.authority,
                current: made.pair,
                next: None,
            },
            Some(before) => Stored {
                authorities: ca_bundle::with(&made.authority, &before.authorities),
                current: before.current.clone(),
                next: Some(made.pair),
            },
        })
    }

    fn name(&self) -> NamespacedName {
        NamespacedName::new(&self.namespace, NAME)
    }

    async fn write(&self, seen: &Secret, after: &Stored) -> Result<(), ApiError> {
        let patch = patch::secret(seen, &after.fields());
        self.api.patch::<Secret>(&self.name(), patch).await
    }
}
