//! Lists in pages, one object after the other.

use std::fmt::Debug;

use futures::{Stream, TryStreamExt, stream};
use kube::{Api, api::ListParams};
use serde::de::DeserializeOwned;

use super::PAGE;

/// Every object of a kind, a page in memory at a time.
pub fn all<K>(
    api: Api<K>,
    fields: Option<&'static str>,
) -> impl Stream<Item = Result<K, kube::Error>>
where
    K: Clone + DeserializeOwned + Debug + Send + 'static,
{
    let pages = stream::try_unfold(Some(None), move |next: Option<Option<String>>| {
        let api = api.clone();
        async move {
            let Some(token) = next else {
                return Ok::<_, kube::Error>(None);
            };
            let mut parameters = ListParams::default().limit(PAGE);
            parameters.field_selector = fields.map(str::to_owned);
            parameters.continue_token = token;
            let page = api.list(&parameters).await?;
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
