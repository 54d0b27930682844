//! Lists in pages, one object after the other.

use std::{fmt::Debug, time::Duration};

use futures::{Stream, TryStreamExt, stream};
use kube::{Api, api::ListParams};
use serde::de::DeserializeOwned;

use super::PAGE;

/// Of one page: an API server that serves lists slowly still does so page by page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A list could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The API server refused, or cannot be reached.
    #[error("the API server does not give the list")]
    Refused(#[from] kube::Error),
    /// It did not answer.
    #[error("the API server did not answer within {} s", PAGE_TIMEOUT.as_secs())]
    TimedOut,
}

/// Every object of a kind, a page in memory at a time.
pub fn all<K>(api: Api<K>, fields: Option<&'static str>) -> impl Stream<Item = Result<K, ListError>>
where
    K: Clone + DeserializeOwned + Debug + Send + 'static,
{
    let pages = stream::try_unfold(Some(None), move |next: Option<Option<String>>| {
        let api = api.clone();
        async move {
            let Some(token) = next else {
                return Ok::<_, ListError>(None);
            };
            let mut parameters = ListParams::default().limit(PAGE);
            parameters.field_selector = fields.map(str::to_owned);
            parameters.continue_token = token;
            let page = tokio::time::timeout(PAGE_TIMEOUT, api.list(&parameters)).await;
            let page = page.map_err(|_| ListError::TimedOut)??;
            let next = page
                .metadata
                .continue_
                .filter(|token| !token.is_empty())
                .map(Some);
            Ok(Some((stream::iter(page.items.into_iter().map(Ok)), next)))
        }
    });
    pages.try_flatten()
}
