//! The `MutatingWebhookConfiguration`: what the API server asks the webhook about, where it finds it, and
//! whom it trusts. Everything in it fails open.

mod webhooks;

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{CALL_TIMEOUT, NAME, patch, writer},
    config::Config,
};

use super::certificate::{Authorities, bundle};

/// How often the configuration is looked at. Until somebody's change of it is put right, pods go unasked:
/// the controller completes them.
const PERIOD: Duration = Duration::from_secs(30);
/// What the API server has been told to trust.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Published {
    /// Nobody has looked yet.
    #[default]
    Unknown,
    /// Nothing: there is no configuration.
    Nowhere,
    /// These authorities.
    Bundle(Arc<str>),
}

/// Keeps the configuration while this process leads.
pub(super) struct Keeper {
    pub(super) client: Client,
    pub(super) config: Arc<Config>,
    pub(super) namespace: String,
    pub(super) leadership: watch::Receiver<bool>,
    pub(super) authorities: watch::Receiver<Authorities>,
    pub(super) published: watch::Sender<Published>,
    /// Whether there is a certificate to serve: before that, nobody is to be sent here.
    pub(super) is_served: watch::Receiver<bool>,
}

fn api(client: Client) -> Api<DynamicObject> {
    // As the API holds it: the guard has to match fields that are not known here, too.
    let resource = ApiResource::erase::<MutatingWebhookConfiguration>(&());
    Api::all_with(client, &resource)
}

impl Keeper {
    /// Runs until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let keeping = async {
            let (mut told, mut warned) = (None, false);
            loop {
                if self.leadership.wait_for(|leading| *leading).await.is_err()
                    || self.is_served.wait_for(|served| *served).await.is_err()
                {
                    return;
                }
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
                        told = None;
                    }
                    Err(error) => {
                        let error = words(&error);
                        if told.as_ref() != Some(&error) {
                            tracing::warn!(error, "webhook configuration not kept; trying again");
                            told = Some(error);
                        }
                    }
                }
                tokio::select! {
                    _ = self.authorities.changed() => {}
                    () = tokio::time::sleep(if told.is_some() { PERIOD / 10 } else { PERIOD }) => {}
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

    async fn keep(&self, authorities: Authorities) -> Result<Published, kube::Error> {
        let manages = self.config.admission.manage_configuration;
        if !manages && authorities.is_none() {
            return Ok(Published::Nowhere);
        }
        let api = api(self.client.clone());
        let found = call(api.get_opt(NAME)).await?;
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
                self.tell_authorities(&api, &found, authorities).await?;
            }
            return Ok(published);
        }
        let wanted = webhooks::wanted(&self.config, &self.namespace, authorities.as_deref());
        let Some(found) = found else {
            let mut object = DynamicObject::new(
                NAME,
                &ApiResource::erase::<MutatingWebhookConfiguration>(&()),
            );
            object.metadata.labels = Some(super::labels());
            object.data = json!({ "webhooks": wanted });
            call(api.create(&PostParams::default(), &object)).await?;
            tracing::info!(name = NAME, "webhook configuration created");
            return Ok(published);
        };
        // What cannot be read is not right.
        let existing = found.data.get("webhooks").cloned().unwrap_or_default();
        let existing: Vec<MutatingWebhook> = serde_json::from_value(existing).unwrap_or_default();
        if let Some(wanted) = webhooks::correct(&existing, wanted) {
            self.write(
                &api,
                patch::webhooks(&found, json!(wanted), &super::labels()),
            )
            .await?;
            tracing::info!(name = NAME, "webhook configuration corrected");
        }
        Ok(published)
    }

    /// The configuration is the user's; the authorities of a certificate that archaware makes are not.
    async fn tell_authorities(
        &self,
        api: &Api<DynamicObject>,
        found: &DynamicObject,
        authorities: &str,
    ) -> Result<(), kube::Error> {
        let patch = patch::authorities(found, &STANDARD.encode(authorities));
        if !patch.is_empty() {
            self.write(api, patch).await?;
            tracing::info!(
                name = NAME,
                "caBundle written into the webhook configuration"
            );
        }
        Ok(())
    }

    async fn write(
        &self,
        api: &Api<DynamicObject>,
        patch: patch::JsonPatch,
    ) -> Result<(), kube::Error> {
        let operations = serde_json::from_value(patch.into_operations());
        let patch = Patch::<()>::Json(operations.map_err(kube::Error::SerdeError)?);
        call(api.patch(NAME, &writer::parameters(), &patch))
            .await
            .map(drop)
    }
}

/// What the API server says, without kube's picture of the whole answer.
fn words(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => crate::image::chain(other),
    }
}

/// An authority, and those that are published already and have not expired: another replica may still serve
/// what they have signed.
fn merged(authority: &str, found: &DynamicObject) -> Arc<str> {
    let published = found.data.pointer("/webhooks/0/clientConfig/caBundle");
    let published = published
        .and_then(Value::as_str)
        .and_then(|text| STANDARD.decode(text).ok());
    let published = published.and_then(|bytes| String::from_utf8(bytes).ok());
    bundle::with(authority, &published.unwrap_or_default()).into()
}

async fn call<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let answer = tokio::time::timeout(CALL_TIMEOUT, request).await;
    answer.unwrap_or_else(|_| Err(kube::Error::Service("no answer in time".into())))
}

/// Whose configuration is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// One that archaware has made.
    Made,
    /// Also one of the manifests.
    Shipped,
}

/// Whether the configuration is there; its removal.
pub async fn remove(client: Client, whose: Whose, dry_run: bool) -> Result<bool, kube::Error> {
    let api = api(client);
    let found = call(api.get_opt(NAME)).await?;
    // Somebody else's of that name is somebody else's.
    let label = match whose {
        Whose::Made => "app.kubernetes.io/managed-by",
        Whose::Shipped => "app.kubernetes.io/name",
    };
    let ours = |found: &DynamicObject| found.labels().get(label).is_some_and(|name| name == NAME);
    let Some(found) = found.filter(ours) else {
        return Ok(false);
    };
    if dry_run {
        return Ok(true);
    }
    let parameters = DeleteParams {
        preconditions: Some(Preconditions {
            uid: found.metadata.uid,
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match call(api.delete(NAME, &parameters)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// How often it is looked for: while replicas are replaced one by one, an old one may make it again.
const WITHDRAWALS: usize = 10;

/// Admission is switched off: what archaware has made before must not send the API server to a closed door.
pub async fn withdraw(client: Client, mut leadership: watch::Receiver<bool>) {
    for _ in 0..WITHDRAWALS {
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        match remove(client.clone(), Whose::Made, false).await {
            Ok(true) => {
                tracing::info!(
                    name = NAME,
                    "admission is off: webhook configuration removed"
                );
            }
            Ok(false) => {}
            Err(kube::Error::Api(status)) if status.code == 403 => {
                // Nobody who has never had a webhook needs the permission.
                if status.message.contains("cannot delete") {
                    tracing::warn!(
                        "admission is off, and its configuration may not be removed: \
                         kubectl delete mutatingwebhookconfiguration {NAME}"
                    );
                } else {
                    tracing::info!(
                        "admission is off; whether it is still registered cannot be seen"
                    );
                }
                return;
            }
            Err(error) => {
                let error = crate::image::chain(&error);
                tracing::warn!(
                    error,
                    "admission is off, and its configuration cannot be looked for"
                );
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}
