//! Maintains the `MutatingWebhookConfiguration`: which requests the API server sends to the webhook, where to, and
//! which authorities it trusts. Every webhook in it has `failurePolicy: Ignore`.

mod webhooks;

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhook;
use kube::ResourceExt;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        NAME,
        api::{ApiClient, ApiError},
        name::NamespacedName,
        objects::MutatingWebhookConfiguration,
        patch,
    },
    config::Config,
    error::RepeatedError,
    metrics::AdmissionMetrics,
};

use super::{
    ca_bundle::{self, CaBundle, Published},
    certificate::CertResolver,
};

/// How often the configuration is checked. While another writer's change is in place, pods are not sent to the
/// webhook and the controller completes them.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Maintains the configuration while this process leads.
pub(super) struct ConfigurationReconciler {
    pub(super) api: ApiClient,
    pub(super) config: Arc<Config>,
    pub(super) namespace: String,
    pub(super) leadership: watch::Receiver<bool>,
    pub(super) authorities: watch::Receiver<CaBundle>,
    pub(super) published: watch::Sender<Published>,
    /// Before there is a certificate, the webhook must not be registered.
    pub(super) served: Arc<CertResolver>,
    /// Tells whether it is registered.
    pub(super) metrics: AdmissionMetrics,
}

fn name() -> NamespacedName {
    NamespacedName::cluster(NAME)
}

impl ConfigurationReconciler {
    /// Runs until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let keeping = async {
            let (mut failing, mut warned) = (RepeatedError::default(), false);
            loop {
                if !*self.leadership.borrow() {
                    self.metrics.set_registered(false);
                }
                if self.leadership.wait_for(|leading| *leading).await.is_err() {
                    return;
                }
                self.served.wait_until_available().await;
                let authorities = self.authorities.borrow_and_update().clone();
                match self.reconcile(authorities).await {
                    Ok(published) => {
                        let managed = self.config.admission.manage_configuration;
                        let found = matches!(published, Published::Bundle(_));
                        self.metrics.set_registered(managed || found);
                        let unknown =
                            published == Published::NoBundle && self.maintains_only_ca_bundle();
                        if unknown && !warned {
                            tracing::warn!(
                                "there is no MutatingWebhookConfiguration {NAME}, and \
                                 admission.manageConfiguration is false: the API server does not call the webhook"
                            );
                        }
                        warned = unknown;
                        self.published.send_if_modified(|old| {
                            let changed = *old != published;
                            *old = published;
                            changed
                        });
                        failing.clear();
                    }
                    Err(error) => {
                        if let Some(error) = failing.changed(&error) {
                            tracing::warn!(
                                error,
                                "cannot maintain the webhook configuration; trying again"
                            );
                        }
                    }
                }
                tokio::select! {
                    _ = self.authorities.changed() => {}
                    () = tokio::time::sleep(if failing.is_set() { CHECK_INTERVAL / 10 } else { CHECK_INTERVAL }) => {}
                }
            }
        };
        stop.run_until_cancelled(keeping).await;
    }

    /// Whether the `caBundle` of a configuration that the user maintains is filled in.
    fn maintains_only_ca_bundle(&self) -> bool {
        let admission = &self.config.admission;
        let own = admission.certificates.certificate.as_os_str().is_empty();
        own && !admission.manage_configuration
    }

    async fn reconcile(&self, authorities: CaBundle) -> Result<Published, ApiError> {
        let manages = self.config.admission.manage_configuration;
        if !manages && authorities.is_none() {
            return Ok(Published::NoBundle);
        }
        let found: Option<MutatingWebhookConfiguration> = self.api.find(&name()).await?;
        // archaware's own authorities are stored in the Secret; those from files are only known here.
        let from_files = !self
            .config
            .admission
            .certificates
            .certificate
            .as_os_str()
            .is_empty();
        let authorities = match (&authorities, &found) {
            (Some(new), Some(found)) if from_files => Some(merged(new, found)),
            _ => authorities,
        };
        let published = authorities
            .clone()
            .map_or(Published::NoBundle, Published::Bundle);
        if !manages {
            let Some(found) = found else {
                tracing::debug!(name = NAME, "there is no webhook configuration");
                return Ok(Published::NoBundle);
            };
            if let Some(authorities) = &authorities {
                self.inject_ca_bundle(&found, authorities).await?;
            }
            return Ok(published);
        }
        let wanted =
            webhooks::desired_webhooks(&self.config, &self.namespace, authorities.as_deref());
        let Some(found) = found else {
            let object = json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": { "name": NAME, "labels": super::labels() },
                "webhooks": wanted,
            });
            self.api
                .create::<MutatingWebhookConfiguration, IgnoredAny>(None, &object)
                .await?;
            tracing::info!(name = NAME, "webhook configuration created");
            return Ok(published);
        };
        // What cannot be parsed is replaced.
        let existing = Value::Array(found.webhooks.clone().unwrap_or_default());
        let existing: Vec<MutatingWebhook> = serde_json::from_value(existing).unwrap_or_default();
        if let Some(wanted) = webhooks::correct(&existing, wanted) {
            let patch = patch::webhooks(&found, json!(wanted), &super::labels());
            self.api
                .patch::<MutatingWebhookConfiguration>(&name(), patch)
                .await?;
            tracing::info!(name = NAME, "webhook configuration corrected");
        }
        Ok(published)
    }

    /// Writes the `caBundle` only; the rest of the configuration is the user's.
    async fn inject_ca_bundle(
        &self,
        found: &MutatingWebhookConfiguration,
        authorities: &str,
    ) -> Result<(), ApiError> {
        let patch = patch::ca_bundle(found, &STANDARD.encode(authorities));
        if !patch.is_empty() {
            self.api
                .patch::<MutatingWebhookConfiguration>(&name(), patch)
                .await?;
            tracing::info!(
                name = NAME,
                "caBundle written into the webhook configuration"
            );
        }
        Ok(())
    }
}

/// An authority with the published ones that have not expired: another replica may still serve a certificate that
/// they signed.
fn merged(authority: &str, found: &MutatingWebhookConfiguration) -> Arc<str> {
    let webhook = found.webhooks.as_ref().and_then(|all| all.first());
    let published = webhook
        .and_then(|webhook| webhook.pointer("/clientConfig/caBundle")?.as_str())
        .and_then(|text| STANDARD.decode(text).ok());
    let published = published.and_then(|bytes| String::from_utf8(bytes).ok());
    ca_bundle::with_authority(authority, &published.unwrap_or_default()).into()
}

/// Which configuration to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalScope {
    /// One that archaware created.
    CreatedByArchaware,
    /// Also one from the manifests.
    AlsoFromManifests,
}

/// The configuration, if archaware owns it.
async fn find(
    api: &ApiClient,
    origin: RemovalScope,
) -> Result<Option<MutatingWebhookConfiguration>, ApiError> {
    let found = api.find::<MutatingWebhookConfiguration>(&name()).await?;
    // A configuration of this name may belong to another owner.
    let label = match origin {
        RemovalScope::CreatedByArchaware => "app.kubernetes.io/managed-by",
        RemovalScope::AlsoFromManifests => "app.kubernetes.io/name",
    };
    Ok(found.filter(|found| found.labels().get(label).is_some_and(|name| name == NAME)))
}

async fn delete(api: &ApiClient, found: MutatingWebhookConfiguration) -> Result<bool, ApiError> {
    api.delete::<MutatingWebhookConfiguration>(&name(), found.metadata.uid)
        .await
}

/// Removes the configuration and returns whether it existed. A dry run only checks.
///
/// # Errors
///
/// When the API server cannot be asked or refuses.
pub async fn remove(
    api: &ApiClient,
    origin: RemovalScope,
    dry_run: bool,
) -> Result<bool, ApiError> {
    match find(api, origin).await? {
        Some(found) if !dry_run => delete(api, found).await,
        found => Ok(found.is_some()),
    }
}

/// How often it is searched for: during a rolling update an old replica may create it again.
const REMOVE_ATTEMPTS: usize = 10;

/// Removes the configuration after the webhook was disabled, so that the API server does not call a webhook that is
/// not served.
pub async fn remove_stale(api: ApiClient, mut leadership: watch::Receiver<bool>) {
    for _ in 0..REMOVE_ATTEMPTS {
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        match find(&api, RemovalScope::CreatedByArchaware).await {
            Ok(None) => {}
            Ok(Some(found)) => match delete(&api, found).await {
                Ok(_) => tracing::info!(
                    name = NAME,
                    "admission is disabled: webhook configuration removed"
                ),
                Err(ApiError::Forbidden(_)) => {
                    tracing::warn!(
                        "admission is off, and its configuration may not be removed: \
                         kubectl delete mutatingwebhookconfiguration {NAME}"
                    );
                    return;
                }
                Err(error) => tracing::warn!(
                    %error,
                    "admission is disabled, but its webhook configuration cannot be removed"
                ),
            },
            // An installation that never had a webhook does not need the permission.
            Err(ApiError::Forbidden(_)) => {
                tracing::info!(
                    "admission is disabled; no permission to check for an old webhook configuration"
                );
                return;
            }
            Err(error) => tracing::warn!(
                %error,
                "admission is disabled, but its webhook configuration cannot be read"
            ),
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}
