//! Finds kinds by the names that people type: built-in kinds that run pods in a table, all other
//! kinds through the API discovery of the cluster.

use kube::core::{
    GroupVersionKind,
    discovery::{ApiResource, v2},
};

use super::api::{ApiClient, ApiError};

/// A kind that Kubernetes itself has.
struct KnownKind {
    /// Names that `kubectl` accepts, in lower case; the plural first.
    names: &'static [&'static str],
    group: &'static str,
    kind: &'static str,
}

const fn known(
    names: &'static [&'static str],
    group: &'static str,
    kind: &'static str,
) -> KnownKind {
    KnownKind { names, group, kind }
}

/// The built-in kinds that run pods. All have the version `v1`.
const KNOWN: [KnownKind; 8] = [
    known(&["pods", "pod", "po"], "", "Pod"),
    known(
        &["deployments", "deployment", "deploy"],
        "apps",
        "Deployment",
    ),
    known(&["daemonsets", "daemonset", "ds"], "apps", "DaemonSet"),
    known(
        &["statefulsets", "statefulset", "sts"],
        "apps",
        "StatefulSet",
    ),
    known(&["replicasets", "replicaset", "rs"], "apps", "ReplicaSet"),
    known(
        &["replicationcontrollers", "replicationcontroller", "rc"],
        "",
        "ReplicationController",
    ),
    known(&["jobs", "job"], "batch", "Job"),
    known(&["cronjobs", "cronjob", "cj"], "batch", "CronJob"),
];

/// Why a kind is not found.
#[derive(Debug, thiserror::Error)]
pub enum KindError {
    /// Nothing has this name.
    #[error("this cluster has no kind of object with the name {0:?}")]
    Unknown(String),
    /// The API discovery of the cluster failed.
    #[error("cannot ask the cluster for the kind {0:?}")]
    Discovery(String, #[source] ApiError),
}

impl KnownKind {
    fn resource(&self) -> ApiResource {
        let gvk = GroupVersionKind::gvk(self.group, "v1", self.kind);
        let plural = self.names.first().copied().unwrap_or_default();
        ApiResource::from_gvk_with_plural(&gvk, plural)
    }

    /// Accepts `deploy`, `deployments.apps` and `deployments.v1.apps`.
    fn has_name(&self, name: &str) -> bool {
        let (resource_name, rest) = name.split_once('.').unwrap_or((name, ""));
        let group = match rest {
            "v1" => "",
            rest => rest.strip_prefix("v1.").unwrap_or(rest),
        };
        self.names.contains(&resource_name) && (group.is_empty() || group == self.group)
    }
}

/// The built-in kinds that run pods.
pub fn known_kinds() -> impl Iterator<Item = ApiResource> {
    KNOWN.iter().map(KnownKind::resource)
}

/// Finds a built-in kind that runs pods, by its `kind`.
pub fn known_kind(kind: &str) -> Option<ApiResource> {
    let mut kinds = KNOWN.iter();
    kinds
        .find(|known| known.kind == kind)
        .map(KnownKind::resource)
}

/// Finds a kind by a name that people type: `deploy`, `Deployment`, `rollout`,
/// `rollouts.argoproj.io`.
///
/// # Errors
///
/// When there is no such kind, or when the discovery of the cluster fails.
pub async fn find(api: &ApiClient, name: &str) -> Result<ApiResource, KindError> {
    let wanted = name.to_ascii_lowercase();
    if let Some(known) = KNOWN.iter().find(|known| known.has_name(&wanted)) {
        return Ok(known.resource());
    }
    let groups = discover(api, name).await?;
    let (resource_name, group) = wanted.split_once('.').unwrap_or((&wanted, ""));
    let is_named = |resource: &v2::APIResourceDiscovery| {
        let kind = kind_of(resource).to_ascii_lowercase();
        let plural = resource.resource.as_deref() == Some(resource_name);
        let singular = resource.singular_resource.as_deref() == Some(resource_name);
        plural
            || singular
            || kind == resource_name
            || resource
                .short_names
                .iter()
                .any(|short| short == resource_name)
    };
    let found = resources(&groups).find(|(in_group, _, resource)| {
        (group.is_empty() || group == *in_group) && is_named(resource)
    });
    let resource = found.map(|(group, version, resource)| resource_of(group, version, resource));
    resource.ok_or_else(|| KindError::Unknown(name.to_owned()))
}

/// The plural name with the group, as in messages of the API server: `deployments.apps`.
pub fn describe(resource: &ApiResource) -> String {
    let ApiResource { plural, group, .. } = resource;
    let between = if group.is_empty() { "" } else { "." };
    format!("{plural}{between}{group}")
}

async fn discover(api: &ApiClient, name: &str) -> Result<v2::APIGroupDiscoveryList, KindError> {
    let answer = api.discover().await;
    answer.map_err(|error| KindError::Discovery(name.to_owned(), error))
}

/// All resources with their group and version, the preferred version of a group first.
fn resources(
    groups: &v2::APIGroupDiscoveryList,
) -> impl Iterator<Item = (&str, &str, &v2::APIResourceDiscovery)> {
    groups.items.iter().flat_map(|group| {
        let name = group
            .metadata
            .as_ref()
            .and_then(|metadata| metadata.name.as_deref());
        let versions = group.versions.iter();
        versions.flat_map(move |version| {
            let version_name = version.version.as_deref().unwrap_or_default();
            let resources = version.resources.iter();
            resources.map(move |resource| (name.unwrap_or_default(), version_name, resource))
        })
    })
}

fn kind_of(resource: &v2::APIResourceDiscovery) -> &str {
    let kind = resource.response_kind.as_ref();
    kind.and_then(|kind| kind.kind.as_deref())
        .unwrap_or_default()
}

fn resource_of(group: &str, version: &str, resource: &v2::APIResourceDiscovery) -> ApiResource {
    let gvk = GroupVersionKind::gvk(group, version, kind_of(resource));
    let plural = resource.resource.as_deref().unwrap_or_default();
    ApiResource::from_gvk_with_plural(&gvk, plural)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_kinds_have_the_names_of_kubectl() {
        for (name, kind) in [
            ("po", Some("Pod")),
            ("deploy", Some("Deployment")),
            ("deployments.apps", Some("Deployment")),
            ("deployments.v1.apps", Some("Deployment")),
            ("pods.v1", Some("Pod")),
            ("cj", Some("CronJob")),
            ("deployments.example", None),
            ("rollouts", None),
            ("deploys", None),
        ] {
            let found = KNOWN.iter().find(|known| known.has_name(name));
            assert_eq!(found.map(|known| known.kind), kind, "{name}");
        }
        let resource = known_kind("CronJob").unwrap();
        assert_eq!(resource.plural, "cronjobs");
        assert_eq!(resource.api_version, "batch/v1");
    }
}
