//! Watches with as little memory as the API server allows.

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
};

use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use kube::Api;
use kube_runtime::{
    WatchStreamExt,
    reflector::{self, ObjectRef, Store},
    watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::api::{ApiClient, ApiObject, PAGE, SMALL_PAGE, is_too_large};

/// Duration of one watch request. kube detects a dead connection five seconds later.
const WATCH_SECONDS: u32 = 240;

/// How the initial list is read.
#[derive(Clone, Copy)]
enum InitialList {
    /// Object by object (WatchList): constant memory.
    Streamed,
    /// In pages of at most this many objects.
    Paged(u32),
}

impl InitialList {
    /// Another way to read the list, if this way would fail with the same error again. The change
    /// is permanent: the API server does not gain WatchList while it runs, and a page that was too
    /// large can become too large again.
    fn after(self, error: &watcher::Error) -> Option<Self> {
        match self {
            Self::Streamed if cannot_stream(error) => {
                tracing::info!("the API server cannot stream lists; reading them in pages");
                Some(Self::Paged(PAGE))
            }
            Self::Paged(PAGE) if is_too_large(error) => {
                tracing::info!("a page of a list is too large; reading smaller pages");
                Some(Self::Paged(SMALL_PAGE))
            }
            Self::Streamed | Self::Paged(_) => None,
        }
    }

    fn watch<K>(self, api: Api<K>, fields: Option<&str>) -> BoxStream<'static, EventResult<K>>
    where
        K: ApiObject + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut config = watcher::Config::default().timeout(WATCH_SECONDS);
        config.field_selector = fields.map(str::to_owned);
        let config = match self {
            Self::Streamed => config.page_size(PAGE).streaming_lists(),
            Self::Paged(size) => config.page_size(size),
        };
        watcher(api, config).boxed()
    }
}

type EventResult<K> = watcher::Result<Event<K>>;

/// All events of a kind. The watch is restarted with back-off.
pub(crate) fn watch_events<K>(
    api: Api<K>,
    fields: Option<&str>,
) -> impl Stream<Item = EventResult<K>> + Send + use<K>
where
    K: ApiObject + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let fields = fields.map(str::to_owned);
    let list = InitialList::Streamed;
    let first = list.watch(api.clone(), fields.as_deref());
    stream::unfold((first, list), move |(mut events, mut list)| {
        let (api, fields) = (api.clone(), fields.clone());
        async move {
            loop {
                let event = events.next().await?;
                let Some(next) = event.as_ref().err().and_then(|error| list.after(error)) else {
                    return Some((event, (events, list)));
                };
                (events, list) = (next.watch(api.clone(), fields.as_deref()), next);
            }
        }
    })
    .default_backoff()
}

/// Yields all existing objects of a kind, then each new or changed object. Keeps none in memory.
pub fn stream_objects<K>(
    api: &ApiClient,
    fields: &'static str,
) -> impl Stream<Item = K> + Send + use<K>
where
    K: ApiObject + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watch_events(api.watched(), Some(fields)).filter_map(|event| {
        let object = match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => Some(object),
            Ok(Event::Init | Event::InitDone | Event::Delete(_)) => None,
            Err(error) => {
                warn_interrupted::<K>(&error);
                None
            }
        };
        std::future::ready(object)
    })
}

fn warn_interrupted<K: ApiObject>(error: &watcher::Error) {
    let error = crate::error::chain(error);
    tracing::warn!(kind = %K::kind(&()), error, "watch interrupted; restarting with back-off");
}

/// Whether WatchList is disabled: a 422 whose cause is the field `sendInitialEvents`.
fn cannot_stream(error: &watcher::Error) -> bool {
    let watcher::Error::WatchStartFailed(kube::Error::Api(status)) = error else {
        return false;
    };
    let causes = status
        .details
        .as_ref()
        .map(|details| details.causes.as_slice());
    status.code == 422
        && causes
            .unwrap_or_default()
            .iter()
            .any(|cause| cause.field == "sendInitialEvents")
}

/// A watch of the objects of one kind.
pub struct Watched<K>
where
    K: ApiObject + Clone + 'static,
{
    /// The current objects.
    pub store: Store<K>,
    /// Objects with relevant changes. The store is updated only while this stream is polled.
    pub changes: BoxStream<'static, watcher::Result<K>>,
    /// Whether the initial list is complete. kube's `wait_until_ready` is not used, because it
    /// wakes only the last of several waiting tasks.
    pub ready: watch::Receiver<bool>,
}

/// Objects that left the store.
pub enum Removed<'a, K> {
    /// This object was deleted.
    One(&'a K),
    /// The list was read again: every object except those with these uids was deleted.
    Relisted(&'a HashSet<String>),
}

impl<K: ApiObject> Removed<'_, K> {
    /// Removes the entries of these objects from a map by uid.
    pub fn forget_in<V>(&self, entries: &mut HashMap<String, V>) {
        match self {
            Self::One(object) => {
                entries.remove(object.meta().uid.as_deref().unwrap_or_default());
            }
            Self::Relisted(uids) => entries.retain(|uid, _| uids.contains(uid)),
        }
    }
}

/// Watches the objects of a kind. Changes for which `same` returns true are not passed on, so a
/// node's heartbeat costs no more than parsing it.
pub fn watch_objects<K>(
    api: &ApiClient,
    fields: Option<&str>,
    same: impl Fn(&K, &K) -> bool + Send + 'static,
    removed: impl Fn(Removed<'_, K>) + Send + 'static,
) -> Watched<K>
where
    K: ApiObject + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (store, writer) = reflector::store::<K>();
    let (done, ready) = watch::channel(false);
    let (stored, known) = (store.clone(), store.clone());
    let is_change = move |event: &watcher::Result<Event<K>>| match event {
        Ok(Event::Apply(new)) => stored
            .get(&ObjectRef::from_obj(new))
            .is_none_or(|old| !same(&old, new)),
        Ok(_) => true,
        Err(error) => {
            warn_interrupted::<K>(error);
            true
        }
    };
    let listed = store.clone();
    let changes = watch_events(api.watched(), fields)
        .filter(move |event| std::future::ready(is_change(event)))
        .reflect(writer)
        .inspect(move |event| match event {
            Ok(Event::Delete(object)) => removed(Removed::One(object)),
            Ok(Event::InitDone) => {
                let objects = known.state();
                let uids = objects
                    .iter()
                    .filter_map(|object| object.meta().uid.clone());
                removed(Removed::Relisted(&uids.collect()));
                done.send_replace(true);
            }
            _ => {}
        })
        // The store applies a new list when it is complete. Changes are reported after that: a
        // consumer that looks an object up earlier would find the old one or none.
        .flat_map(move |event| match event {
            Ok(Event::Apply(object)) => stream::iter(Some(Ok(object))).left_stream(),
            Err(error) => stream::iter(Some(Err(error))).left_stream(),
            Ok(Event::InitDone) => {
                let objects = listed
                    .state()
                    .into_iter()
                    .map(|object| Ok((*object).clone()));
                stream::iter(objects).right_stream()
            }
            Ok(_) => stream::iter(None).left_stream(),
        });
    Watched {
        store,
        changes: Box::pin(changes),
        ready,
    }
}

#[cfg(test)]
mod tests;
