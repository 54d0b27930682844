//! `archaware content-proxy` in front of a real containerd: what is forwarded, what is refused, and
//! that each end survives restarts of the other.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use archaware::image::{ResolutionSource, containerd::connect, credentials::Keyring};
use bytes::Bytes;
use containerd_client::services::v1::{WriteAction, WriteContentRequest};
use http::Request;
use prost::Message;
use testimg::FakeRegistry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::{body::Body, transport::Channel};
use tower::ServiceExt;

use testsupport::servers::{Containerd, Process, eventually};

use crate::resolving::{platforms, resolve, resolver_at, settings};

/// `PermissionDenied` as a gRPC status code.
const REFUSED: &str = "7";
const TOO_LARGE: &str = "8";

struct Door {
    socket: PathBuf,
    from: String,
    process: Option<Process>,
}

impl Door {
    async fn open(containerd: &Containerd) -> Self {
        let mut door = Self {
            socket: containerd.dir().join("door.sock"),
            from: containerd.socket(),
            process: None,
        };
        door.restart().await;
        door
    }

    async fn restart(&mut self) {
        self.process = None;
        let log = self.socket.with_extension("log");
        let socket = self.socket.to_str().unwrap();
        let arguments = ["content-proxy", "--from", &self.from, "--listen", socket];
        self.process = Some(Process::start(
            testsupport::program(),
            &arguments,
            &log,
            false,
        ));
        eventually("the door", || async {
            tokio::net::UnixStream::connect(&self.socket).await.ok()
        })
        .await;
    }

    fn path(&self) -> &str {
        self.socket.to_str().unwrap()
    }

    fn channel(&self) -> Channel {
        let _ = rustls::crypto::ring::default_provider().install_default();
        connect(self.path(), Duration::from_secs(10)).unwrap()
    }

    /// The `grpc-status` of a call with this message.
    async fn call(&self, path: &str, headers: &[(&str, &str)], message: &[u8]) -> String {
        let mut frame = vec![0];
        frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        frame.extend(message);
        let mut request = Request::post(path)
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Body::new(http_body_util::Full::new(Bytes::from(frame)));
        let response = self
            .channel()
            .oneshot(request.body(body).unwrap())
            .await
            .unwrap();
        let status = |headers: &http::HeaderMap| {
            headers
                .get("grpc-status")
                .map(|s| s.to_str().unwrap().to_owned())
        };
        if let Some(status) = status(response.headers()) {
            return status;
        }
        let whole = http_body_util::BodyExt::collect(response.into_body())
            .await
            .unwrap();
        whole.trailers().and_then(status).unwrap()
    }
}

/// All other services of containerd, the kubelet's, and common services of gRPC servers.
const CLOSED: &[&str] = &[
    "/containerd.services.namespaces.v1.Namespaces/Create",
    "/containerd.services.namespaces.v1.Namespaces/Delete",
    "/containerd.services.namespaces.v1.Namespaces/List",
    "/containerd.services.namespaces.v1.Namespaces/Get",
    "/containerd.services.namespaces.v1.Namespaces/Update",
    "/containerd.services.containers.v1.Containers/Create",
    "/containerd.services.containers.v1.Containers/List",
    "/containerd.services.snapshots.v1.Snapshots/Mounts",
    "/containerd.services.snapshots.v1.Snapshots/Remove",
    "/containerd.services.tasks.v1.Tasks/Exec",
    "/containerd.services.tasks.v1.Tasks/Create",
    "/containerd.services.diff.v1.Diff/Apply",
    "/containerd.services.events.v1.Events/Subscribe",
    "/containerd.services.events.v1.Events/Publish",
    "/containerd.services.introspection.v1.Introspection/Plugins",
    "/containerd.services.introspection.v1.Introspection/Server",
    "/containerd.services.sandbox.v1.Controller/Create",
    "/containerd.services.sandbox.v1.Store/List",
    "/containerd.services.streaming.v1.Streaming/Stream",
    "/containerd.services.transfer.v1.Transfer/Transfer",
    "/containerd.services.mounts.v1.Mounts/Activate",
    "/containerd.services.content.v1.Content/Nothing",
    "/runtime.v1.RuntimeService/ExecSync",
    "/runtime.v1.ImageService/PullImage",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.Health/Check",
    "/",
    "/containerd.services.content.v1.Content",
    "//containerd.services.content.v1.Content/Info",
];
/// Methods for reading, allowed in archaware's own namespace only.
const READ: &[&str] = &[
    "content.v1.Content/Info",
    "content.v1.Content/Read",
    "images.v1.Images/Get",
    "images.v1.Images/List",
];
const OWN: &[&str] = &[
    "content.v1.Content/Delete",
    "content.v1.Content/Write",
    "content.v1.Content/Update",
    "content.v1.Content/List",
    "content.v1.Content/Status",
    "content.v1.Content/ListStatuses",
    "content.v1.Content/Abort",
    "images.v1.Images/Create",
    "images.v1.Images/Update",
    "images.v1.Images/Delete",
    "leases.v1.Leases/Create",
    "leases.v1.Leases/Delete",
    "leases.v1.Leases/List",
    "leases.v1.Leases/AddResource",
    "leases.v1.Leases/DeleteResource",
    "leases.v1.Leases/ListResources",
];

#[tokio::test]
async fn only_what_resolution_needs_passes() {
    for binary in Containerd::binaries() {
        let containerd = Containerd::start(&binary).await;
        let door = Door::open(&containerd).await;
        let mode = fs::metadata(&door.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "for its owner alone");
        eventually("the namespace", || async {
            let namespaces = containerd.ctr("default", &["namespaces", "ls", "-q"]);
            namespaces.contains("archaware").then_some(())
        })
        .await;
        let (own, theirs) = (
            ("containerd-namespace", "archaware"),
            ("containerd-namespace", "k8s.io"),
        );
        for path in CLOSED {
            for namespace in [own, theirs] {
                assert_eq!(
                    door.call(path, &[namespace], b"").await,
                    REFUSED,
                    "{path} {namespace:?}"
                );
            }
        }
        let open = READ
            .iter()
            .map(|path| (path, true))
            .chain(OWN.iter().map(|path| (path, false)));
        for (path, read) in open {
            let path = format!("/containerd.services.{path}");
            // An empty message and malformed ones must not crash containerd.
            for message in [&b""[..], &[0xff; 20], &[0x0a, 0]] {
                assert_ne!(door.call(&path, &[own], message).await, REFUSED, "{path}");
            }
            assert_eq!(
                door.call(&path, &[theirs], b"").await == REFUSED,
                !read,
                "{path}"
            );
            let moby = ("containerd-namespace", "moby");
            for closed in [&[moby][..], &[own, theirs], &[]] {
                assert_eq!(
                    door.call(&path, closed, b"").await,
                    REFUSED,
                    "{path} {closed:?}"
                );
            }
        }
        let version = "/containerd.services.version.v1.Version/Version";
        assert_eq!(
            door.call(version, &[], b"").await,
            "0",
            "{}",
            binary.display()
        );
    }
}

/// Writes that would crash containerd (2.x) or open a namespace.
#[tokio::test]
async fn writes_that_are_no_documents_do_not_pass() {
    let own = ("containerd-namespace", "archaware");
    let path = "/containerd.services.content.v1.Content/Write";
    let secret = b"in a namespace that is closed";
    for binary in Containerd::binaries() {
        let containerd = Containerd::start(&binary).await;
        let door = Door::open(&containerd).await;
        let file = containerd.dir().join("blob");
        fs::write(&file, secret).unwrap();
        let command = format!(
            "ctr -a {} -n moby content ingest ref < {}",
            containerd.socket(),
            file.display()
        );
        testsupport::servers::run("sh", &["-c", &command]);
        let digest = archaware::image::digest::Digest::sha256(secret).to_string();
        let write = WriteContentRequest {
            action: WriteAction::Commit.into(),
            r#ref: "odd".to_owned(),
            offset: i64::try_from(secret.len()).unwrap(),
            expected: digest.clone(),
            ..Default::default()
        };
        let nocolon = WriteContentRequest {
            offset: 0,
            expected: "nocolon".to_owned(),
            data: b"x".to_vec(),
            ..write.clone()
        };
        for odd in [write, nocolon] {
            let status = door.call(path, &[own], &odd.encode_to_vec()).await;
            assert_eq!(status, "3", "invalid argument: {odd:?}");
        }
        assert!(!containerd.holds(&digest));
        let version = "/containerd.services.version.v1.Version/Version";
        assert_eq!(
            door.call(version, &[], b"").await,
            "0",
            "{}",
            binary.display()
        );
    }
}

#[tokio::test]
async fn malformed_and_excessive_requests_do_not_reach_containerd() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let mut door = Door::open(&containerd).await;
    let own = ("containerd-namespace", "archaware");
    let (info, write) = (
        "/containerd.services.content.v1.Content/Info",
        "/containerd.services.content.v1.Content/Write",
    );
    for (path, size) in [(info, 100 * 1024), (write, 8 * 1024 * 1024)] {
        assert_eq!(
            door.call(path, &[own], &vec![0; size]).await,
            TOO_LARGE,
            "{path}"
        );
    }
    // containerd itself rejects malformed messages.
    assert_ne!(door.call(info, &[own], &[0xff; 100]).await, "0");
    let long = "x".repeat(60 * 1024);
    let flooded = Request::post(info)
        .header("long", &long)
        .body(Body::empty())
        .unwrap();
    let answer = door.channel().oneshot(flooded).await;
    assert!(
        answer.is_err() || answer.unwrap().status() != http::StatusCode::OK,
        "headers of 60 KiB"
    );
    for nonsense in [
        &b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        &[0; 10_000],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut stream = tokio::net::UnixStream::connect(&door.socket).await.unwrap();
        let _ = stream.write_all(nonsense).await;
        let mut end = Vec::new();
        let closed =
            tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut end)).await;
        assert!(closed.is_ok(), "the connection is closed");
    }
    // A client that opens more connections than it needs and sends nothing: they are closed after
    // five seconds, and do not keep the few places.
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(tokio::net::UnixStream::connect(&door.socket).await.unwrap());
    }
    let waiting = std::time::Instant::now();
    eventually("a door that still works", || async {
        let version = Request::post("/containerd.services.version.v1.Version/Version")
            .header("content-type", "application/grpc")
            .body(Body::new(http_body_util::Full::new(Bytes::from_static(
                &[0; 5],
            ))))
            .unwrap();
        door.channel()
            .oneshot(version)
            .await
            .ok()
            .filter(|answer| answer.status().is_success())
    })
    .await;
    let waited = waiting.elapsed();
    assert!(waited < Duration::from_secs(12), "{waited:?}");
    drop(silent);
    let pid = door.process.as_ref().unwrap().id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 64 * 1024, "{peak} kB");
    // A path that is not a socket is not replaced.
    let file = door.socket.with_extension("file");
    fs::write(&file, "important").unwrap();
    let log = door.socket.with_extension("occupied");
    let arguments = [
        "content-proxy",
        "--from",
        &door.from,
        "--listen",
        file.to_str().unwrap(),
    ];
    let mut occupied = Process::start(testsupport::program(), &arguments, &log, false);
    assert_eq!(occupied.exited().await, 1);
    assert_eq!(fs::read_to_string(&file).unwrap(), "important");
    // Only one proxy per socket, and a clean exit.
    let log = door.socket.with_extension("second");
    let arguments = [
        "content-proxy",
        "--from",
        &door.from,
        "--listen",
        door.path(),
    ];
    let mut second = Process::start(testsupport::program(), &arguments, &log, false);
    assert_eq!(second.exited().await, 1);
    assert!(
        fs::read_to_string(&log)
            .unwrap()
            .contains("another process listens")
    );
    let mut process = door.process.take().unwrap();
    process.signal("-TERM");
    assert_eq!(process.exited().await, 0);
}

#[tokio::test]
async fn each_end_survives_a_restart_of_the_other() {
    for binary in Containerd::binaries() {
        let mut containerd = Containerd::start(&binary).await;
        let mut door = Door::open(&containerd).await;
        let registry = FakeRegistry::start().await.unwrap();
        for name in ["multi", "unnamed", "amd64"] {
            registry.add(name, &testimg::find(name));
        }
        let resolver = resolver_at(door.path(), settings());
        let kept = async |image: &str| {
            let digest = testimg::find(image).root.digest;
            let by_digest = format!("{}@{digest}", registry.image(image));
            eventually(&format!("{image} kept through the door"), || async {
                resolve(&resolver, &by_digest, &Keyring::default())
                    .await
                    .unwrap();
                containerd.holds(&digest).then_some(())
            })
            .await;
        };
        let first = resolve(&resolver, &registry.image("multi"), &Keyring::default())
            .await
            .unwrap();
        assert_eq!(first.source, ResolutionSource::Registry);
        kept("multi").await;
        containerd.restart().await;
        let again = resolver_at(door.path(), settings());
        registry.forget();
        eventually("an answer of the restarted containerd", || async {
            let fresh = resolver_at(door.path(), settings());
            let resolved = resolve(&fresh, &registry.image("multi"), &Keyring::default())
                .await
                .unwrap();
            (resolved.source == ResolutionSource::Containerd).then_some(())
        })
        .await;
        door.restart().await;
        registry.forget();
        // The same process of archaware uses the new socket.
        let digest = testimg::find("multi").root.digest;
        let by_digest = format!("{}@{digest}", registry.image("multi"));
        let resolved = resolve(&again, &by_digest, &Keyring::default())
            .await
            .unwrap();
        assert_eq!(
            (resolved.source, platforms(&resolved).len()),
            (ResolutionSource::Containerd, 3)
        );
        assert_eq!(registry.seen(), []);
    }
}
