//! A certificate of archaware's own making, in one Secret that all replicas share.
//!
//! Each certificate has its own authority. A new one is made when two thirds of the old one's time are
//! over: first its authority is published in the Secret, and by the configuration's keeper in the
//! `caBundle`; when it has been there long enough for every API server to know it, the certificate takes
//! the old one's place. So whichever of the two a replica still serves, it is trusted.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use k8s_openapi::{
    ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster::{
    ADMISSION_SECRET as NAME, patch,
    secrets::{self, SecretError},
};

use super::{
    super::configuration::Published, Authorities, CertificateError, Pair, Served, bundle,
    issue::issue,
};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// In a row: more are no race.
const MAX_CONFLICTS: u32 = 5;

/// Keeps the certificate of all replicas.
pub(in crate::admission) struct Own {
    pub(in crate::admission) client: Client,
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

/// What the Secret holds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    authorities: String,
    current: Pair,
    next: Option<Pair>,
}

/// What the leader does next.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// A new certificate is made and its authority published.
    Prepare,
    /// The new certificate takes the old one's place.
    Promote,
    /// Authorities that have expired go.
    Prune,
}

/// Why a turn failed.
#[derive(Debug, thiserror::Error)]
enum OwnError {
    #[error("Secret {NAME}: {0}")]
    Secret(#[from] SecretError),
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
        let (mut memory, mut told) = (Memory::default(), None);
        let mut conflicts = 0;
        loop {
            let turn = self.turn(&mut memory);
            let Some(result) = stop.run_until_cancelled(turn).await else {
                return;
            };
            let changed = match result {
                Ok(changed) => {
                    (told, conflicts) = (None, 0);
                    changed
                }
                // Another replica was quicker: what it wrote is read now.
                Err(OwnError::Secret(SecretError::Conflict)) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    true
                }
                Err(error) => {
                    let error = crate::image::chain(&error);
                    if told.as_ref() != Some(&error) {
                        tracing::warn!(error, "admission certificate not kept; trying again");
                        told = Some(error);
                    }
                    false
                }
            };
            let pause = if changed {
                Duration::from_millis(100)
            } else {
                self.period()
            };
            let pause = tokio::time::sleep(pause);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Reads the Secret, serves what it holds, and changes it if that is due: then `true`.
    async fn turn(&self, memory: &mut Memory) -> Result<bool, OwnError> {
        let read = secrets::get::<Secret>(self.client.clone(), &self.namespace, NAME).await;
        let secret = match read {
            Ok(secret) => secret,
            Err(SecretError::NotFound) => {
                let fresh = self.fresh(memory.stored.as_ref())?;
                let secret = fresh.to_secret();
                secrets::create(self.client.clone(), &self.namespace, &secret).await?;
                tracing::info!(secret = NAME, "admission certificate made");
                return Ok(true);
            }
            Err(error) => return Err(error.into()),
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
        let is_shown = memory.stored.as_ref().map(|old| &old.current) == Some(&stored.current);
        if !is_shown {
            self.served.show(&stored.current)?;
            tracing::info!("admission certificate served");
        }
        self.authorities.send_if_modified(|old| {
            let changed = old.as_deref() != Some(&*stored.authorities);
            *old = Some((*stored.authorities).into());
            changed
        });
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
                    authorities: bundle::with(&made.authority, &stored.authorities),
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
                authorities: bundle::pruned(&stored.authorities),
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
                authorities: bundle::with(&made.authority, &before.authorities),
                current: before.current.clone(),
                next: Some(made.pair),
            },
        })
    }

    async fn write(&self, seen: &Secret, after: &Stored) -> Result<(), SecretError> {
        let patch = patch::secret(seen, &after.fields());
        secrets::patch::<Secret>(self.client.clone(), &self.namespace, NAME, patch).await
    }
}

fn step(
    stored: &Stored,
    now: SystemTime,
    lifetime: Duration,
    names: &[String],
    settled: bool,
) -> Step {
    if stored.next.is_some() {
        return if settled {
            Step::Promote
        } else {
            Step::Nothing
        };
    }
    let left = stored
        .current
        .expires()
        .and_then(|at| at.duration_since(now).ok());
    let left = left.unwrap_or_default();
    // One that lasts much longer was made when more was allowed.
    if left < lifetime / 3 || left > lifetime * 2 || !stored.current.is_for(names) {
        Step::Prepare
    } else if bundle::pruned(&stored.authorities) != stored.authorities {
        Step::Prune
    } else {
        Step::Nothing
    }
}

impl Stored {
    fn parse(secret: &Secret) -> Option<Self> {
        let data = secret.data.as_ref()?;
        let text = |name: &str| String::from_utf8(data.get(name)?.0.clone()).ok();
        let pair = |certificate, key| {
            Some(Pair {
                certificate: text(certificate)?,
                key: text(key)?,
            })
        };
        Some(Self {
            authorities: text(AUTHORITIES)?,
            current: pair(CERTIFICATE, KEY)?,
            next: pair(NEXT_CERTIFICATE, NEXT_KEY).filter(|next| next.load().is_ok()),
        })
    }

    fn is_usable(&self) -> bool {
        let now = SystemTime::now();
        self.current.expires().is_some_and(|at| at > now)
            && self.current.load().is_ok()
            && self.current.is_of(&bundle::pruned(&self.authorities))
    }

    fn fields(&self) -> BTreeMap<&'static str, Option<&str>> {
        let next = self.next.as_ref();
        BTreeMap::from([
            (AUTHORITIES, Some(&*self.authorities)),
            (CERTIFICATE, Some(&*self.current.certificate)),
            (KEY, Some(&*self.current.key)),
            (NEXT_CERTIFICATE, next.map(|next| &*next.certificate)),
            (NEXT_KEY, next.map(|next| &*next.key)),
        ])
    }

    fn to_secret(&self) -> Secret {
        let fields = self.fields().into_iter();
        let data = fields.filter_map(|(name, text)| {
            Some((name.to_owned(), ByteString(text?.as_bytes().to_vec())))
        });
        Secret {
            metadata: ObjectMeta {
                name: Some(NAME.to_owned()),
                labels: Some(crate::admission::labels()),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            data: Some(data.collect()),
            ..Secret::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn made(names: &[String], at: SystemTime) -> Stored {
        let made = issue(names, at, 3 * HOUR).unwrap();
        Stored {
            authorities: bundle::with(&made.authority, ""),
            current: made.pair,
            next: None,
        }
    }

    #[test]
    fn a_certificate_is_replaced_in_two_steps() {
        let names = ["archaware.ns.svc".to_owned(), "127.0.0.1".to_owned()];
        let now = SystemTime::now();
        let mut stored = made(&names, now);
        assert!(stored.is_usable());
        let run = |stored: &Stored, at, names: &[String], settled| {
            step(stored, at, 3 * HOUR, names, settled)
        };
        assert_eq!(run(&stored, now + HOUR, &names, false), Step::Nothing);
        assert_eq!(
            run(&stored, now + 2 * HOUR + HOUR / 2, &names, false),
            Step::Prepare
        );
        assert_eq!(
            run(&stored, now, &["other.svc".to_owned()], true),
            Step::Prepare
        );
        assert_eq!(
            step(&stored, now, HOUR, &names, true),
            Step::Prepare,
            "a shorter lifetime"
        );
        stored.next = Some(stored.current.clone());
        assert_eq!(run(&stored, now + 4 * HOUR, &names, false), Step::Nothing);
        assert_eq!(run(&stored, now, &names, true), Step::Promote);
        let expired = made(&names, now - 5 * HOUR);
        assert!(!expired.is_usable());
        stored.next = None;
        stored
            .authorities
            .push_str(&issue(&names, now - 5 * HOUR, HOUR).unwrap().authority);
        assert_eq!(run(&stored, now, &names, true), Step::Prune);
    }

    #[test]
    fn the_secret_holds_it_and_shows_no_key() {
        let stored = made(&["a.svc".to_owned()], SystemTime::now());
        assert_eq!(Stored::parse(&stored.to_secret()), Some(stored.clone()));
        assert!(!format!("{stored:?}").contains("PRIVATE"), "{stored:?}");
        assert_eq!(Stored::parse(&Secret::default()), None);
        let mut other = stored.clone();
        other.current.key = made(&["a.svc".to_owned()], SystemTime::now()).current.key;
        assert!(!other.is_usable(), "a key of another certificate");
        let mut other = stored.clone();
        other.authorities = made(&["a.svc".to_owned()], SystemTime::now() - HOUR).authorities;
        assert!(!other.is_usable(), "an authority of another certificate");
    }
}
