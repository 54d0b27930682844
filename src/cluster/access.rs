//! Which permissions archaware needs, and whether it has them.

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::{Api, Client, api::PostParams};

use crate::config::{Config, DaemonSets};

use super::{ADMISSION_SECRET, CALL_TIMEOUT, NAME};

/// Reviews under way at once: there are about twenty in all.
const AT_ONCE: usize = 8;

/// One permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permission {
    /// API group; empty for core.
    pub group: &'static str,
    /// Plural name.
    pub resource: &'static str,
    /// Verb.
    pub verb: &'static str,
    /// In this namespace only; `None` means all, or no namespace.
    pub namespace: Option<String>,
    /// On the object of this name only.
    pub name: Option<&'static str>,
}

/// The check itself failed.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The API server cannot be asked.
    #[error("cannot ask the API server for archaware's own permissions")]
    Ask(#[from] kube::Error),
    /// No answer.
    #[error("the API server did not answer within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut,
}

/// What `run` needs.
pub fn needed(namespace: &str, config: &Config) -> Vec<Permission> {
    let everywhere = |group, resource, verbs: &[&'static str]| {
        verbs
            .iter()
            .map(move |verb| Permission {
                group,
                resource,
                verb,
                namespace: None,
                name: None,
            })
            .collect::<Vec<_>>()
    };
    let daemon_sets: &[_] = if config.daemon_sets == DaemonSets::Manage {
        &["list", "watch", "patch"]
    } else {
        &["list", "watch"]
    };
    let lease = |verb, name| Permission {
        group: "coordination.k8s.io",
        resource: "leases",
        verb,
        namespace: Some(namespace.to_owned()),
        name,
    };
    let admission = admission(namespace, config);
    [
        everywhere("", "nodes", &["list", "watch", "patch"]),
        everywhere("", "pods", &["list", "watch", "patch"]),
        everywhere("", "namespaces", &["list", "watch"]),
        everywhere("apps", "daemonsets", daemon_sets),
        everywhere("events.k8s.io", "events", &["create"]),
        // The name of an object is not known to the authoriser when it is created.
        vec![
            lease("create", None),
            lease("get", Some(NAME)),
            lease("patch", Some(NAME)),
        ],
        admission,
    ]
    .concat()
}

/// What the webhook needs besides.
fn admission(namespace: &str, config: &Config) -> Vec<Permission> {
    let admission = &config.admission;
    let files = &admission.certificates;
    let own_certificate = files.certificate.as_os_str().is_empty();
    let tells = own_certificate || !files.authority.as_os_str().is_empty();
    // The name of an object is not known to the authoriser when it is created.
    let configuration = |verb| Permission {
        group: "admissionregistration.k8s.io",
        resource: "mutatingwebhookconfigurations",
        verb,
        namespace: None,
        name: (verb != "create").then_some(NAME),
    };
    let secret = |verb| Permission {
        group: "",
        resource: "secrets",
        verb,
        namespace: Some(namespace.to_owned()),
        name: (verb != "create").then_some(ADMISSION_SECRET),
    };
    let (mut needed, all) = (Vec::new(), ["create", "get", "patch"]);
    if admission.enabled && admission.manage_configuration {
        needed.extend(["create", "get", "patch", "delete"].map(configuration));
    } else if admission.enabled && tells {
        needed.extend(["get", "patch"].map(configuration));
    }
    if admission.enabled && own_certificate {
        needed.extend(all.map(secret));
    }
    needed
}

/// What makes every pod's pull secrets readable. Without it, only those in namespaces whose owners allow
/// it are.
pub fn pull_secrets() -> Vec<Permission> {
    vec![Permission {
        group: "",
        resource: "secrets",
        verb: "get",
        namespace: None,
        name: None,
    }]
}

/// Those of `permissions` that this client lacks.
pub async fn lacking(
    client: &Client,
    permissions: Vec<Permission>,
) -> Result<Vec<Permission>, AccessError> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let asked = stream::iter(permissions).map(|permission| {
        let reviews = reviews.clone();
        async move {
            let review = SelfSubjectAccessReview {
                spec: SelfSubjectAccessReviewSpec {
                    resource_attributes: Some(permission.attributes()),
                    ..SelfSubjectAccessReviewSpec::default()
                },
                ..SelfSubjectAccessReview::default()
            };
            let parameters = PostParams::default();
            let call = reviews.create(&parameters, &review);
            let answer = tokio::time::timeout(CALL_TIMEOUT, call)
                .await
                .map_err(|_| AccessError::TimedOut)??;
            let allowed = answer.status.is_some_and(|status| status.allowed);
            Ok((!allowed).then_some(permission))
        }
    });
    asked
        .buffered(AT_ONCE)
        .try_filter_map(|lacking| std::future::ready(Ok(lacking)))
        .try_collect()
        .await
}

impl Permission {
    fn attributes(&self) -> ResourceAttributes {
        ResourceAttributes {
            group: Some(self.group.to_owned()),
            resource: Some(self.resource.to_owned()),
            verb: Some(self.verb.to_owned()),
            namespace: self.namespace.clone(),
            name: self.name.map(str::to_owned),
            ..ResourceAttributes::default()
        }
    }
}

/// `patch nodes`, `create leases.coordination.k8s.io in archaware`
impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        self.namespace
            .as_ref()
            .map_or(Ok(()), |namespace| write!(f, " in {namespace}"))
    }
}
