//! The Lease is lost and acquired while objects are being reconciled.

use super::*;
use tokio::time::Instant;

use crate::scripted_api::ScriptedResponse;

fn held_by(holder: &str, transitions: u32) -> Value {
    json!({
        "metadata": { "name": "archaware", "namespace": "archaware", "uid": "lease" },
        "spec": { "holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": transitions },
    })
}

/// Another process takes the Lease while a pod waits for its namespace. The pod's patch is not sent
/// until this process leads again.
#[tokio::test(start_paused = true)]
async fn leadership_is_lost_between_read_and_write() {
    let api = cluster();
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    // The holder renews every five seconds plus jitter, and a pod waits one second for its
    // namespace.
    let renewed = api.wait_for(&format!("PATCH {LEASE}"), 1).await[0].at;
    let elsewhere = POD.replace("/ns/", "/unknown/");
    let mut pod = pod();
    pod["metadata"]["namespace"] = json!("unknown");
    tokio::time::sleep(Duration::from_millis(4600)).await;
    api.put(LEASE, held_by("other", 7));
    api.put(&elsewhere, pod);
    let mut beat = 8;
    let ends = renewed + Duration::from_mins(2);
    while Instant::now() < ends {
        tokio::time::sleep(Duration::from_secs(2)).await;
        api.put(LEASE, held_by("other", beat));
        beat += 1;
    }
    let call = format!("PATCH {elsewhere}");
    assert_eq!(api.calls(&[&call]).len(), 0, "it was read, and not written");
    // The other process dies. Its Lease expires, and the pod is patched once.
    let patched = api.wait_for(&call, 1).await[0].at;
    let dead = patched - ends;
    assert!((12..=22).contains(&dead.as_secs()), "{dead:?}");
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(api.calls(&[&call]).len(), 1);
    controller.stop().await;
}

/// A replica that does not lead watches objects, but writes nothing.
#[tokio::test(start_paused = true)]
async fn a_follower_writes_nothing_and_takes_over_after_a_release() {
    let api = cluster();
    api.put(LEASE, held_by("other", 1));
    api.put(POD, pod());
    let controller = Controller::start(&api, "");
    for beat in 2..40 {
        tokio::time::sleep(Duration::from_secs(5)).await;
        api.put(LEASE, held_by("other", beat));
    }
    assert_eq!(writes(&api).len(), 0);
    let before = Instant::now();
    api.put(LEASE, held_by("", 40));
    let tainted = api.wait_for(&format!("PATCH {NODE}"), 1).await[0].at;
    assert!(tainted - before < Duration::from_secs(3), "{tainted:?}");
    controller.stop().await;
}

/// Failed renewals are repeated each second. This process stops writing before another one may take
/// the Lease.
#[tokio::test(start_paused = true)]
async fn a_holder_that_cannot_renew_stops_in_time() {
    for answer in [
        ScriptedResponse::Silence,
        ScriptedResponse::Broken,
        ScriptedResponse::Status(403, "forbidden", Value::Null),
        ScriptedResponse::Status(500, "down", Value::Null),
        ScriptedResponse::RetryAfter(429, 1),
    ] {
        let api = cluster();
        let controller = Controller::start(&api, "");
        api.wait_for(&format!("PATCH {NODE}"), 1).await;
        let renewed = api.wait_for(&format!("PATCH {LEASE}"), 1).await[0].at;
        let answers = std::iter::repeat_n(answer.clone(), 200);
        api.script(&format!("GET {LEASE}"), answers);
        let leads = || controller.metric("archaware_leader");
        let given_up = api.until("leadership given up", || {
            (leads().as_deref() == Some("0")).then(Instant::now)
        });
        let held = given_up.await - renewed;
        assert!((5..15).contains(&held.as_secs()), "{answer:?}: {held:?}");
        api.put(POD, pod());
        tokio::time::sleep(Duration::from_secs(20)).await;
        let patches = api.calls(&[&format!("PATCH {POD}")]);
        assert!(patches.is_empty(), "{answer:?}");
        controller.stop().await;
    }
}

/// The read of a renewal is slow and its write hangs: together they are limited by the timeout of
/// one call.
#[tokio::test(start_paused = true)]
async fn a_slow_renewal_is_given_up_in_time() {
    let api = cluster();
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let renewed = api.wait_for(&format!("PATCH {LEASE}"), 1).await[0].at;
    let slow = ScriptedResponse::Slow(Duration::from_millis(1900));
    api.script(&format!("GET {LEASE}"), std::iter::repeat_n(slow, 200));
    let silent = std::iter::repeat_n(ScriptedResponse::Silence, 200);
    api.script(&format!("PATCH {LEASE}"), silent);
    let given_up = api.until("leadership given up", || {
        let leads = controller.metric("archaware_leader");
        (leads.as_deref() == Some("0")).then(Instant::now)
    });
    let held = given_up.await - renewed;
    assert!(held < Duration::from_secs(15), "{held:?}");
    controller.stop().await;
}

/// A conflicting renewal is repeated: another client wrote the Lease, or a cancelled renewal of
/// this process arrived late.
#[tokio::test(start_paused = true)]
async fn a_conflicting_renewal_costs_no_leadership() {
    let api = cluster();
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let conflict = |code| ScriptedResponse::Status(code, "testing value failed", Value::Null);
    api.script(&format!("PATCH {LEASE}"), [conflict(409), conflict(422)]);
    api.wait_for(&format!("PATCH {LEASE}"), 4).await;
    let leads = controller.metric("archaware_leader");
    assert_eq!(leads.as_deref(), Some("1"));
    controller.stop().await;
    assert_eq!(api.get(LEASE).unwrap()["spec"].get("holderIdentity"), None);
}

/// The release conflicts with a cancelled renewal that arrives late.
#[tokio::test(start_paused = true)]
async fn the_release_is_tried_twice() {
    let api = cluster();
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let conflict = ScriptedResponse::Status(409, "the object has been modified", Value::Null);
    api.script(&format!("PATCH {LEASE}"), [conflict]);
    controller.stop().await;
    assert_eq!(api.get(LEASE).unwrap()["spec"].get("holderIdentity"), None);
}
