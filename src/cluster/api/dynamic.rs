//! Reads objects whose kind is not known at compile time.

use futures::Stream;
use kube::{
    Resource,
    api::{DynamicObject, GetParams, ListParams},
    core::{
        Request,
        discovery::{ApiResource, v2},
    },
};
use serde_json::Value;

use super::{ApiClient, ApiError, MAX_OBJECT, NamespacedName, check, found};

/// Maximum bytes of the discovery of a cluster with thousands of custom resources, about 2 KiB
/// each.
const MAX_DISCOVERY: usize = 16 << 20;

impl ApiClient {
    /// Reads an object of any kind; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// When the call fails in any other way than 404.
    pub async fn find_dynamic(
        &self,
        resource: &ApiResource,
        name: &NamespacedName,
    ) -> Result<Option<Value>, ApiError> {
        if let Some(namespace) = &name.namespace {
            check(namespace)?;
        }
        check(&name.name)?;
        let path = DynamicObject::url_path(resource, name.namespace.as_deref());
        let request = Request::new(path).get(&name.name, &GetParams::default());
        found(self.send(request, MAX_OBJECT).await)
    }

    /// Lists objects of any kind, with one page in memory at a time. `namespace`: `None` for all
    /// namespaces. `labels`: a label selector.
    ///
    /// # Errors
    ///
    /// When `namespace` cannot be the name of a namespace.
    pub fn list_dynamic(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        labels: Option<String>,
    ) -> Result<impl Stream<Item = Result<Value, ApiError>> + Send + use<>, ApiError> {
        if let Some(namespace) = namespace {
            check(namespace)?;
        }
        let parameters = ListParams {
            label_selector: labels,
            ..ListParams::default()
        };
        Ok(self.pages(DynamicObject::url_path(resource, namespace), parameters))
    }

    /// Reads the kinds of the cluster, by group, from `/apis`. Empty for Kubernetes before 1.26.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub async fn discover(&self) -> Result<v2::APIGroupDiscoveryList, ApiError> {
        let request = http::Request::get("/apis")
            .header(http::header::ACCEPT, v2::ACCEPT_AGGREGATED_DISCOVERY_V2)
            .body(Vec::new());
        self.send(
            request.map_err(kube::core::request::Error::BuildRequest),
            MAX_DISCOVERY,
        )
        .await
    }
}
