//! Changes of the system clock.

use std::path::Path;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;

use super::*;

/// The library of Debian's `faketime`.
fn library() -> String {
    let folders = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
    ];
    let paths = folders.map(|folder| format!("{folder}/faketime/libfaketimeMT.so.1"));
    let found = paths.into_iter().find(|path| Path::new(path).exists());
    found.expect("libfaketime: hack/install.sh installs it")
}

/// The system time jumps by days in both directions, while monotonic time continues.
#[tokio::test]
async fn clock_jumped() {
    let cluster = TestCluster::take().await;
    let offset = cluster.dir().join("offset");
    let jump = |by: &str| std::fs::write(&offset, by).unwrap();
    jump("+0");
    let (preload, file) = (library(), offset.to_str().unwrap().to_owned());
    let environment = [
        ("LD_PRELOAD", preload.as_str()),
        ("FAKETIME_TIMESTAMP_FILE", file.as_str()),
        ("FAKETIME_CACHE_DURATION", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("DONT_FAKE_MONOTONIC", "1"),
    ];
    cluster.register();
    let webhook = admission_config(free_port(), "certificates: {lifetime: 48h}");
    let config = format!("{webhook}\nresolution: {{failure: {{after: 1h}}}}\n");
    let scene = Scene::set(cluster, |cluster| {
        Controller::start_with(cluster, &config, &environment)
    })
    .await;
    let cluster = &scene.cluster;
    cluster.wait_until_called().await;
    let registry = testimg::FakeRegistry::start().await.unwrap();
    registry.script("/", testimg::Script::Hang);
    let spec = pod_spec(&[registry.image("hangs")]);
    cluster.create::<Pod>(pod("waiting", spec, json!({}))).await;
    // A second replica with the right time does not consider the first one dead.
    let second = Controller::start(cluster, "");
    eventually("readiness", DEADLINE, || async {
        (second.http("/readyz").await.0 == 200).then_some(())
    })
    .await;
    // Not before today, because the API server's certificate is as old as the test cluster.
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "archaware");
    for (name, by) in [("ahead", "+3d"), ("back", "+1d"), ("right", "+0d")] {
        jump(by);
        // archaware sees the changed time, and it shows in the Lease.
        let days: i64 = by
            .trim_start_matches('+')
            .trim_end_matches('d')
            .parse()
            .unwrap();
        eventually("a renewal with that time", DEADLINE, || async {
            let lease = leases.get("archaware").await.ok()?;
            let ahead = lease
                .spec?
                .renew_time?
                .0
                .duration_since(jiff::Timestamp::now());
            ((ahead.as_secs() - days * 86_400).abs() < 3600).then_some(())
        })
        .await;
        // A certificate with two days of validity has expired after three, and is replaced.
        let now = jiff::Timestamp::now().as_second() + days * 86_400;
        let expiry = "archaware_admission_certificate_expiry_seconds{}";
        eventually("a certificate that is good", DEADLINE, || async {
            let until = format!("{:.0}", scene.archaware.metric(expiry).await);
            (until.parse::<i64>().ok()? > now).then_some(())
        })
        .await;
        // Another renewal of the Lease with that clock.
        let renewals = "archaware_api_requests_total{verb=\"patch\",result=\"2xx\"}";
        let before = scene.archaware.metric(renewals).await;
        eventually("renewals", DEADLINE, || async {
            (scene.archaware.metric(renewals).await > before + 0.5).then_some(())
        })
        .await;
        // The API server's clock says how old the pod is.
        let oldest = "archaware_pods_undecided_oldest_seconds{}";
        let age = scene.archaware.metric(oldest).await;
        assert!((1.0..3600.0).contains(&age), "{name}: {age} s");
        scene.places(name).await;
        assert!(
            !second.log().contains("this replica is leading"),
            "the Lease is not lost"
        );
    }
    assert_eq!(second.stop().await, 0);
    scene.ends_well().await;
}
