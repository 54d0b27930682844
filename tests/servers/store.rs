//! Fetched documents are persisted in a real containerd, of each supported version, and nothing
//! stays there forever.

use std::time::Duration;

use archaware::{
    image::{Reason, ResolutionSource, credentials::Keyring},
    metrics::Metrics,
};
use testimg::{Auth, FakeRegistry, Script};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{UnixListener, UnixStream},
};

use testsupport::servers::{Containerd, eventually};

use crate::resolving::{WithContainerd, keyring, platforms, resolve, resolver_at, settings};

pub(crate) const MULTI: [&str; 3] = ["linux/amd64", "linux/arm64", "linux/s390x"];

/// A registry with an index whose entries name their platforms, one without, and a manifest.
pub(crate) async fn registry() -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    for name in ["multi", "unnamed", "amd64", "nested"] {
        registry.add(name, &testimg::find(name));
    }
    registry
}

pub(crate) async fn wait_until_persisted(containerd: &Containerd, image: &str) {
    let root = testimg::find(image).root.digest;
    eventually(&format!("{image} in containerd"), || async {
        let held = containerd.ctr("archaware", &["content", "ls"]);
        let line = held.lines().find(|line| line.starts_with(&root))?;
        line.contains("archaware.dev/tag.").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_restart_costs_no_request_while_tags_are_fresh() {
    for binary in Containerd::binaries() {
        let mut containerd = Containerd::start(&binary).await;
        let registry = registry().await;
        let first = containerd.resolver(settings());
        let mut answers = Vec::new();
        for name in ["multi", "unnamed", "amd64", "nested"] {
            let resolved = resolve(&first, &registry.image(name), &Keyring::default())
                .await
                .unwrap();
            assert_eq!(resolved.source, ResolutionSource::Registry);
            wait_until_persisted(&containerd, name).await;
            answers.push((name, platforms(&resolved)));
        }
        drop(first);
        containerd.restart().await;
        containerd.collect();
        registry.forget();
        let second = containerd.resolver(settings());
        for (name, expected) in answers {
            let resolved = resolve(&second, &registry.image(name), &Keyring::default())
                .await
                .unwrap();
            assert_eq!(
                (platforms(&resolved), resolved.source),
                (expected, ResolutionSource::Containerd),
                "{name}"
            );
        }
        assert_eq!(registry.seen(), [], "{}", binary.display());
    }
}

/// Each write waits for the disk, so a rollout must not repeat them.
#[tokio::test]
async fn many_pods_of_one_image_cost_one_tree_and_one_tag() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let registry = registry().await;
    let metrics = Metrics::default();
    let resolver = containerd.counting(settings(), &metrics);
    let (keyring, image) = (Keyring::default(), registry.image("multi"));
    let many = (0..64).map(|_| resolve(&resolver, &image, &keyring));
    assert!(
        futures::future::join_all(many)
            .await
            .iter()
            .all(Result::is_ok)
    );
    wait_until_persisted(&containerd, "multi").await;
    // This comes after all of that in its queue.
    resolve(&resolver, &registry.image("amd64"), &keyring)
        .await
        .unwrap();
    wait_until_persisted(&containerd, "amd64").await;
    let stored = "archaware_containerd_writes_total{result=\"stored\"} 4\n";
    eventually("two trees and two tags, and no more", || async {
        metrics.encode().unwrap().contains(stored).then_some(())
    })
    .await;
}

/// Forwards to containerd's socket and delays each document, as a slow disk would.
fn slow_disk(containerd: &Containerd) -> String {
    const WRITE: Duration = Duration::from_millis(300);
    let (target, socket) = (
        containerd.socket(),
        containerd.dir().join("slow.sock").display().to_string(),
    );
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = UnixStream::connect(&target).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut buffer = [0; 16 * 1024];
                while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
                    // Documents are JSON; nothing else that archaware sends to containerd is.
                    if buffer[..read].windows(2).any(|two| two == b"{\"") {
                        tokio::time::sleep(WRITE).await;
                    }
                    if to_server.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    socket
}

#[tokio::test]
async fn a_tag_is_kept_when_its_tree_takes_long_to_write() {
    let containerd = Containerd::start(&Containerd::binaries()[2]).await;
    let registry = registry().await;
    let resolver = resolver_at(&slow_disk(&containerd), settings());
    let image = registry.image("unnamed");
    assert!(
        resolve(&resolver, &image, &Keyring::default())
            .await
            .is_ok()
    );
    wait_until_persisted(&containerd, "unnamed").await;
}

#[tokio::test]
async fn a_private_image_costs_one_head_after_a_restart() {
    for binary in Containerd::binaries() {
        let containerd = Containerd::start(&binary).await;
        let registry = registry().await;
        registry.require(Auth::Basic("user".into(), "secret".into()));
        let (image, right) = (
            registry.image("amd64"),
            keyring(&registry.address(), "user", "secret"),
        );
        let first = containerd.resolver(settings());
        assert!(resolve(&first, &image, &right).await.is_ok());
        let root = testimg::find("amd64").root.digest;
        eventually("the tree in containerd", || async {
            containerd.holds(&root).then_some(())
        })
        .await;
        assert!(
            !containerd
                .ctr("archaware", &["content", "ls"])
                .contains("archaware.dev/tag."),
            "its tag is not persisted"
        );
        registry.forget();
        let second = containerd.resolver(settings());
        let error = resolve(&second, &image, &Keyring::default())
            .await
            .unwrap_err();
        assert_eq!(error.reason(), Reason::Denied);
        registry.forget();
        assert!(resolve(&second, &image, &right).await.is_ok());
        let heads = registry.count("HEAD", "");
        // The first request gets a challenge, the second an answer.
        assert_eq!(
            (heads, registry.count("GET", "")),
            (2, 0),
            "{}",
            binary.display()
        );
    }
}

#[tokio::test]
async fn old_tags_are_refreshed_and_used_while_the_registry_is_down() {
    let binary = Containerd::binaries().remove(0);
    let containerd = Containerd::start(&binary).await;
    let registry = registry().await;
    let image = registry.image("multi");
    let first = containerd.resolver(settings());
    assert!(resolve(&first, &image, &Keyring::default()).await.is_ok());
    wait_until_persisted(&containerd, "multi").await;
    let mut impatient = settings();
    (impatient.tag_ttl, impatient.latest_ttl) =
        (Duration::from_millis(1), Duration::from_millis(1));
    registry.forget();
    let second = containerd.resolver(impatient.clone());
    assert!(resolve(&second, &image, &Keyring::default()).await.is_ok());
    assert_eq!(
        (registry.count("HEAD", ""), registry.count("GET", "")),
        (1, 0)
    );
    registry.script("/", Script::Status(503, Vec::new()));
    let third = containerd.resolver(impatient);
    let stale = resolve(&third, &image, &Keyring::default()).await.unwrap();
    assert_eq!(platforms(&stale), MULTI);
}

/// What a node pulled long ago says what the tag was then.
#[tokio::test]
async fn an_old_record_of_the_node_is_used_only_while_the_registry_is_down() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let registry = registry().await;
    let (image, root) = (registry.image("multi"), testimg::find("multi").root);
    containerd.ingest("k8s.io", &root);
    let label = "containerd.io/distribution.source.127.0.0.1=multi";
    containerd.ctr("k8s.io", &["content", "label", &root.digest, label]);
    containerd
        .image_record("k8s.io", &format!("{image}:latest"), &root)
        .await;
    // The tag has moved since.
    registry.add("multi", &testimg::find("arm64"));
    let fresh = resolve(
        &containerd.resolver(settings()),
        &image,
        &Keyring::default(),
    )
    .await;
    assert!(fresh.is_ok_and(|fresh| fresh.digest.to_string() == root.digest));
    let mut impatient = settings();
    (impatient.tag_ttl, impatient.latest_ttl) =
        (Duration::from_millis(1), Duration::from_millis(1));
    let moved = resolve(
        &containerd.resolver(impatient.clone()),
        &image,
        &Keyring::default(),
    )
    .await;
    assert_eq!(platforms(&moved.unwrap()), ["linux/arm64"]);
    registry.script("/", Script::Status(503, Vec::new()));
    let stale = resolve(&containerd.resolver(impatient), &image, &Keyring::default()).await;
    assert_eq!(
        stale.map(|stale| stale.digest.to_string()).ok(),
        Some(root.digest)
    );
}

#[tokio::test]
async fn what_was_fetched_last_is_written_before_the_process_ends() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let registry = registry().await;
    let resolver = resolver_at(&slow_disk(&containerd), settings());
    for name in ["amd64", "multi"] {
        let resolved = resolve(&resolver, &registry.image(name), &Keyring::default()).await;
        assert!(resolved.is_ok());
    }
    let started = std::time::Instant::now();
    resolver.finish_writes().await;
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
    drop(resolver);
    registry.forget();
    let next = containerd.resolver(settings());
    for name in ["amd64", "multi"] {
        let resolved = resolve(&next, &registry.image(name), &Keyring::default()).await;
        assert_eq!(
            resolved.unwrap().source,
            ResolutionSource::Containerd,
            "{name}"
        );
    }
    assert_eq!(registry.seen(), []);
}

/// A containerd that hangs does not hold up the end of the process.
#[tokio::test]
async fn writes_that_hang_are_given_up_after_two_seconds() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let registry = registry().await;
    let resolver = resolver_at(&containerd.socket(), settings());
    let image = registry.image("multi");
    containerd.signal("-STOP");
    let resolved = resolve(&resolver, &image, &Keyring::default()).await;
    assert!(resolved.is_ok());
    let started = std::time::Instant::now();
    resolver.finish_writes().await;
    let took = started.elapsed();
    containerd.signal("-CONT");
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[tokio::test]
async fn content_lives_as_long_as_its_lease_which_use_extends() {
    for binary in Containerd::binaries() {
        let containerd = Containerd::start(&binary).await;
        let registry = registry().await;
        let resolver = containerd.resolver(settings());
        for name in ["unnamed", "multi"] {
            assert!(
                resolve(&resolver, &registry.image(name), &Keyring::default())
                    .await
                    .is_ok()
            );
            wait_until_persisted(&containerd, name).await;
        }
        let leases = containerd.ctr("archaware", &["leases", "ls"]);
        let lease = leases
            .lines()
            .find(|line| line.starts_with("archaware-"))
            .unwrap();
        assert_eq!(
            leases
                .lines()
                .filter(|line| line.starts_with("archaware-"))
                .count(),
            1,
            "{leases}"
        );
        assert!(lease.contains("containerd.io/gc.expire="), "{leases}");
        let unnamed = testimg::find("unnamed");
        let held = || {
            unnamed
                .manifests
                .iter()
                .filter(|child| containerd.holds(&child.digest))
                .count()
        };
        assert!(held() > 0, "its children are kept, too");
        // A new process uses one image on another day, whose lease is new.
        let name = lease.split_whitespace().next().unwrap();
        // containerd may collect what no lease holds before the new one does: it is kept by a label
        // meanwhile.
        let label = |value: &str| {
            let root = unnamed.root.digest.as_str();
            let label = format!("containerd.io/gc.root={value}");
            containerd.ctr("archaware", &["content", "label", root, &label]);
        };
        label("test");
        containerd.ctr("archaware", &["leases", "delete", name]);
        let metrics = Metrics::default();
        let later = containerd.counting(settings(), &metrics);
        assert!(
            resolve(&later, &registry.image("unnamed"), &Keyring::default())
                .await
                .is_ok()
        );
        // The lease exists before it holds the image: two calls.
        let stored = "archaware_containerd_writes_total{result=\"stored\"} 1\n";
        eventually("a lease that holds it", || async {
            metrics.encode().unwrap().contains(stored).then_some(())
        })
        .await;
        label("");
        let multi = testimg::find("multi").root.digest;
        eventually("the deletion of unused content", || async {
            containerd.collect();
            (!containerd.holds(&multi)).then_some(())
        })
        .await;
        assert!(
            containerd.holds(&unnamed.root.digest),
            "{}",
            binary.display()
        );
        assert!(held() > 0, "{}", binary.display());
        // Without any lease, as after 8 days without archaware, nothing is left.
        drop((resolver, later));
        containerd.ctr("archaware", &["leases", "delete", name]);
        eventually("nothing to be left", || async {
            containerd.collect();
            containerd
                .ctr("archaware", &["content", "ls", "-q"])
                .trim()
                .is_empty()
                .then_some(())
        })
        .await;
        assert_eq!(
            containerd.ctr("archaware", &["images", "ls", "-q"]).trim(),
            ""
        );
    }
}

#[tokio::test]
async fn content_that_another_namespace_holds_is_kept_all_the_same() {
    for binary in Containerd::binaries() {
        let containerd = Containerd::start(&binary).await;
        let registry = registry().await;
        // The same bytes, in another namespace.
        let image = testimg::find("amd64");
        for blob in image
            .blobs
            .iter()
            .filter(|blob| blob.media_type.contains("config"))
            .chain([&image.root])
        {
            containerd.ingest("other", blob);
        }
        let resolver = containerd.resolver(settings());
        assert!(
            resolve(&resolver, &registry.image("amd64"), &Keyring::default())
                .await
                .is_ok()
        );
        wait_until_persisted(&containerd, "amd64").await;
        assert!(containerd.holds(&image.root.digest), "{}", binary.display());
    }
}

#[tokio::test]
async fn isolated_requests_persist_nothing_and_read_nothing() {
    let binary = Containerd::binaries().remove(2);
    let containerd = Containerd::start(&binary).await;
    let registry = registry().await;
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let mut isolated = settings();
    isolated.per_credential = true;
    let right = keyring(&registry.address(), "user", "secret");
    // Documents that a shared resolver persisted are not used by an isolated one.
    let sharing = containerd.resolver(settings());
    assert!(
        resolve(&sharing, &registry.image("multi"), &right)
            .await
            .is_ok()
    );
    let root = testimg::find("multi").root.digest;
    eventually("the tree in containerd", || async {
        containerd.holds(&root).then_some(())
    })
    .await;
    // A record as a kubelet's pull creates it, for an image that its registry would deny.
    let image = testimg::find("amd64");
    let name = registry.image("amd64");
    for blob in image
        .blobs
        .iter()
        .filter(|blob| blob.media_type.contains("config"))
        .chain([&image.root])
    {
        containerd.ingest("k8s.io", blob);
    }
    let label = "containerd.io/distribution.source.127.0.0.1=amd64";
    containerd.ctr("k8s.io", &["content", "label", &image.root.digest, label]);
    containerd
        .image_record("k8s.io", &format!("{name}:latest"), &image.root)
        .await;
    let recorded = resolve(&containerd.resolver(settings()), &name, &Keyring::default())
        .await
        .unwrap();
    assert_eq!(
        recorded.source,
        ResolutionSource::Containerd,
        "the record serves every request"
    );
    registry.forget();
    let resolver = containerd.resolver(isolated);
    for name in ["multi", "amd64", "nested"] {
        let resolved = resolve(&resolver, &registry.image(name), &right)
            .await
            .unwrap();
        assert_eq!(resolved.source, ResolutionSource::Registry, "{name}");
    }
    assert!(registry.count("GET", "/v2/multi/manifests/sha256") > 0);
    // A pod without any credential gets nothing of what the node holds: by its tag, and by its
    // digest.
    for reference in [name.clone(), format!("{name}@{}", image.root.digest)] {
        let error = resolve(&resolver, &reference, &Keyring::default())
            .await
            .unwrap_err();
        assert_eq!(error.reason(), Reason::Denied, "{reference}");
    }
    // A later job of the queue is written, and the isolated image is not.
    registry.require(Auth::Basic("other".into(), "secret".into()));
    let shared = registry.image("unnamed");
    let other = keyring(&registry.address(), "other", "secret");
    assert!(resolve(&sharing, &shared, &other).await.is_ok());
    let later = testimg::find("unnamed").root.digest;
    eventually("the later one", || async {
        containerd.holds(&later).then_some(())
    })
    .await;
    assert!(!containerd.holds(&testimg::find("nested").root.digest));
}
