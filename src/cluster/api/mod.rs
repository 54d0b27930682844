//! The only access to the API server. All reads and writes go through [`ApiClient`], which sets
//! timeout and field manager, obeys `Retry-After`, bounds the size of answers and classifies
//! errors. Only watches use kube-runtime directly.

mod clock;
mod connect;
mod dynamic;
mod error;
mod page_limit;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{Stream, TryStreamExt, stream};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Client, Resource,
    api::{
        DeleteParams, GetParams, ListParams, ObjectList, PartialObjectMeta, Patch, PatchParams,
        PostParams, Preconditions,
    },
    client::Body,
    core::{Request, request},
};
use serde::{
    Serialize,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::json;
use tokio::time::Instant;

use crate::{backoff::jittered, error::chain, names::is_dns_subdomain};

use page_limit::MAX_PAGE;

use super::{
    field_managers::FIELD_MANAGER,
    name::NamespacedName,
    objects::{Deployment, Pod},
    patch::{self, JsonPatch},
};

pub(crate) use clock::ServerClock;
pub use connect::{ConnectError, connect};
pub use error::ApiError;
pub(crate) use page_limit::{PageLimitLayer, is_too_large};

/// Timeout of one call, including repetitions after `Retry-After`. The API server's own limit is a
/// minute, but a call of more than ten seconds is better repeated later.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of one page of a list. A slow API server still serves page by page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Objects per page of a list. A page of large pods has a few MiB.
pub(super) const PAGE: u32 = 250;
/// Objects per page where a larger page exceeds [`MAX_PAGE`]: a tenant may store many objects of
/// the largest size.
pub(super) const SMALL_PAGE: u32 = 8;
/// Maximum bytes of an answer about one object. etcd accepts requests up to 1.5 MiB
/// (`--max-request-bytes`).
const MAX_OBJECT: usize = 4 << 20;

/// Kinds that archaware reads or writes.
pub trait ApiObject: Resource<DynamicType = ()> {}
impl<K: Resource<DynamicType = ()>> ApiObject for K {}

/// Client of the API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiClient {
    client: Client,
    timeout: Duration,
    server: Arc<str>,
    is_in_cluster: bool,
    clock: ServerClock,
}

impl ApiClient {
    /// A client with the default timeout.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            timeout: CALL_TIMEOUT,
            server: "".into(),
            is_in_cluster: false,
            clock: ServerClock::default(),
        }
    }

    /// This client with the URL of its server, for messages, and whether it uses the service
    /// account of a pod.
    #[must_use]
    fn at(mut self, server: &str, is_in_cluster: bool) -> Self {
        self.server = server.trim_end_matches('/').into();
        self.is_in_cluster = is_in_cluster;
        self
    }

    /// Whether it uses the service account of the pod that this process is in.
    pub fn is_in_cluster(&self) -> bool {
        self.is_in_cluster
    }

    /// The namespace of the kubeconfig's context, or of the pod.
    pub fn default_namespace(&self) -> &str {
        self.client.default_namespace()
    }

    /// The URL of the server, for messages.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The clock of the server.
    pub(crate) fn clock(&self) -> ServerClock {
        self.clock.clone()
    }

    /// This client with another timeout per call.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            timeout,
            ..self.clone()
        }
    }

    /// Access to all objects of a kind, for kube-runtime's watches.
    pub(crate) fn watched<K: ApiObject>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    /// Gets the version of the API server, which needs no permission.
    ///
    /// # Errors
    ///
    /// When the API server does not answer.
    pub async fn ping(&self) -> Result<(), ApiError> {
        let request = http::Request::get("/version").body(Vec::new());
        let request = request.map_err(request::Error::BuildRequest);
        let _: IgnoredAny = self.send(request, MAX_OBJECT).await?;
        Ok(())
    }

    /// Reads an object; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// When the call fails in any other way than 404.
    pub async fn find<K>(&self, name: &NamespacedName) -> Result<Option<K>, ApiError>
    where
        K: ApiObject + DeserializeOwned,
    {
        let request = collection::<K>(name)?.get(&name.name, &GetParams::default());
        found(self.call::<K, K>(request).await)
    }

    /// Reads the metadata of an object; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// When the call fails in any other way than 404.
    pub async fn find_metadata<K: ApiObject>(
        &self,
        name: &NamespacedName,
    ) -> Result<Option<ObjectMeta>, ApiError> {
        let request = collection::<K>(name)?.get_metadata(&name.name, &GetParams::default());
        let object = self.call::<K, PartialObjectMeta>(request).await;
        Ok(found(object)?.map(|object| object.metadata))
    }

    /// Lists the objects of a kind, with one page in memory at a time.
    pub fn list<K>(
        &self,
        fields: Option<&'static str>,
    ) -> impl Stream<Item = Result<K, ApiError>> + Send + use<K>
    where
        K: ApiObject + Clone + DeserializeOwned + Send + 'static,
    {
        let parameters = ListParams {
            field_selector: fields.map(str::to_owned),
            ..ListParams::default()
        };
        self.pages(K::url_path(&(), None), parameters)
    }

    /// Lists the objects at a path of the API, with one page in memory at a time.
    fn pages<T>(
        &self,
        path: String,
        parameters: ListParams,
    ) -> impl Stream<Item = Result<T, ApiError>> + Send + use<T>
    where
        T: Clone + DeserializeOwned + Send + 'static,
    {
        let api = self.with_timeout(PAGE_TIMEOUT);
        let pages = stream::try_unfold(Some(None), move |next: Option<Option<String>>| {
            let (api, request) = (api.clone(), Request::new(path.clone()));
            let mut parameters = parameters.clone().limit(PAGE);
            async move {
                let Some(token) = next else {
                    return Ok::<_, ApiError>(None);
                };
                parameters.continue_token = token;
                let page = api.send(request.list(&parameters), MAX_PAGE).await;
                let page: ObjectList<T> = match page {
                    Err(ApiError::TooLarge(_)) => {
                        let small = request.list(&parameters.limit(SMALL_PAGE));
                        api.send(small, MAX_PAGE).await?
                    }
                    page => page?,
                };
                let token = page.metadata.continue_;
                let next = token.filter(|token| !token.is_empty()).map(Some);
                Ok(Some((stream::iter(page.items.into_iter().map(Ok)), next)))
            }
        });
        pages.try_flatten()
    }

    /// Lists the pods of a node at once. The API server answers from its cache, brought up to date
    /// first (`ConsistentListFromCache`), where it has an index of pods by their node.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub async fn pods_of_node(&self, node: &str) -> Result<Vec<Pod>, ApiError> {
        let parameters = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let path = Pod::url_path(&(), None);
        let request = Request::new(path.clone()).list(&parameters);
        let api = self.with_timeout(PAGE_TIMEOUT);
        match api.send::<ObjectList<Pod>>(request, MAX_PAGE).await {
            Err(ApiError::TooLarge(_)) => self.pages(path, parameters).try_collect().await,
            pods => Ok(pods?.items),
        }
    }

    /// Creates an object of kind `K` and returns the API server's version of it.
    ///
    /// # Errors
    ///
    /// When the call fails; [`ApiError::Conflict`] if the object exists.
    pub async fn create<K, T>(
        &self,
        namespace: Option<&str>,
        object: &impl Serialize,
    ) -> Result<T, ApiError>
    where
        K: ApiObject,
        T: DeserializeOwned,
    {
        if let Some(namespace) = namespace {
            check(namespace)?;
        }
        let body = serde_json::to_vec(object).map_err(|error| ApiError::Invalid(chain(&error)))?;
        let request = Request::new(K::url_path(&(), namespace)).create(&post(), body);
        self.call::<K, T>(request).await
    }

    /// Patches an object.
    ///
    /// # Errors
    ///
    /// When the call fails; [`ApiError::Conflict`] if a `test` of the patch failed.
    pub async fn patch<K: ApiObject>(
        &self,
        name: &NamespacedName,
        patch: JsonPatch,
    ) -> Result<(), ApiError> {
        let operations = serde_json::from_value(patch.into_operations());
        let operations = operations.map_err(|error| ApiError::Invalid(chain(&error)))?;
        let patch = Patch::<()>::Json(operations);
        let request = collection::<K>(name)?.patch(&name.name, &patching(), &patch);
        self.call::<K, IgnoredAny>(request).await.map(drop)
    }

    /// Sets the number of replicas of a Deployment through the subresource `scale`: a permission
    /// for this subresource allows no other change. A dry run only checks whether the change is
    /// possible.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub async fn scale(
        &self,
        name: &NamespacedName,
        replicas: u32,
        dry_run: bool,
    ) -> Result<(), ApiError> {
        let body = patch::replicas(replicas).into_operations();
        let operations = serde_json::from_value(body);
        let operations = operations.map_err(|error| ApiError::Invalid(chain(&error)))?;
        let patch = Patch::<()>::Json(operations);
        let request = collection::<Deployment>(name)?;
        let parameters = PatchParams {
            dry_run,
            ..patching()
        };
        let request = request.patch_subresource("scale", &name.name, &parameters, &patch);
        self.call::<Deployment, IgnoredAny>(request).await.map(drop)
    }

    /// Deletes an object; with `uid` only the object that has it. Returns `false` if the object
    /// does not exist.
    ///
    /// # Errors
    ///
    /// When the call fails in any other way than 404.
    pub async fn delete<K: ApiObject>(
        &self,
        name: &NamespacedName,
        uid: Option<String>,
    ) -> Result<bool, ApiError> {
        let request = collection::<K>(name)?.delete(&name.name, &delete(uid));
        let deleted = self.call::<K, IgnoredAny>(request).await;
        Ok(found(deleted)?.is_some())
    }

    /// Evicts a pod through the Eviction API, which respects disruption budgets. The uid protects a
    /// new pod of the same name (of a `StatefulSet`) from being evicted instead.
    ///
    /// # Errors
    ///
    /// When the call fails; [`ApiError::DisruptionBudget`] if a budget forbids it.
    pub async fn evict(&self, pod: &Pod) -> Result<(), ApiError> {
        let name = NamespacedName::of_object(pod);
        let eviction = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": { "name": name.name, "namespace": name.namespace },
            "deleteOptions": delete(pod.metadata.uid.clone()),
        });
        let body = eviction.to_string().into_bytes();
        let request =
            collection::<Pod>(&name)?.create_subresource("eviction", &name.name, &post(), body);
        self.call::<Pod, IgnoredAny>(request).await.map(drop)
    }

    /// A call about one object of kind `K`. Messages about Secrets are removed, because they may
    /// repeat the content.
    async fn call<K: ApiObject, T: DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, request::Error>,
    ) -> Result<T, ApiError> {
        let answer = self.send(request, MAX_OBJECT).await;
        if K::plural(&()) == "secrets" {
            answer.map_err(ApiError::without_content)
        } else {
            answer
        }
    }

    /// Sends a request until it is answered or the timeout ends. When the API server asks for a
    /// retry, the request is repeated after that delay, as client-go does (`k8s.io/client-go/rest`,
    /// `with_retry.go`).
    async fn send<T: DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, request::Error>,
        max_body: usize,
    ) -> Result<T, ApiError> {
        let request = request.map_err(|error| ApiError::Invalid(chain(&error)))?;
        let request = request.map(Bytes::from);
        let deadline = Instant::now() + self.timeout;
        loop {
            let exchange = self.exchange(request.clone(), max_body);
            let answer = tokio::time::timeout_at(deadline, exchange).await;
            let answer = answer.unwrap_or(Err(ApiError::TimedOut(self.timeout)));
            let after = answer.as_ref().err().and_then(ApiError::retry_after);
            let pause = after.map(|after| after.max(Duration::from_secs(1)));
            // With jitter, so that rejected requests do not return together.
            match pause.map(|pause| Instant::now() + pause + jittered(pause) / 20) {
                Some(next) if next < deadline => tokio::time::sleep_until(next).await,
                _ => return answer,
            }
        }
    }

    /// One HTTP exchange. kube's own method logs bodies that it cannot parse, which may be Secrets.
    async fn exchange<T: DeserializeOwned>(
        &self,
        request: http::Request<Bytes>,
        max_body: usize,
    ) -> Result<T, ApiError> {
        let unreachable = |error: kube::Error| ApiError::Unreachable(chain(&error));
        let answer = self.client.send(request.map(Body::from)).await;
        let (head, body) = answer.map_err(unreachable)?.into_parts();
        self.clock.observe(&head.headers, jiff::Timestamp::now());
        let body = Limited::new(body, max_body).collect().await;
        let body = body.map_err(|error| {
            if is_too_large(error.as_ref()) {
                ApiError::TooLarge(max_body)
            } else {
                ApiError::Unreachable(chain(error.as_ref()))
            }
        })?;
        let body = body.to_bytes();
        if head.status.is_success() {
            return serde_json::from_slice(&body)
                .map_err(|error| ApiError::Malformed(error.to_string()));
        }
        let after = head.headers.get(http::header::RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let after = after.map(Duration::from_secs);
        Err(ApiError::classify(head.status.as_u16(), after, &body))
    }
}

/// The collection of objects of kind `K`, in the namespace of `name`.
fn collection<K: ApiObject>(name: &NamespacedName) -> Result<Request, ApiError> {
    if let Some(namespace) = &name.namespace {
        check(namespace)?;
    }
    check(&name.name)?;
    Ok(Request::new(K::url_path(&(), name.namespace.as_deref())))
}

/// Checks a name that becomes part of a path. It may come from a pod that has not been validated
/// yet.
fn check(name: &str) -> Result<(), ApiError> {
    if is_dns_subdomain(name) {
        Ok(())
    } else {
        Err(ApiError::Name(name.to_owned()))
    }
}

fn found<T>(answer: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(ApiError::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn patching() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

fn post() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}

fn delete(uid: Option<String>) -> DeleteParams {
    let preconditions = uid.map(|uid| Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    DeleteParams {
        preconditions,
        ..DeleteParams::default()
    }
}
