//! A layer that bounds the pages of lists, also those that kube-runtime reads: kube has no limit of
//! its own, and a tenant may store many objects of the largest size.

use std::{
    error::Error,
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::{Method, Request, Response};
use http_body_util::{LengthLimitError, Limited};
use tower::{Layer, Service};

/// Maximum bytes of a page. Eight objects of the maximum size of etcd fit.
pub(super) const MAX_PAGE: usize = 16 << 20;

/// Tower layer that ends the body of a page after [`MAX_PAGE`] bytes with an error for which
/// [`is_too_large`] returns true.
#[derive(Clone)]
pub(crate) struct PageLimitLayer;

/// The service of a [`PageLimitLayer`].
#[derive(Clone)]
pub(crate) struct PageLimit<S>(S);

impl<S> Layer<S> for PageLimitLayer {
    type Service = PageLimit<S>;

    fn layer(&self, inner: S) -> PageLimit<S> {
        PageLimit(inner)
    }
}

impl<S, A, B> Service<Request<A>> for PageLimit<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<Limited<B>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        let is_page = *request.method() == Method::GET
            && query.contains("limit=")
            && !query.contains("watch=true");
        let max_body = if is_page { MAX_PAGE } else { usize::MAX };
        let response = self.0.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| Limited::new(body, max_body))) })
    }
}

/// Whether a body was longer than its limit.
pub(crate) fn is_too_large(error: &(dyn Error + 'static)) -> bool {
    error.is::<LengthLimitError>() || error.source().is_some_and(is_too_large)
}
