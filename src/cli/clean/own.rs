//! archaware's own objects: the webhook configuration, the Secret of its certificate, the Lease.

use k8s_openapi::{
    NamespaceResourceScope,
    api::{coordination::v1::Lease, core::v1::Secret},
};
use kube::{Api, Resource, api::DeleteParams};
use serde::de::DeserializeOwned;

use crate::{
    admission,
    cluster::{ADMISSION_SECRET, NAME},
    image::chain,
};

use super::{Item, Session};

impl Session {
    /// So that the API server asks nobody any more.
    pub(super) async fn admission(&mut self) {
        let removed = {
            let (client, whose) = (self.client.clone(), admission::Whose::Shipped);
            admission::remove_configuration(client, whose, self.dry_run).await
        };
        self.told(format!("MutatingWebhookConfiguration {NAME}"), removed);
    }

    pub(super) async fn secret(&mut self) {
        let removed = self.delete::<Secret>(ADMISSION_SECRET).await;
        self.told(
            format!("Secret {}/{ADMISSION_SECRET}", self.namespace),
            removed,
        );
    }

    /// One that was only made for this is not worth a word.
    pub(super) async fn lease(&mut self, was_there: bool) {
        let removed = self.delete::<Lease>(NAME).await;
        let removed = removed.map(|removed| removed && was_there);
        self.told(format!("Lease {}/{NAME}", self.namespace), removed);
    }

    /// Whether it was there.
    async fn delete<K>(&self, name: &str) -> Result<bool, kube::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        if self.dry_run {
            return Ok(api.get_metadata_opt(name).await?.is_some());
        }
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn told(&mut self, what: String, removed: Result<bool, kube::Error>) {
        let outcome = match removed {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(error) => Err(chain(&error)),
        };
        self.progress.expect(1);
        self.progress.report(&what, &outcome, self.dry_run);
        self.count(vec![Item { what, outcome }]);
    }
}
