//! One tenant does everything at once that could stop archaware for the others.

mod content;
mod shares;
mod vitals;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry, Script};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream, UdpSocket},
    task::AbortHandle,
};

use super::*;
use vitals::Vitals;

/// Of the container in `manifests/`, in MiB.
const MEMORY_LIMIT: f64 = 256.0;
/// What archaware may use of a CPU during the attack: the other cluster shares the CPUs, so that
/// its pods would not show it.
const CPU_LIMIT: f64 = 1.0;
/// Pods of the other tenant in each measurement.
const PODS: usize = 15;
/// Images of one pod, close to the most that archaware looks at.
const IMAGES: usize = 200;
/// What a shared machine may add to a median of some tens of milliseconds.
const NOISE: Duration = Duration::from_millis(150);

/// The hostile namespace and what its pods refer to. Ends when it is dropped.
struct Tenant {
    cluster: TestCluster,
    namespace: String,
    /// Requires a password, stalls near the end of large bodies, and limits nothing.
    registry: FakeRegistry,
    _name_server: UdpSocket,
    tasks: Vec<AbortHandle>,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Tenant {
    async fn secret(&self, name: &str, auths: Value) {
        let secrets: Api<Secret> = Api::namespaced(self.cluster.client.clone(), &self.namespace);
        let content = json!({"auths": auths}).to_string();
        let secret = json!({"metadata": {"name": name}, "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": content}});
        let secret = serde_json::from_value(secret).unwrap();
        secrets
            .create(&PostParams::default(), &secret)
            .await
            .unwrap();
    }

    async fn pod(&self, name: &str, images: &[String], secret: &str) {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &self.namespace);
        let mut spec = pod_spec(images);
        spec["imagePullSecrets"] = json!([{"name": secret}]);
        let pod = serde_json::from_value(pod(name, spec, json!({}))).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
    }

    fn images(count: usize, name: impl Fn(usize) -> String) -> Vec<String> {
        (0..count).map(name).collect()
    }

    /// Everything at once.
    async fn attack(&mut self, listen: &str) {
        let address = self.registry.address();
        // Globs that a backtracking matcher tries in 10^11 ways, beside the longest host.
        let host = format!("{}.x", "a".repeat(250));
        self.secret(
            "globs",
            json!({"*a*a*a*ab.x": {"auth": "dTpw"}, "*a*a*a*a*a*a*a*ab.x": {"auth": "dTpw"}}),
        )
        .await;
        for number in 0..3 {
            let images = Self::images(IMAGES, |image| format!("{host}/app{image}:{number}"));
            self.pod(&format!("globs-{number}"), &images, "globs").await;
        }
        // As many passwords for one registry as a Secret may hold, and more.
        for (name, entries) in [("passwords", 250), ("too-many", 1500)] {
            let entry = |number: usize| {
                let key = format!("http://{address}/?{number}");
                (
                    key,
                    json!({"username": "user", "password": format!("guess-{number}")}),
                )
            };
            self.secret(name, Value::Object((0..entries).map(entry).collect()))
                .await;
            let images = Self::images(IMAGES, |image| format!("{address}/locked{image}:{name}"));
            self.pod(name, &images, name).await;
        }
        // Bodies that stall near their end, and names that are never answered.
        for number in 0..2 {
            let images = Self::images(IMAGES, |image| format!("{address}/stall{image}:v{number}"));
            self.pod(&format!("stall-{number}"), &images, "globs").await;
            let images = Self::images(IMAGES, |image| format!("r{image}-{number}.silent.test/app"));
            self.pod(&format!("names-{number}"), &images, "globs").await;
        }
        // Connections with half a request, from another address than the test's own.
        let listen: std::net::SocketAddr = listen.parse().unwrap();
        let connections = tokio::spawn(async move {
            let mut held: Vec<TcpStream> = Vec::new();
            for number in 0..3000_u32 {
                let socket = TcpSocket::new_v4().unwrap();
                let from = format!("127.0.0.{}:0", 2 + number % 100);
                socket.bind(from.parse().unwrap()).unwrap();
                let connecting =
                    tokio::time::timeout(Duration::from_secs(5), socket.connect(listen));
                if let Ok(Ok(mut stream)) = connecting.await {
                    // Half a request, or a whole one whose answer is never read.
                    let rest: &[u8] = if number % 2 == 0 {
                        b""
                    } else {
                        b"y\r\nhost: a\r\n\r\n"
                    };
                    let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nx: ").await;
                    let _ = stream.write_all(rest).await;
                    held.push(stream);
                }
            }
            std::future::pending::<()>().await;
        });
        self.tasks.push(connections.abort_handle());
    }
}

/// How long pods of another tenant take from their creation until they are bound: medians.
struct Placing {
    /// Beside the hostile tenant.
    attacked: Duration,
    /// At the same time in a cluster of its own, with an archaware of its own.
    quiet: Duration,
}

async fn time_until_bound(cluster: &TestCluster, name: &str, image: String) -> Duration {
    let started = Instant::now();
    let spec = pod_spec(&[image]);
    cluster.create::<Pod>(pod(name, spec, json!({}))).await;
    cluster.wait_until_bound(name).await;
    started.elapsed()
}

/// What other programs take from this machine slows down both clusters: one pod here and one there,
/// in turn.
async fn placing(
    attacked: &TestCluster,
    quiet: &TestCluster,
    healthy: &FakeRegistry,
    round: usize,
) -> Placing {
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..PODS {
        let tag = format!("v{}", round * PODS + number);
        healthy.add_tag("app", &tag, &testimg::numbered(round * PODS + number));
        let image = format!("{}:{tag}", healthy.image("app"));
        for (cluster, times) in [attacked, quiet].into_iter().zip(&mut times) {
            let name = format!("healthy-{tag}");
            times.push(time_until_bound(cluster, &name, image.clone()).await);
        }
    }
    let [attacked, quiet] = times.map(|mut times| {
        times.sort();
        times[PODS / 2]
    });
    Placing { attacked, quiet }
}

#[tokio::test]
async fn a_hostile_tenant_slows_down_nobody_else() {
    let cluster = TestCluster::take().await;
    let quiet = TestCluster::start_with("KCM_ARGS", "").await;
    cluster.create_three_nodes().await;
    quiet.create_three_nodes().await;
    let (healthy, registry) = (
        FakeRegistry::start().await.unwrap(),
        FakeRegistry::start().await.unwrap(),
    );
    registry.require(Auth::Basic("user".into(), "secret".into()));
    registry.script("/stall", Script::Stall((4 << 20) - (64 << 10)));
    // The program's own resolv.conf names a server that never answers.
    let name_server = UdpSocket::bind("127.53.53.53:53").await.unwrap();
    let resolv_conf = cluster.dir().join("resolv.conf");
    std::fs::write(&resolv_conf, "nameserver 127.53.53.53\n").unwrap();
    let archaware = Controller::start_with_resolv_conf(&cluster, "", &resolv_conf);
    let _undisturbed = Controller::start_with_resolv_conf(&quiet, "", &resolv_conf);
    cluster.wait_until_tainted().await;
    quiet.wait_until_tainted().await;
    let before = placing(&cluster, &quiet, &healthy, 0).await;

    let namespace = format!("{}-hostile", cluster.namespace);
    cluster.create_namespace(&namespace, json!({})).await;
    let mut tenant = Tenant {
        cluster,
        namespace,
        registry,
        _name_server: name_server,
        tasks: Vec::new(),
    };
    let listen = archaware.address().await;
    tenant.attack(&listen).await;
    let (began, cpu) = (Instant::now(), archaware.cpu_time());
    let mut during = Vec::new();
    for round in 1..=3 {
        during.push(placing(&tenant.cluster, &quiet, &healthy, round).await);
    }
    let cpu = archaware
        .cpu_time()
        .saturating_sub(cpu)
        .div_duration_f64(began.elapsed());
    during.sort_by_key(|round| round.attacked);
    let during = &during[1];
    let peak = archaware.peak_memory();
    println!(
        "a hostile tenant: pods of another tenant placed in {:.0?} instead of {:.0?} (before the attack: {:.0?} and {:.0?}), {cpu:.2} CPUs, at most {peak:.0} MiB",
        during.attacked, during.quiet, before.attacked, before.quiet
    );
    assert!(
        during.attacked < during.quiet.mul_f64(1.5) + NOISE,
        "{:?} instead of {:?}",
        during.attacked,
        during.quiet
    );
    assert!(cpu < CPU_LIMIT, "{cpu} CPUs");
    assert!(peak < MEMORY_LIMIT, "{peak} MiB");
    // The attack was one.
    let passwords = eventually("an attack", DEADLINE, || async {
        let seen = tenant.registry.seen();
        let passwords: std::collections::BTreeSet<_> = seen
            .iter()
            .filter_map(|seen| seen.authorization.clone())
            .collect();
        let stalled = seen.iter().any(|seen| seen.path.contains("/stall"));
        (stalled && !passwords.is_empty()).then_some(passwords)
    })
    .await;
    assert!(
        (1..=16).contains(&passwords.len()),
        "{} passwords",
        passwords.len()
    );
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(archaware.http(path).await.0, 200, "{path}");
    }
    let ending = Instant::now();
    assert_eq!(archaware.stop().await, 0);
    assert!(
        ending.elapsed() < Duration::from_secs(10),
        "{:?}",
        ending.elapsed()
    );
}
