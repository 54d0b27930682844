use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::{cluster::objects::Pod, scripted_api::ScriptedApi};

fn pod(name: &str) -> Value {
    json!({ "metadata": { "name": name, "namespace": "ns", "uid": name } })
}

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/ns/pods/{name}")
}

/// After 410 Gone the list is read again, and becomes the store's content only when it is complete.
/// A consumer that is notified earlier would not find the object and would not be notified again.
#[tokio::test(start_paused = true)]
async fn after_a_relist_objects_have_changed_when_they_can_be_found() {
    let api = ScriptedApi::default();
    api.put(&path("old"), pod("old"));
    api.put(&path("deleted"), pod("deleted"));
    let gone: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = gone.clone();
    let removed = move |removed: Removed<'_, Pod>| {
        seen.lock().push(match removed {
            Removed::One(pod) => pod.metadata.name.clone().unwrap(),
            Removed::Relisted(uids) => {
                let mut uids: Vec<_> = uids.iter().cloned().collect();
                uids.sort();
                uids.join("+")
            }
        });
    };
    let mut pods = watch_objects(&api.client(), None, |_, _| true, removed);
    let mut names = Vec::new();
    let watching = async {
        while names.last().is_none_or(|name| name != "new") {
            if let Some(Ok(pod)) = pods.changes.next().await {
                let found = pods.store.get(&ObjectRef::from_obj(&pod));
                let name = pod.metadata.name.unwrap();
                assert!(found.is_some(), "{name} has changed and cannot be found");
                names.push(name);
            }
            if names.len() == 2 {
                api.delete(&path("deleted"));
                // The watch is not notified, and ends.
                api.expire("/api/v1/pods");
                api.put(&path("new"), pod("new"));
            }
        }
    };
    tokio::time::timeout(Duration::from_mins(10), watching)
        .await
        .expect("the new pod never changed");
    let (first, second) = names.split_at(2);
    assert!(first.contains(&"old".to_owned()) && first.contains(&"deleted".to_owned()));
    assert!(!second.contains(&"deleted".to_owned()), "{second:?}");
    assert_eq!(*gone.lock(), ["deleted+old", "deleted", "new+old"]);
}
