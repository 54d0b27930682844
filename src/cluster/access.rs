//! Checks archaware's own permissions by `SelfSubjectAccessReview`.

use super::api::{ApiClient, ApiError};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};

/// Concurrent reviews; there are about twenty in all.
const CONCURRENCY: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permission {
    /// API group; empty for core.
    pub group: &'static str,
    /// Plural name, and a subresource after a slash.
    pub resource: &'static str,
    pub verb: &'static str,
    /// Limited to this namespace; `None` means all namespaces, or a kind without namespaces.
    pub namespace: Option<String>,
    /// Limited to the object of this name.
    pub name: Option<&'static str>,
}

/// The `permissions` that this client does not have.
///
/// # Errors
///
/// When a review fails.
pub async fn missing(
    api: &ApiClient,
    permissions: Vec<Permission>,
) -> Result<Vec<Permission>, ApiError> {
    let reviews = stream::iter(permissions).map(|permission| async move {
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(permission.attributes()),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let answer: SelfSubjectAccessReview = api
            .create::<SelfSubjectAccessReview, _>(None, &review)
            .await?;
        let allowed = answer.status.is_some_and(|status| status.allowed);
        Ok((!allowed).then_some(permission))
    });
    reviews
        .buffered(CONCURRENCY)
        .try_filter_map(|missing| std::future::ready(Ok(missing)))
        .try_collect()
        .await
}

impl Permission {
    fn attributes(&self) -> ResourceAttributes {
        let parts = self.resource.split_once('/');
        let (resource, subresource) = parts.unwrap_or((self.resource, ""));
        ResourceAttributes {
            group: Some(self.group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource: Some(subresource.to_owned()),
            verb: Some(self.verb.to_owned()),
            namespace: self.namespace.clone(),
            name: self.name.map(str::to_owned),
            ..ResourceAttributes::default()
        }
    }
}

/// For example `patch nodes` or `create leases.coordination.k8s.io in archaware`.
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
