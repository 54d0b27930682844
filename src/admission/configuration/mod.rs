//! Corrects the `MutatingWebhookConfiguration` that the manifests create: its request rules, the
//! address of the webhook, and the trusted authorities. archaware never creates it. Every webhook
//! in it has `failurePolicy: Ignore`.

mod webhooks;

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use futures::StreamExt;
use kube::ResourceExt;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        NAME,
        api::{ApiClient, ApiError},
        name::NamespacedName,
        objects::MutatingWebhookConfiguration,
        patch,
        watch::watch_objects,
    },
    config::Config,
    error::RepeatedError,
    metrics::AdmissionMetrics,
    plan::{
        self,
        repairs::{self, Written},
    },
};

use super::{
    ca_bundle::{self, CaBundle, Published},
    certificate::CertResolver,
    webhook::ANSWER_TIME,
};

/// Selects the only object that archaware reads. The authorizer compares this field selector with
/// `resourceNames`.
const FIELDS: &str = "metadata.name=archaware";
/// How often the configuration is checked if its watch reports no change.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The pause after a failed attempt, unless the API server refused the change.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// The pause after the API server rejected the change as invalid. Only another version of archaware
/// or of the object can help.
const REFUSED_INTERVAL: Duration = Duration::from_mins(10);

/// Maintains the configuration while this process leads.
pub(super) struct ConfigurationReconciler {
    pub(super) api: ApiClient,
    pub(super) config: Arc<Config>,
    pub(super) namespace: String,
    pub(super) leadership: watch::Receiver<bool>,
    pub(super) authorities: watch::Receiver<CaBundle>,
    pub(super) published: watch::Sender<Published>,
    /// Before there is a certificate, the API server must not call the webhook.
    pub(super) served: Arc<CertResolver>,
    /// Shows whether the webhook is registered.
    pub(super) metrics: AdmissionMetrics,
}

/// State between attempts. Logged conditions are kept so that each is logged once. Refusals and the
/// last write decide the pauses.
#[derive(Default)]
struct Maintenance {
    failing: RepeatedError,
    /// Refusals in a row.
    refusals: u32,
    is_missing: bool,
    is_too_short: bool,
    is_reverted: bool,
    written: Option<Written>,
}

/// The webhook configuration that was found, and the action that was taken.
struct Reconciled {
    published: Published,
    /// Whether the configuration exists.
    exists: bool,
    /// The shortest `timeoutSeconds` of archaware's webhooks; `None` if none of them has one.
    timeout: Option<Duration>,
    /// How long to wait before another writer's change is repaired again.
    wait: Option<Duration>,
}

fn name() -> NamespacedName {
    NamespacedName::cluster(NAME)
}

impl ConfigurationReconciler {
    /// Runs until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let keeping = async {
            loop {
                self.metrics.set_registered(None);
                if self.leadership.wait_for(|leading| *leading).await.is_err() {
                    return;
                }
                self.served.wait_until_available().await;
                self.maintain().await;
            }
        };
        stop.run_until_cancelled(keeping).await;
    }

    /// Runs while this process leads. A change of another writer is seen at once.
    async fn maintain(&mut self) {
        let deleted = Arc::new(Notify::new());
        let deletion = deleted.clone();
        let watched = watch_objects::<MutatingWebhookConfiguration>(
            &self.api,
            Some(FIELDS),
            |_, _| false,
            // The stream of changes has no deletions.
            move |_| deletion.notify_one(),
        );
        let mut changes = watched.changes;
        let mut state = Maintenance::default();
        while *self.leadership.borrow_and_update() {
            let authorities = self.authorities.borrow_and_update().clone();
            let pause = match self.reconcile(authorities, &mut state.written).await {
                Ok(done) => {
                    state.warn(&done, self.config.admission.budget);
                    let Reconciled {
                        published,
                        exists,
                        wait,
                        ..
                    } = done;
                    self.metrics.set_registered(Some(exists && wait.is_none()));
                    self.published.send_if_modified(|old| {
                        let changed = *old != published;
                        *old = published;
                        changed
                    });
                    state.failing.clear();
                    state.refusals = 0;
                    wait.unwrap_or(CHECK_INTERVAL)
                }
                Err(error) => {
                    if let Some(error) = state.failing.changed(&error) {
                        tracing::warn!(
                            error,
                            "cannot maintain the webhook configuration; trying again"
                        );
                    }
                    state.pause_after(&error)
                }
            };
            tokio::select! {
                _ = changes.next() => {}
                () = deleted.notified() => {}
                _ = self.authorities.changed() => {}
                _ = self.leadership.changed() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn reconcile(
        &self,
        authorities: CaBundle,
        written: &mut Option<Written>,
    ) -> Result<Reconciled, ApiError> {
        let admission = &self.config.admission;
        let found: Option<MutatingWebhookConfiguration> = self.api.find(&name()).await?;
        let Some(found) = found else {
            return Ok(Reconciled {
                published: Published::NoBundle,
                exists: false,
                timeout: None,
                wait: None,
            });
        };
        // The Secret stores all authorities that archaware issued. Earlier authorities from files
        // survive a restart only in the published `caBundle`, so the new authority is added to it.
        let from_files = !admission.certificates.certificate.as_os_str().is_empty();
        let authorities = match authorities {
            Some(new) if from_files => Some(merged(&new, &found)),
            authorities => authorities,
        };
        let bundle = authorities.as_ref().map(|text| STANDARD.encode(&**text));
        let existing = found.webhooks.as_deref().unwrap_or_default();
        let patch = if admission.manage_configuration {
            let needed =
                webhooks::desired_webhooks(&self.config, &self.namespace, bundle.as_deref());
            webhooks::correct(existing, needed).map(|webhooks| patch::webhooks(&found, webhooks))
        } else {
            let patch = bundle.map(|bundle| patch::ca_bundle(&found, &bundle));
            patch.filter(|patch| !patch.is_empty())
        };
        let mut wait = None;
        if let Some(patch) = patch {
            let now = Instant::now().into_std();
            let wanted = plan::hash(&authorities);
            match repairs::OF_REGISTRATIONS.next(*written, false, wanted, now) {
                Ok(next) => {
                    self.api
                        .patch::<MutatingWebhookConfiguration>(&name(), patch)
                        .await?;
                    *written = Some(next);
                    tracing::info!(name = NAME, "webhook configuration corrected");
                }
                Err(pause) => {
                    wait = Some(pause);
                }
            }
        }
        Ok(Reconciled {
            published: match authorities {
                // The repair waits, so the `caBundle` may still be another writer's.
                Some(_) if wait.is_some() => Published::Unknown,
                authorities => authorities.map_or(Published::NoBundle, Published::Bundle),
            },
            exists: true,
            timeout: webhooks::shortest_timeout(existing),
            wait,
        })
    }
}

impl Maintenance {
    /// The pause after a failed attempt. A change that a policy or a role refuses is retried with
    /// growing pauses.
    fn pause_after(&mut self, error: &ApiError) -> Duration {
        if !error.is_refusal() {
            self.refusals = 0;
            return RETRY_INTERVAL;
        }
        self.refusals = self.refusals.saturating_add(1);
        error.retry(self.refusals).unwrap_or(REFUSED_INTERVAL)
    }

    /// Warns once about each problem that the administrator has to solve.
    fn warn(&mut self, done: &Reconciled, budget: Duration) {
        let Reconciled {
            exists,
            timeout,
            wait,
            ..
        } = *done;
        if !exists && !self.is_missing {
            tracing::warn!(
                "there is no MutatingWebhookConfiguration {NAME}: the API server does not call the webhook; apply the manifests \
                 again, or set admission.enabled to false"
            );
        }
        self.is_missing = !exists;
        let too_short = timeout.filter(|timeout| *timeout < budget + ANSWER_TIME);
        if let Some(timeout) = too_short
            && !self.is_too_short
        {
            tracing::warn!(
                timeout = timeout.as_secs(),
                "timeoutSeconds of the MutatingWebhookConfiguration {NAME} is too short for admission.budget, so archaware has less \
                 time to read images; raise timeoutSeconds or lower admission.budget"
            );
        }
        self.is_too_short = too_short.is_some();
        if let Some(pause) = wait.filter(|_| !self.is_reverted) {
            tracing::warn!(
                name = NAME,
                pause = pause.as_secs(),
                "another writer changes the webhook configuration again and again; waiting before the next repair"
            );
        }
        self.is_reverted = wait.is_some();
    }
}

/// Adds an authority from a file to the published authorities. These stay until they expire,
/// because a replica may still serve one of their certificates.
fn merged(authority: &str, found: &MutatingWebhookConfiguration) -> Arc<str> {
    let webhook = found
        .webhooks
        .as_ref()
        .and_then(|webhooks| webhooks.first());
    let published = webhook
        .and_then(|webhook| webhook.pointer("/clientConfig/caBundle")?.as_str())
        .and_then(|text| STANDARD.decode(text).ok());
    let published = published.and_then(|bytes| String::from_utf8(bytes).ok());
    ca_bundle::with_authority(authority, &published.unwrap_or_default()).into()
}

/// The configuration, if it has archaware's label: another owner may use the same name.
async fn find(api: &ApiClient) -> Result<Option<MutatingWebhookConfiguration>, ApiError> {
    let found = api.find::<MutatingWebhookConfiguration>(&name()).await?;
    Ok(found.filter(|found| {
        let label = found.labels().get("app.kubernetes.io/name");
        label.is_some_and(|name| name == NAME)
    }))
}

/// Removes the configuration and returns whether it existed. A dry run only checks.
///
/// # Errors
///
/// When the API server cannot be reached, or refuses the request.
pub async fn remove(api: &ApiClient, dry_run: bool) -> Result<bool, ApiError> {
    match find(api).await? {
        Some(found) if !dry_run => {
            let uid = found.metadata.uid;
            api.delete::<MutatingWebhookConfiguration>(&name(), uid)
                .await
        }
        found => Ok(found.is_some()),
    }
}

/// Warns if the webhook is disabled but still registered: the API server then calls a Service that
/// nothing serves.
pub async fn warn_if_registered(api: ApiClient) {
    match find(&api).await {
        Ok(None) => {}
        Ok(Some(_)) => tracing::warn!(
            "admission.enabled is false, but the MutatingWebhookConfiguration {NAME} exists: for each new pod, the API server \
             calls a webhook that nothing serves. Run kubectl delete mutatingwebhookconfiguration {NAME}"
        ),
        // Not a warning: an installation without the webhook does not need the permission.
        Err(error) => tracing::debug!(%error, "cannot look for a webhook configuration"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change that a policy denies is retried after 30 s at first, and after 10 min in the end.
    #[test]
    fn refusals_are_retried_with_growing_pauses() {
        let mut state = Maintenance::default();
        let denied = ApiError::Denied("a policy says no".to_owned());
        let pauses: Vec<u64> = (0..8)
            .map(|_| state.pause_after(&denied).as_secs())
            .collect();
        assert_eq!(pauses, [30, 60, 120, 240, 480, 600, 600, 600]);
        let broken = ApiError::Unreachable("no route".to_owned());
        assert_eq!(state.pause_after(&broken), RETRY_INTERVAL);
        assert_eq!(state.pause_after(&denied).as_secs(), 30);
        let rejected = ApiError::Invalid("no such field".to_owned());
        assert_eq!(state.pause_after(&rejected), REFUSED_INTERVAL);
    }
}
