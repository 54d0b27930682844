//! Connects to the API server.

use std::{
    io::ErrorKind,
    path::Path,
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{Method, Request, Response};
use kube::{
    Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{Layer, Service};

use crate::{error::chain, metrics::ApiRequests, proxy};

use super::{ApiClient, PageLimitLayer};

/// Why there is no connection to a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is neither a kubeconfig nor a service account.
    #[error(
        "no cluster: name a kubeconfig with --kubeconfig or KUBECONFIG, or run archaware in a pod (there is no \
         ~/.kube/config)"
    )]
    NoCluster,
    /// The kubeconfig cannot be used.
    #[error("the kubeconfig is not usable: {0}")]
    Kubeconfig(String),
    /// Neither the kubeconfig nor the service account of this pod can be used.
    #[error(
        "cannot read the kubeconfig or the service account: {0}; name another kubeconfig with --kubeconfig or KUBECONFIG"
    )]
    Inferred(String),
    /// The client cannot be created.
    #[error("cannot create a client for the cluster")]
    Client(#[from] kube::Error),
}

impl From<KubeconfigError> for ConnectError {
    fn from(error: KubeconfigError) -> Self {
        Self::Kubeconfig(first_line(&error))
    }
}

/// The first line of an error. The other lines quote the file.
fn first_line(error: &dyn std::error::Error) -> String {
    let text = chain(error);
    text.lines().next().unwrap_or_default().to_owned()
}

/// Creates a client for the cluster of `kubeconfig` and `context`, or for the cluster that
/// `kubectl` or a pod would use. Does not connect yet.
///
/// # Errors
///
/// When there is no usable configuration.
pub async fn connect(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
    metrics: ApiRequests,
) -> Result<ApiClient, ConnectError> {
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    let (file, mut config) = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)?;
            let config = Config::from_custom_kubeconfig(file.clone(), &options).await?;
            (Some(file), config)
        }
        None if context.is_some() => {
            let config = Config::from_kubeconfig(&options).await?;
            (Kubeconfig::read().ok(), config)
        }
        None => {
            let file = Kubeconfig::read();
            let config = match (Config::infer().await, &file) {
                (Ok(config), _) => config,
                (Err(_), Err(KubeconfigError::ReadConfig(error, _)))
                    if error.kind() == ErrorKind::NotFound
                        && ["KUBECONFIG", "KUBERNETES_SERVICE_HOST"]
                            .iter()
                            .all(|name| std::env::var_os(name).is_none()) =>
                {
                    return Err(ConnectError::NoCluster);
                }
                (Err(error), _) => return Err(ConnectError::Inferred(first_line(&error))),
            };
            (file.ok(), config)
        }
    };
    // kube takes `HTTPS_PROXY` for every server, and compares `NO_PROXY` with the proxy instead of
    // the server. As in client-go, the kubeconfig's own `proxy-url` comes first, and `NO_PROXY`
    // does not apply to it.
    let named = file.as_ref().and_then(|file| proxy_of(file, context));
    config.proxy_url = named
        .and_then(|proxy| proxy.parse().ok())
        .or_else(|| proxy::for_server(&config.cluster_url));
    // kube's own retries go on for minutes and wait up to a thousand seconds. [`ApiClient`] bounds
    // its retries instead.
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    let server = config.cluster_url.to_string();
    let client = ClientBuilder::try_from(config)?
        .with_layer(&PageLimitLayer)
        .with_layer(&CountLayer(metrics))
        .build();
    Ok(ApiClient::new(client).at(&server, file.is_none()))
}

/// The proxy that the kubeconfig names for the cluster of a context.
fn proxy_of<'a>(file: &'a Kubeconfig, context: Option<&str>) -> Option<&'a str> {
    let name = context.or(file.current_context.as_deref());
    let context = file
        .contexts
        .iter()
        .find(|context| Some(context.name.as_str()) == name)?;
    let cluster_name = &context.context.as_ref()?.cluster;
    let cluster = file
        .clusters
        .iter()
        .find(|entry| entry.name == *cluster_name)?;
    let proxy = cluster.cluster.as_ref()?.proxy_url.as_deref()?;
    (!proxy.is_empty()).then_some(proxy)
}

/// Tower layer that counts requests by verb and result.
#[derive(Clone)]
struct CountLayer(ApiRequests);

#[derive(Clone)]
struct CountService<S> {
    inner: S,
    metrics: ApiRequests,
}

impl<S> Layer<S> for CountLayer {
    type Service = CountService<S>;

    fn layer(&self, inner: S) -> CountService<S> {
        CountService {
            inner,
            metrics: self.0.clone(),
        }
    }
}

impl<S, A, B> Service<Request<A>> for CountService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let verb = verb(request.method(), request.uri().query().unwrap_or_default());
        let metrics = self.metrics.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            metrics.count(verb, answer.as_ref().ok().map(Response::status));
            answer
        })
    }
}

fn verb(method: &Method, query: &str) -> &'static str {
    match *method {
        Method::GET if query.contains("watch=true") => "watch",
        Method::GET if query.contains("limit=") || query.contains("fieldSelector=") => "list",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}
