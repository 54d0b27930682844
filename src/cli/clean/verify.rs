//! Lists the objects again after the removal: an object that came back shows that an archaware
//! still runs, or runs again.

use futures::TryStreamExt;

use crate::{
    admission,
    cluster::{
        NAME,
        api::{ApiClient, ApiError, ApiObject},
        name::NamespacedName,
        objects::{DaemonSet, Deployment, Node},
    },
    placement::annotation,
};

use super::{Session, installation::registration, objects::has_record};

const CAME_BACK: &str = "came back: archaware runs again or in another namespace; name that with --namespace, or run clean --stop-controller";

/// `spec.replicas` of archaware's Deployment; `None` if the Deployment does not exist or may not be
/// read.
async fn replicas(api: &ApiClient, name: &NamespacedName) -> Result<Option<i32>, ApiError> {
    match api.find::<Deployment>(name).await {
        Ok(found) => Ok(found.map(|found| found.spec.replicas.unwrap_or(1))),
        Err(ApiError::Forbidden(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Session {
    /// Removes gates that pods have received meanwhile, and lists the objects that came back.
    pub(super) async fn verify(&mut self) -> anyhow::Result<()> {
        // A pod may have received a gate while it was being created when the configuration was
        // removed.
        if self.unregistered.is_some() {
            self.wait_until_not_asked().await;
            self.remove_gates().await?;
        }
        self.find_records::<Node>(annotation::TAINT, "taint")
            .await?;
        self.find_records::<DaemonSet>(annotation::TOLERATIONS, "tolerations")
            .await?;
        if !self.failed.contains(&registration())
            && admission::remove_configuration(&self.api, true).await?
        {
            let what = format!("MutatingWebhookConfiguration {NAME} ({CAME_BACK})");
            self.remaining.push(what);
        }
        Ok(())
    }

    /// Reports the Deployment if it has replicas: as soon as they run, they restore everything.
    /// Another user may have scaled it up meanwhile.
    pub(super) async fn find_replicas(&mut self) -> anyhow::Result<()> {
        let name = NamespacedName::new(&self.namespace, NAME);
        let found = replicas(&self.api, &name).await?.unwrap_or_default();
        if found > 0 && !self.dry_run {
            self.remaining.push(format!(
                "Deployment {name} (replicas: {found}; running replicas restore everything: run clean --stop-controller)"
            ));
        }
        Ok(())
    }

    /// Reports objects that carry this record again, except objects that `clean` could not change.
    async fn find_records<K>(&mut self, record: &'static str, what: &str) -> Result<(), ApiError>
    where
        K: ApiObject + Clone + serde::de::DeserializeOwned + Send + 'static,
    {
        let found: Vec<NamespacedName> = self
            .api
            .list(None)
            .try_filter_map(|object: K| {
                let name = has_record(&object, record).then(|| NamespacedName::of_object(&object));
                std::future::ready(Ok(name))
            })
            .try_collect()
            .await?;
        let kind = K::kind(&());
        for name in found {
            if !self.failed.contains(&(kind.to_string(), name.clone())) {
                self.is_record_left = true;
                self.remaining
                    .push(format!("{kind} {name} (its {what} {CAME_BACK})"));
            }
        }
        Ok(())
    }
}
