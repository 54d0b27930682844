//! archaware's own objects: the webhook configuration, the Secret of its certificate, the Lease.

use std::{collections::BTreeMap, time::Instant};

use k8s_openapi::{
    NamespaceResourceScope,
    api::{coordination::v1::Lease, core::v1::Secret},
};
use kube::{Api, Resource, ResourceExt, api::DeleteParams};
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
        if matches!(removed, Ok(true)) && !self.dry_run {
            self.unasked_since = Some(Instant::now());
        }
        self.told(format!("MutatingWebhookConfiguration {NAME}"), removed);
    }

    /// One that archaware has made: of that name there may be somebody else's.
    pub(super) async fn secret(&mut self) {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let made = |labels: &BTreeMap<String, String>| {
            let by = labels.get("app.kubernetes.io/managed-by");
            by.is_some_and(|name| name == NAME)
        };
        let removed = match api.get_metadata_opt(ADMISSION_SECRET).await {
            Ok(Some(found)) if made(found.labels()) => {
                self.delete::<Secret>(ADMISSION_SECRET).await
            }
            Ok(_) => Ok(false),
            Err(error) => Err(error),
        };
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
