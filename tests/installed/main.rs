//! archaware as users install it: its own image, the shipped manifests, a real kubelet and
//! containerd.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    dead_code,
    reason = "a test that cannot go on has failed; it shares its helpers with the others"
)]

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use testsupport::cluster::{DEADLINE, TestCluster, eventually, pod, pod_spec, taints};

/// The image is built beside the tests, which may have to wait.
const BUILD: Duration = Duration::from_mins(40);
/// The node of the test cluster is this machine, so pods share its network.
const PORT: u16 = 18_080;
/// Of the webhook.
const WEBHOOK_PORT: u16 = 18_443;

/// The folder that `hack/build.sh` wrote, and the digest that it printed.
async fn built() -> (PathBuf, String) {
    let folder = std::env::var("ARCHAWARE_TEST_IMAGE").expect(
        "hack/test.sh builds the image when it is called without a filter, or with IMAGE=yes",
    );
    let folder = PathBuf::from(folder);
    let digest = eventually("the image", BUILD, || async {
        assert!(!folder.join("failed").exists(), "hack/build.sh has failed");
        std::fs::read_to_string(folder.join("digest")).ok()
    })
    .await;
    (folder.join("layout"), digest.trim().to_owned())
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn document(layout: &Path, digest: &Value) -> Value {
    let (algorithm, hash) = digest.as_str().unwrap().split_once(':').unwrap();
    let blob = std::fs::read(layout.join("blobs").join(algorithm).join(hash)).unwrap();
    serde_json::from_slice(&blob).unwrap()
}

#[tokio::test]
async fn the_image_holds_what_it_needs_and_starts_on_every_platform() {
    let (layout, digest) = built().await;
    let cluster = TestCluster::take_with_node().await;
    let index = document(&layout, &json!(digest));
    let mut platforms = Vec::new();
    for entry in index["manifests"].as_array().unwrap() {
        let architecture = entry["platform"]["architecture"].as_str().unwrap();
        platforms.push(architecture.to_owned());
        let manifest = document(&layout, &entry["digest"]);
        let config = document(&layout, &manifest["config"]["digest"]);
        assert_eq!(config["architecture"], architecture);
        assert_eq!(config["config"]["User"], "65532:65532");
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        let layer = manifest["layers"][0]["digest"].as_str().unwrap();
        let blob = layout.join("blobs").join(layer.replace(':', "/"));
        run("tar", &["-xzf", blob.to_str().unwrap(), "-C", root]);
        // The image contains no other program, and its files do not belong to the user that runs
        // it.
        let programs = run(
            "find",
            &[root, "-type", "f", "-perm", "/111", "-printf", "%P\n"],
        );
        assert_eq!(programs.lines().collect::<Vec<_>>(), ["archaware"]);
        assert_eq!(run("find", &[root, "-user", "65532"]), "");
        // `e_type` of its ELF header is `ET_DYN`: its addresses are random.
        let header = std::fs::read(format!("{root}/archaware")).unwrap();
        assert_eq!(header[16..18], [3, 0], "{architecture}");
        // The program needs no library, uses HTTP and resolves an image: emulated if it is for
        // another architecture.
        let program = |arguments: &[&str]| {
            if machine(architecture) == std::env::consts::ARCH {
                return run("chroot", &[&[root, "/archaware"], arguments].concat());
            }
            let emulator = format!("qemu-{}-static", machine(architecture));
            let path = format!("{root}/archaware");
            run(&emulator, &[&[path.as_str()], arguments].concat())
        };
        let image = cluster.image("multi");
        let out = program(&["inspect", "-o", "json", &image]);
        let version = program(&["version", "-o", "json"]);
        let version: Value = serde_json::from_str(&version).unwrap();
        let revision = index["annotations"]["org.opencontainers.image.revision"].clone();
        assert!(revision.is_string(), "{index}");
        assert_eq!(version["commit"], revision);
        let lines: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            lines[0]["architectures"],
            json!(["amd64", "arm64", "s390x"]),
            "{architecture}: {out}"
        );
    }
    assert_eq!(platforms, ["amd64", "arm64"]);
}

/// What `uname -m` and qemu call a GOARCH architecture.
fn machine(architecture: &str) -> &'static str {
    match architecture {
        "amd64" => "x86_64",
        "arm64" => "aarch64",
        _ => panic!("archaware's image is not built for {architecture}"),
    }
}

/// An overlay of the shipped manifests with other addresses: this node has no pod network, so pods
/// share the machine's ports, and the API server is on loopback.
fn overlay(cluster: &TestCluster, digest: &str) -> PathBuf {
    let folder = cluster.dir().join("overlay");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let project = std::env::current_dir().unwrap();
    let up = "../".repeat(folder.components().count() - 1);
    let base = format!(
        "{up}{}",
        project
            .join("manifests")
            .strip_prefix("/")
            .unwrap()
            .display()
    );
    let api = api_port(cluster);
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": PORT, "host": "127.0.0.1"}});
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "archaware", "namespace": "archaware"},
        "spec": {"replicas": 1, "template": {"spec": {
            "hostNetwork": true,
            "containers": [{
                "name": "archaware",
                "args": ["run", "--config=/etc/archaware/config.yaml", format!("--listen=127.0.0.1:{PORT}")],
                "env": [
                    {"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"},
                    {"name": "KUBERNETES_SERVICE_PORT", "value": api},
                ],
                "livenessProbe": probe("/healthz"),
                "readinessProbe": probe("/readyz"),
            }],
            "volumes": [{"name": "containerd", "hostPath": {"path": cluster.node_dir("containerd")}}],
        }}},
    });
    // Without a pod network there are no Services: the API server finds the webhook on loopback.
    let webhook = format!("https://127.0.0.1:{WEBHOOK_PORT}");
    let config = format!(
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n\
         containerd: {{socket: /run/archaware/containerd.sock}}\n\
         admission: {{enabled: true, onMiss: gate, listen: \"127.0.0.1:{WEBHOOK_PORT}\", url: \"{webhook}\"}}\n"
    );
    let config = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "archaware", "namespace": "archaware"},
        "data": {"config.yaml": config},
    });
    let at = |path: &str| {
        json!({"name": format!("{path}.archaware.dev"),
            "clientConfig": {"service": null, "url": format!("{webhook}/{path}")}})
    };
    let registration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "archaware"},
        "webhooks": [at("pods"), at("nodes"), at("daemonsets")],
    });
    let patches =
        [deployment, config, registration].map(|patch| json!({"patch": patch.to_string()}));
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
        "images": [{
            "name": "ghcr.io/archaware/archaware",
            "newName": format!("{}/archaware/archaware", cluster.registry()),
            "digest": digest,
        }],
        "patches": patches,
    });
    std::fs::write(folder.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    folder
}

/// Pushes the image to the registry of the cluster.
fn push(cluster: &TestCluster, layout: &Path) {
    let to = format!("docker://{}/archaware/archaware:test", cluster.registry());
    let from = format!("oci:{}", layout.display());
    let options = ["--all", "--quiet", "--dest-tls-verify=false"];
    run("skopeo", &[&["copy"], &options[..], &[&from, &to]].concat());
}

/// The port of the API server on loopback.
fn api_port(cluster: &TestCluster) -> String {
    let kubeconfig = std::fs::read_to_string(cluster.kubeconfig("admin")).unwrap();
    let (_, rest) = kubeconfig.split_once("https://127.0.0.1:").unwrap();
    rest.split('"').next().unwrap().to_owned()
}

async fn metrics() -> Option<String> {
    let http = reqwest::Client::builder()
        .tls_certs_only([])
        .build()
        .unwrap();
    let answer = http
        .get(format!("http://127.0.0.1:{PORT}/metrics"))
        .send()
        .await
        .ok()?;
    answer.text().await.ok()
}

/// `archaware clean` in one of its own pods removes everything, and then ends that pod.
async fn clean_in_its_own_pod(cluster: &TestCluster) {
    let clean = [
        "-n",
        "archaware",
        "exec",
        "deploy/archaware",
        "--",
        "archaware",
        "clean",
    ];
    let (done, out, error) = cluster.try_kubectl(&clean);
    assert!(done && out.contains("Cleaned"), "{out}{error}");
    eventually("a pod that ends", DEADLINE, || async {
        let pods = cluster.kubectl(&["-n", "archaware", "get", "pods", "-o", "name"]);
        pods.trim().is_empty().then_some(())
    })
    .await;
    // The Lease of the command that ended with its pod is waited out.
    let (status, out, error) = cluster.archaware(&["clean", "--stop-controller"]);
    assert_eq!(status, 0, "{out}{error}");
    let node = cluster.nodes().get("localhost").await.unwrap();
    assert!(
        !taints(&node)
            .iter()
            .any(|taint| taint.contains("kubernetes.io/arch"))
    );
}

#[tokio::test]
async fn kubectl_apply_runs_archaware_from_its_own_image() {
    let (layout, digest) = built().await;
    let cluster = TestCluster::take_with_node().await;
    push(&cluster, &layout);
    let folder = overlay(&cluster, &digest);
    let folder = folder.to_str().unwrap();
    cluster.kubectl(&["apply", "-k", folder]);
    let rolled_out = [
        "-n",
        "archaware",
        "rollout",
        "status",
        "deployment/archaware",
        "--timeout=180s",
    ];
    let (done, out, error) = cluster.try_kubectl(&rolled_out);
    let state = || cluster.kubectl(&["-n", "archaware", "describe", "pods"]);
    assert!(done, "{out}{error}{}", state());
    cluster.wait_until_tainted().await;
    cluster.wait_until_called().await;

    // It decides about a pod, which the kubelet then starts.
    let mut spec = pod_spec(&[cluster.image("multi")]);
    spec["hostNetwork"] = json!(true);
    cluster
        .create::<k8s_openapi::api::core::v1::Pod>(pod("app", spec, json!({})))
        .await;
    eventually("a running pod", DEADLINE, || async {
        let pod = cluster.pods().get("app").await.ok()?;
        let running = pod.status?.phase? == "Running";
        let annotations = pod.metadata.annotations?;
        let affinity = serde_json::to_string(&pod.spec?.affinity).ok()?;
        (running && annotations["archaware.dev/decision"] == "amd64,arm64,s390x")
            .then(|| assert!(affinity.contains("s390x"), "{affinity}"))
    })
    .await;
    // Through the content proxy, which has the node's socket.
    let up = metrics().await.unwrap();
    assert!(
        up.contains("archaware_containerd_up 1") || up.contains("archaware_containerd_up{} 1"),
        "{up}"
    );

    // Its own next pod runs on the node that it tainted, and the previous one ends in time.
    let own = [
        "-n",
        "archaware",
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/name=archaware",
        "--wait=true",
    ];
    let told = Instant::now();
    cluster.kubectl(&own);
    let took = told.elapsed();
    assert!(took < Duration::from_secs(10), "SIGTERM took {took:?}");
    let (done, out, error) = cluster.try_kubectl(&rolled_out);
    assert!(done, "{out}{error}{}", state());
    let log = cluster.kubectl(&[
        "-n",
        "archaware",
        "logs",
        "deployment/archaware",
        "-c",
        "archaware",
    ]);
    assert!(log.contains("this replica is leading"), "{log}");

    clean_in_its_own_pod(&cluster).await;
    cluster.kubectl(&[
        "delete",
        "-k",
        folder,
        "--wait=false",
        "-l",
        "app.kubernetes.io/component!=access",
    ]);
}

#[tokio::test]
async fn helm_installs_and_uninstalls_it() {
    let (layout, digest) = built().await;
    let cluster = TestCluster::take_with_node().await;
    push(&cluster, &layout);
    // What the tests' permissions are called is the chart's.
    let access = ["-l", "app.kubernetes.io/component=access"];
    cluster.kubectl(&[&["delete", "-f", "manifests/archaware.yaml"], &access[..]].concat());
    // Pods share the machine's network, and the API server is on loopback.
    let values = json!({
        "image": {"repository": format!("{}/archaware/archaware", cluster.registry()), "digest": digest},
        "replicas": 1,
        "hostNetwork": true,
        "ports": {"http": PORT, "webhook": WEBHOOK_PORT},
        "host": {"containerdFolder": cluster.node_dir("containerd")},
        "env": [
            {"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"},
            {"name": "KUBERNETES_SERVICE_PORT", "value": api_port(&cluster)},
        ],
        "config": {"admission": {"url": format!("https://127.0.0.1:{WEBHOOK_PORT}")}},
    });
    let file = cluster.dir().join("installed.yaml");
    std::fs::write(&file, values.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let helm = |arguments: &[&str]| {
        let (done, out, error) = cluster.helm(&[arguments, &["-n", "archaware"]].concat());
        let state = || cluster.kubectl(&["-n", "archaware", "describe", "pods"]);
        assert!(done, "{arguments:?}: {out}{error}{}", state());
        out
    };
    let chart = "charts/archaware";
    let create = [
        "--create-namespace",
        "--wait",
        "--timeout",
        "180s",
        "-f",
        file,
    ];
    let notes = helm(&[&["install", "archaware", chart], &create[..]].concat());
    assert!(notes.contains("first runs `archaware clean`"), "{notes}");
    cluster.wait_until_tainted().await;
    cluster.wait_until_called().await;
    // An upgrade keeps what archaware wrote into the registration.
    let more = ["--set", "monitoring.dashboard=true", "--wait", "-f", file];
    helm(&[&["upgrade", "archaware", chart], &more[..]].concat());
    assert!(cluster.is_called().await, "the caBundle is gone");
    helm(&["uninstall", "archaware", "--wait", "--timeout", "180s"]);
    let node = cluster.nodes().get("localhost").await.unwrap();
    let left = taints(&node);
    assert!(
        !left
            .iter()
            .any(|taint| taint.contains("kubernetes.io/arch")),
        "{left:?}"
    );
    for kind in [
        "mutatingwebhookconfiguration",
        "clusterrole",
        "clusterrolebinding",
    ] {
        let names = cluster.kubectl(&["get", kind, "-o", "name"]);
        assert!(!names.contains("archaware"), "{names}");
    }
    // The Lease ends by itself, so that a replica that is late does not begin anew. Its pods take a
    // while to end.
    let kinds = "all,configmaps,secrets,roles,rolebindings,resourcequotas";
    eventually("an empty namespace", DEADLINE, || async {
        let names = cluster.kubectl(&["-n", "archaware", "get", kinds, "-o", "name"]);
        (!names.contains("archaware")).then_some(())
    })
    .await;
}

/// The archives that are published: what they hold, their checksums, and the manifest for krew.
#[tokio::test]
async fn archives_for_people_are_made_from_the_image() {
    let (layout, _) = built().await;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    // A program for a Mac is made on a Mac: any file stands for one.
    let program = "darwin/arm64=README.md";
    let arguments = [
        "--out",
        out.to_str().unwrap(),
        "--layout",
        layout.to_str().unwrap(),
        "--program",
        program,
    ];
    let release = Command::new("hack/release.sh").args(arguments).output();
    let release = release.unwrap();
    let said = String::from_utf8_lossy(&release.stderr);
    assert!(release.status.success(), "{said}");
    assert!(said.contains("NOT PACKED: darwin/amd64"), "{said}");
    let checked = Command::new("sha256sum")
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(&out)
        .output();
    assert!(checked.unwrap().status.success());
    let krew = std::fs::read_to_string(out.join("archaware.krew.yaml")).unwrap();
    let krew: Value = serde_json::from_str(&krew).unwrap();
    let sums = std::fs::read_to_string(out.join("SHA256SUMS")).unwrap();
    let platforms = krew["spec"]["platforms"].as_array().unwrap();
    let of = |platform: &Value| {
        let labels = &platform["selector"]["matchLabels"];
        format!(
            "{}/{}",
            labels["os"].as_str().unwrap(),
            labels["arch"].as_str().unwrap()
        )
    };
    let names: Vec<String> = platforms.iter().map(of).collect();
    assert_eq!(names, ["linux/amd64", "linux/arm64", "darwin/arm64"]);
    for platform in platforms {
        let archive = platform["uri"]
            .as_str()
            .unwrap()
            .rsplit('/')
            .next()
            .unwrap();
        let sum = format!("{}  {archive}", platform["sha256"].as_str().unwrap());
        assert!(sums.contains(&sum), "{sum} is not in {sums}");
        let files = run("tar", &["-tzf", out.join(archive).to_str().unwrap()]);
        let files: Vec<&str> = files.lines().collect();
        let taken = platform["files"].as_array().unwrap().iter();
        for file in taken.map(|file| file["from"].as_str().unwrap()).chain([
            "kubectl_complete-archaware",
            "man/archaware-explain.1",
            "completions/archaware.bash",
        ]) {
            let file = format!("./{file}");
            assert!(
                files.contains(&file.as_str()),
                "{archive} has no {file}: {files:?}"
            );
        }
    }
}
