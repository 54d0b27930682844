//! Removes archaware's own objects: the webhook configuration, the Secret with its certificate, and
//! the Lease.

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Secret};
use kube::Resource;
use tokio::time::Instant;

use crate::{
    admission,
    cluster::{
        ADMISSION_SECRET, NAME,
        api::{ApiError, ApiObject},
        lease::fresh_holder,
        name::NamespacedName,
        objects::MutatingWebhookConfiguration,
    },
};

use super::{CleanedObject, Session};

/// The kind and name of the webhook configuration, as in `Session::failed`.
pub(super) fn registration() -> (String, NamespacedName) {
    let kind = MutatingWebhookConfiguration::kind(&());
    (kind.to_string(), NamespacedName::cluster(NAME))
}

impl Session {
    /// Removes the webhook configuration. `clean` does this first, so that the API server stops
    /// calling the webhook.
    pub(super) async fn remove_configuration(&mut self) {
        let removed = admission::remove_configuration(&self.api, self.dry_run).await;
        if removed == Ok(true) && !self.dry_run {
            self.unregistered = Some(Instant::now());
        }
        if removed.is_err() {
            self.failed.insert(registration());
        }
        self.report(format!("MutatingWebhookConfiguration {NAME}"), removed);
    }

    /// Removes the Secret if archaware created it: one of that name may belong to another owner.
    pub(super) async fn remove_secret(&mut self) {
        let name = NamespacedName::new(&self.namespace, ADMISSION_SECRET);
        let removed = match self.api.find_metadata::<Secret>(&name).await {
            Ok(Some(found)) => {
                let labels = found.labels.unwrap_or_default();
                let by = labels.get("app.kubernetes.io/managed-by");
                if by.is_some_and(|by| by == NAME) {
                    self.delete::<Secret>(&name).await
                } else {
                    Ok(false)
                }
            }
            Ok(None) => Ok(false),
            Err(error) => Err(error),
        };
        self.report(format!("Secret {name}"), removed);
    }

    /// Removes the Lease, unless it has a holder again or the next run needs it. Reports the
    /// removal only if the Lease existed before this command.
    pub(super) async fn remove_lease(&mut self, was_there: bool) {
        if self.is_record_left {
            return;
        }
        let name = NamespacedName::new(&self.namespace, NAME);
        let held = self.api.find::<Lease>(&name).await;
        let holder = held.map(|lease| lease.as_ref().and_then(fresh_holder));
        if let Ok(Some(holder)) = holder.as_ref().map(Option::as_ref)
            && !self.dry_run
        {
            let why =
                format!("{holder} holds it: archaware runs again; run clean --stop-controller");
            self.remaining.push(format!("Lease {name} ({why})"));
            return;
        }
        let removed = self.delete::<Lease>(&name).await;
        let removed = removed.map(|removed| removed && was_there);
        self.report(format!("Lease {name}"), removed);
    }

    /// Deletes an object and returns whether it existed.
    async fn delete<K: ApiObject>(&self, name: &NamespacedName) -> Result<bool, ApiError> {
        if self.dry_run {
            return Ok(self.api.find_metadata::<K>(name).await?.is_some());
        }
        self.api.delete::<K>(name, None).await
    }

    fn report(&mut self, what: String, removed: Result<bool, ApiError>) {
        let outcome = match removed {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        self.progress.expect(1);
        self.progress.report(&what, &outcome, self.dry_run);
        self.count(CleanedObject { what, outcome });
    }
}
