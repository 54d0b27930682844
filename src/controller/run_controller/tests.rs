use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::{
    cluster::{objects::Pod, watch::follow},
    scripted_api::ScriptedApi,
};

/// A panic ends one reconcile: it is counted, the start is told, the object comes back, and the others go on.
#[tokio::test(start_paused = true)]
async fn a_panic_is_kept_to_its_reconcile() {
    let api = ScriptedApi::default();
    for name in ["bad", "good"] {
        let path = format!("/api/v1/namespaces/ns/pods/{name}");
        api.put(
            &path,
            json!({ "metadata": { "name": name, "namespace": "ns", "uid": name } }),
        );
    }
    let watched = follow(&api.client(), None, |_: &Pod, _| true, |_| {});
    let (seen, panics): (Arc<Mutex<Vec<String>>>, _) = (Arc::default(), Arc::new(Mutex::new(0)));
    let (metrics, stop) = (Metrics::default(), CancellationToken::new());
    let always = watch::channel(true).1;
    let settings = Settings {
        name: "pods",
        concurrency: 4,
        is_active: always.clone(),
        ready: always,
        metrics: metrics.clone(),
        listed: watched.ready.clone(),
        stop: stop.clone(),
    };
    let (reconciled, told) = (seen.clone(), panics.clone());
    let running = tokio::spawn(run_controller(
        settings,
        watched,
        stream::pending(),
        move |pod: Arc<Pod>| {
            let reconciled = reconciled.clone();
            async move {
                let name = NamespacedName::of(&*pod).name;
                reconciled.lock().push(name.clone());
                assert_ne!(name, "bad", "this panic is part of the test");
                Action::await_change()
            }
        },
        move |_: &Pod| *told.lock() += 1,
    ));
    let names = api
        .until("a second try", || {
            let seen = seen.lock().clone();
            let tries = seen.iter().filter(|name| *name == "bad").count();
            (tries == 2).then_some(seen)
        })
        .await;
    assert!(names.contains(&"good".to_owned()));
    assert_eq!(*panics.lock(), 2);
    let text = metrics.encode().unwrap();
    assert!(
        text.contains("archaware_panics_total{where=\"pods\"} 2"),
        "{text}"
    );
    stop.cancel();
    running.await.unwrap();
}
