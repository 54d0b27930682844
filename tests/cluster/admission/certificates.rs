//! The webhook's certificate: issued, shared, renewed under load, and loaded from files.

use std::time::{Duration, Instant};

use k8s_openapi::api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};

use super::*;

fn secrets(cluster: &TestCluster) -> Api<Secret> {
    Api::namespaced(cluster.client.clone(), "archaware")
}

async fn certificate(cluster: &TestCluster) -> Option<Vec<u8>> {
    let secret = secrets(cluster).get("archaware-admission").await.ok()?;
    Some(secret.data?["tls.crt"].0.clone())
}

/// Whether a pod that is created now was seen by the webhook.
async fn is_admitted(cluster: &TestCluster, pods: &[Pod]) -> bool {
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let created = cluster.pods().create(&dry_run, &pods[0]).await.unwrap();
    !architectures_of(&created).is_empty()
}

/// Creates pods continuously until `until` completes. The webhook must see each of them.
async fn under_load<T>(cluster: &TestCluster, until: impl Future<Output = T>) -> (T, usize) {
    let spec = pod_spec(&[cluster.image("arm64")]);
    let pod = [serde_json::from_value(pod("load", spec, json!({}))).unwrap()];
    let mut admitted = 0;
    tokio::pin!(until);
    loop {
        tokio::select! {
            biased;
            done = &mut until => return (done, admitted),
            seen = is_admitted(cluster, &pod) => {
                assert!(seen, "pod {admitted} was created without being asked about");
                admitted += 1;
            }
        }
    }
}

/// The API server reuses connections. A new connection must be trusted at any time too.
async fn fresh_connection(cluster: &TestCluster, port: u16) {
    let client = client(&cluster.webhook_ca().await);
    let url = format!("https://127.0.0.1:{port}/pods");
    let answer = client
        .get(url)
        .send()
        .await
        .expect("what is served is trusted");
    assert_eq!(answer.status(), reqwest::StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn certificates_are_replaced_in_time_and_no_admission_fails() {
    let cluster = TestCluster::take().await;
    let port = free_port();
    let minute = "certificates: {lifetime: 1m}";
    cluster.register();
    let first = Controller::start(&cluster, &admission_config(port, minute));
    cluster.wait_until_called().await;
    // Another replica that never leads and only reads the Secret.
    let other = free_port();
    let config = admission_config(other, minute).replace(
        &format!("https://127.0.0.1:{other}"),
        &format!("https://127.0.0.1:{port}"),
    );
    let second = Controller::start(&cluster, &config);
    second.wait_for_log("admission certificate served").await;
    let before = certificate(&cluster).await.unwrap();
    let replaced = eventually("another certificate", Duration::from_mins(2), || async {
        fresh_connection(&cluster, port).await;
        fresh_connection(&cluster, other).await;
        let now = certificate(&cluster).await?;
        (now != before).then_some(now)
    });
    let (after, admitted) = under_load(&cluster, replaced).await;
    // Clients with the bundle trust the second replica too, whichever certificate it serves.
    fresh_connection(&cluster, other).await;
    // Some time with the new certificate; by then every replica serves it.
    let served = async {
        for controller in [&first, &second] {
            eventually("the new certificate", DEADLINE, || async {
                fresh_connection(&cluster, port).await;
                fresh_connection(&cluster, other).await;
                (controller
                    .log()
                    .matches("admission certificate served")
                    .count()
                    >= 2)
                    .then_some(())
            })
            .await;
        }
    };
    let ((), more) = under_load(&cluster, served).await;
    assert!(
        admitted > 100 && more > 0,
        "{admitted} and {more} pods under load"
    );
    // The Secret is deleted: the old certificate is served until the API server knows the new one.
    secrets(&cluster)
        .delete("archaware-admission", &DeleteParams::default())
        .await
        .unwrap();
    let replaced = eventually("a third certificate", DEADLINE, || async {
        let now = certificate(&cluster).await?;
        (now != after && now != before).then_some(())
    });
    let ((), admitted) = under_load(&cluster, replaced).await;
    assert!(admitted > 0);
    let log = first.log();
    assert!(!log.contains("PRIVATE KEY"), "a key in the log");
    for controller in [second, first] {
        assert_eq!(controller.stop().await, 0);
    }
}

/// A Secret without certificate is replaced.
#[tokio::test]
async fn an_unusable_secret_is_replaced() {
    let cluster = TestCluster::take().await;
    let secret = json!({
        "metadata": {"name": "archaware-admission", "labels": {"theirs": "stays"}},
        "type": "kubernetes.io/tls",
        "data": {"tls.crt": "bm8=", "tls.key": "bm8=", "theirs": "c3RheXM="},
    });
    let secret = serde_json::from_value(secret).unwrap();
    secrets(&cluster)
        .create(&PostParams::default(), &secret)
        .await
        .unwrap();
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let secret = secrets(&cluster).get("archaware-admission").await.unwrap();
    assert_eq!(secret.labels()["theirs"], "stays");
    assert_eq!(secret.data.unwrap()["theirs"].0, b"stays");
    let (_, metrics) = archaware.http("/metrics").await;
    let expiry = metrics
        .lines()
        .find(|line| line.starts_with("archaware_admission_certificate_expiry_seconds"))
        .unwrap();
    let expiry: f64 = expiry.split(' ').nth(1).unwrap().parse().unwrap();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    assert!(
        (expiry - now - 30.0 * 86400.0).abs() < 600.0,
        "thirty days: {expiry}"
    );
}

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Replaces the files atomically by a symbolic link, as the kubelet does.
    fn write(&self) {
        let authority_key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::default();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = rcgen::CertifiedIssuer::self_signed(authority, authority_key).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &issuer).unwrap();
        let version = self
            .dir
            .path()
            .join(format!("version-{:?}", Instant::now()));
        std::fs::create_dir(&version).unwrap();
        std::fs::write(version.join("tls.crt"), leaf.pem()).unwrap();
        std::fs::write(version.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(version.join("ca.crt"), issuer.pem()).unwrap();
        let (link, new) = (self.dir.path().join("data"), self.dir.path().join("new"));
        std::os::unix::fs::symlink(&version, &new).unwrap();
        std::fs::rename(new, link).unwrap();
    }

    fn config(&self) -> String {
        let path = |name: &str| self.path(&format!("data/{name}"));
        format!(
            "certificates: {{certificate: {}, key: {}, authority: {}}}",
            path("tls.crt"),
            path("tls.key"),
            path("ca.crt")
        )
    }
}

#[tokio::test]
async fn certificates_from_files_are_read_again() {
    let cluster = TestCluster::take().await;
    let files = Files::new();
    cluster.register();
    let archaware = Controller::start(&cluster, &admission_config(free_port(), &files.config()));
    // Not ready but running: the files may appear later.
    let waits = eventually("an answer of /readyz", DEADLINE, || async {
        let (status, says) = archaware.http("/readyz").await;
        says.contains("certificate").then_some(status)
    })
    .await;
    assert_eq!(waits, 503);
    archaware
        .wait_for_log("cannot use the files of the admission certificate")
        .await;
    files.write();
    cluster.wait_until_called().await;
    eventually("readiness", DEADLINE, || async {
        (archaware.http("/readyz").await.0 == 200).then_some(())
    })
    .await;
    let bundle = || async {
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
        let found = configurations.get("archaware").await.unwrap();
        found.webhooks.unwrap()[0]
            .client_config
            .ca_bundle
            .clone()
            .unwrap()
            .0
    };
    let before = bundle().await;
    files.write();
    let read_twice = eventually("the new certificate", DEADLINE, || async {
        (archaware
            .log()
            .matches("admission certificate loaded from file")
            .count()
            == 2)
            .then_some(())
    });
    under_load(&cluster, read_twice).await;
    let after = bundle().await;
    assert!(
        after.len() > before.len() && after.ends_with(&before),
        "the old authority stays beside the new one"
    );
    assert!(cluster.is_called().await);
    // Malformed files are reported, and the previous certificate is still served.
    std::fs::write(files.path("data/tls.key"), "nonsense").unwrap();
    eventually("a word about it", DEADLINE, || async {
        (archaware
            .log()
            .matches("cannot use the files of the admission certificate")
            .count()
            == 2)
            .then_some(())
    })
    .await;
    assert!(cluster.is_called().await);
    assert_eq!(archaware.stop().await, 0);
}
