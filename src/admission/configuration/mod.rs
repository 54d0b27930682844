//! The `MutatingWebhookConfiguration`: what the API server asks the webhook about, where it finds it, and
//! whom it trusts. Everything in it fails open.

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
};

use super::{
    ca_bundle::{self, Authorities, Published},
    certificate::Served,
};

/// How often the configuration is looked at. Until somebody's change of it is put right, pods go unasked:
/// the controller completes them.
const PERIOD: Duration = Duration::from_secs(30);
/// Keeps the configuration while this process leads.
pub(super) struct Keeper {
    pub(super) api: ApiClient,
    pub(super) config: Arc<Config>,
    pub(super) namespace: String,
    pub(super) leadership: watch::Receiver<bool>,
    pub(super) authorities: watch::Receiver<Authorities>,
    pub(super) published: watch::Sender<Published>,
    /// The certificate: before there is one, no request is to be sent here.
    pub(super) served: Arc<Served>,
}

fn name() -> NamespacedName {
    NamespacedName::cluster(NAME)
}

impl Keeper {
    /// Runs until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let keeping = async {
            let (mut failing, mut warned) = (RepeatedError::default(), false);
            loop {
                if self.leadership.wait_for(|leading| *leading).await.is_err() {
                    return;
                }
                self.served.is_there().await;
                let authorities = self.authorities.borrow_and_update().clone();
                match self.keep(authorities).await {
                    Ok(published) => {
                        let unknown = published == Published::Nowhere && self.is_told();
                        if unknown && !warned {
                            tracing::warn!(
                                "there is no MutatingWebhookConfiguration {NAME}, and \
                                 admission.manageConfiguration is false: nobody asks the webhook"
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
                            tracing::warn!(error, "webhook configuration not kept; trying again");
                        }
                    }
                }
                tokio::select! {
                    _ = self.authorities.changed() => {}
                    () = tokio::time::sleep(if failing.is_set() { PERIOD / 10 } else { PERIOD }) => {}
                }
            }
        };
        stop.run_until_cancelled(keeping).await;
    }

    /// Whether a configuration of the user's own is told whom to trust.
    fn is_told(&self) -> bool {
        let admission = &self.config.admission;
        let own = admission.certificates.certificate.as_os_str().is_empty();
        own && !admission.manage_configuration
    }

    async fn keep(&self, authorities: Authorities) -> Result<Published, ApiError> {
        let manages = self.config.admission.manage_configuration;
        if !manages && authorities.is_none() {
            return Ok(Published::Nowhere);
        }
        let found: Option<MutatingWebhookConfiguration> = self.api.find(&name()).await?;
        // The Secret remembers archaware's own authorities; those of files are remembered here.
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
            .map_or(Published::Nowhere, Published::Bundle);
        if !manages {
            let Some(found) = found else {
                tracing::debug!(name = NAME, "there is no webhook configuration");
                return Ok(Published::Nowhere);
            };
            if let Some(authorities) = &authorities {
                self.tell_authorities(&found, authorities).await?;
            }
            return Ok(published);
        }
        let wanted = webhooks::wanted(&self.config, &self.namespace, authorities.as_deref());
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
        // What cannot be read is not right.
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

    /// The configuration is the user's; the authorities of a certificate that archaware makes are not.
    async fn tell_authorities(
        &self,
        found: &MutatingWebhookConfiguration,
        authorities: &str,
    ) -> Result<(), ApiError> {
        let patch = patch::authorities(found, &STANDARD.encode(authorities));
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

/// An authority, and those that are published already and have not expired: another replica may still serve
/// what they have signed.
fn merged(authority: &str, found: &MutatingWebhookConfiguration) -> Arc<str> {
    let webhook = found.webhooks.as_ref().and_then(|all| all.first());
    let published = webhook
        .and_then(|webhook| webhook.pointer("/clientConfig/caBundle")?.as_str())
        .and_then(|text| STANDARD.decode(text).ok());
    let published = published.and_then(|bytes| String::from_utf8(bytes).ok());
    ca_bundle::with(authority, &published.unwrap_or_default()).into()
}

/// Whose configuration is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// One that archaware has made.
    Made,
    /// Also one of the manifests.
    Shipped,
}

/// The configuration, if it is archaware's.
async fn find(
    api: &ApiClient,
    whose: Whose,
) -> Result<Option<MutatingWebhookConfiguration>, ApiError> {
    let found = api.find::<MutatingWebhookConfiguration>(&name()).await?;
    // One of that name may be somebody else's.
    let label = match whose {
        Whose::Made => "app.kubernetes.io/managed-by",
        Whose::Shipped => "app.kubernetes.io/name",
    };
    Ok(found.filter(|found| found.labels().get(label).is_some_and(|name| name == NAME)))
}

async fn delete(api: &ApiClient, found: MutatingWebhookConfiguration) -> Result<bool, ApiError> {
    api.delete::<MutatingWebhookConfiguration>(&name(), found.metadata.uid)
        .await
}

/// Removes the configuration; whether it was there. A dry run only looks.
pub async fn remove(api: &ApiClient, whose: Whose, dry_run: bool) -> Result<bool, ApiError> {
    match find(api, whose).await? {
        Some(found) if !dry_run => delete(api, found).await,
        found => Ok(found.is_some()),
    }
}

/// How often it is looked for: while replicas are replaced one by one, an old one may make it again.
const WITHDRAWALS: usize = 10;

/// Admission is switched off: what archaware has made before must not send the API server to a closed door.
pub async fn withdraw(api: ApiClient, mut leadership: watch::Receiver<bool>) {
    for _ in 0..WITHDRAWALS {
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        match find(&api, Whose::Made).await {
            Ok(None) => {}
            Ok(Some(found)) => match delete(&api, found).await {
                Ok(_) => tracing::info!(
                    name = NAME,
                    "admission is off: webhook configuration removed"
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
                    "admission is off, and its configuration cannot be removed"
                ),
            },
            // An installation that never had a webhook does not need the permission.
            Err(ApiError::Forbidden(_)) => {
                tracing::info!("admission is off; whether it is still registered cannot be seen");
                return;
            }
            Err(error) => tracing::warn!(
                %error,
                "admission is off, and its configuration cannot be looked for"
            ),
        }
        tokio::time::sleep(PERIOD).await;
    }
}
