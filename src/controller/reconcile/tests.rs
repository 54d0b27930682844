use kube_runtime::reflector;
use serde_json::json;

use super::*;
use crate::{
    cluster::{events, lease::Leadership, objects::Pod},
    config::Config,
    evaluate::KnownKeys,
    scripted_api::ScriptedApi,
};

/// Panics for one pod and does nothing for the others.
struct Panicking;

impl ReconcileSteps for Panicking {
    type Object = Pod;
    type Evaluation = ();
    const NAME: &'static str = "pods";

    async fn evaluate(&self, pod: &Pod) -> Option<()> {
        let name = NamespacedName::of_object(pod).name;
        assert_ne!(name, "bad", "this panic is part of the test");
        None
    }

    fn plan(&self, _: &Pod, (): (), _: Remembered, _: Instant) -> Plan {
        Plan::nothing()
    }
}

/// A panic ends one reconcile: it is counted, the object is retried, and the startup sequence does
/// not wait for it.
#[tokio::test]
async fn a_panic_is_kept_to_its_reconcile() {
    let (api, metrics) = (ScriptedApi::default().client(), Metrics::default());
    let stop = CancellationToken::new();
    let leadership = Leadership::always();
    let (store, mut writer) = reflector::store::<Pod>();
    let pod = |name: &str| -> Pod {
        let metadata = json!({ "name": name, "namespace": "ns", "uid": name });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    };
    for name in ["bad", "good"] {
        writer.apply_watcher_event(&kube_runtime::watcher::Event::Apply(pod(name)));
    }
    let initial = InitialObjects::new();
    let reconciler = Arc::new(Reconciler {
        steps: Panicking,
        outputs: Outputs {
            writer: Writer::new(api.clone(), 1, &leadership, stop.clone(), metrics.clone()),
            events: events::channel(api, metrics.clone()).0,
            metrics: metrics.clone(),
            namespaces: Namespaces::default(),
            durable: Durable::new(KnownKeys::new(&Config::default())),
        },
        store: store.clone(),
        states: ObjectStates::default(),
        initial: Some(initial.clone()),
    });
    let reconcile_pod = |name| {
        reconciler
            .clone()
            .reconcile(Arc::new(pod(name)), stop.clone())
    };
    assert_eq!(reconcile_pod("bad").await, Action::requeue(PANIC_RETRY));
    assert_eq!(reconcile_pod("good").await, Action::await_change());
    let text = metrics.encode().unwrap();
    assert!(
        text.contains("archaware_panics_total{where=\"pods\"} 1"),
        "{text}"
    );
    let waits = initial.wait(&store);
    assert!(
        waits.now_or_never().is_some(),
        "the start waits for nothing"
    );
}
