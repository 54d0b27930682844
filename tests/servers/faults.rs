//! A containerd that is killed, hung, forbidden, full or wiped: the answers are the same.

use std::time::Duration;

use archaware::image::{ResolutionSource, credentials::Keyring};

use testsupport::servers::{Containerd, eventually};

use crate::resolving::{WithContainerd, platforms, resolve, resolver_at, settings};

use super::store::{MULTI, registry, wait_until_persisted};

#[tokio::test]
async fn a_wiped_containerd_is_filled_again() {
    let binary = Containerd::binaries().remove(2);
    let mut containerd = Containerd::start(&binary).await;
    let registry = registry().await;
    let resolver = containerd.resolver(settings());
    assert!(
        resolve(&resolver, &registry.image("multi"), &Keyring::default())
            .await
            .is_ok()
    );
    wait_until_persisted(&containerd, "multi").await;
    containerd.wipe();
    containerd.restart().await;
    let digest = testimg::find("unnamed").root.digest;
    eventually("another image kept", || async {
        // The breaker may be open for a while after the restart.
        let image = format!("{}@{digest}", registry.image("unnamed"));
        resolve(&resolver, &image, &Keyring::default())
            .await
            .unwrap();
        if containerd.holds(&digest) {
            return Some(());
        }
        let fresh = containerd.resolver(settings());
        resolve(&fresh, &image, &Keyring::default()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        containerd.holds(&digest).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_containerd_change_no_answer() {
    let binary = Containerd::binaries().remove(1);
    let mut containerd = Containerd::start(&binary).await;
    let registry = registry().await;
    let fresh = |image: &str| {
        format!(
            "{}@{}",
            registry.image(image),
            testimg::find(image).root.digest
        )
    };
    // Hung: each resolution waits briefly, until the breaker opens.
    containerd.signal("-STOP");
    let resolver = resolver_at(&containerd.socket(), settings());
    for (name, image) in [
        ("multi", registry.image("multi")),
        ("unnamed", fresh("unnamed")),
        ("amd64", registry.image("amd64")),
        ("nested", fresh("nested")),
    ] {
        let resolved = resolve(&resolver, &image, &Keyring::default())
            .await
            .unwrap();
        assert_eq!(resolved.source, ResolutionSource::Registry, "{name}");
    }
    containerd.signal("-CONT");
    assert_eq!(resolver.containerd_is_up(), Some(false));
    // Killed.
    containerd.kill();
    let resolver = containerd.resolver(settings());
    assert!(
        resolve(&resolver, &registry.image("multi"), &Keyring::default())
            .await
            .is_ok()
    );
    containerd.restart().await;
    // No socket at all.
    let resolver = resolver_at("/nonexistent/containerd.sock", settings());
    let resolved = resolve(&resolver, &registry.image("multi"), &Keyring::default())
        .await
        .unwrap();
    assert_eq!(platforms(&resolved), MULTI);
    // Forbidden: the socket belongs to another user.
    let program = containerd.dir().join("archaware");
    testsupport::copy_program(&testsupport::program(), &program);
    let config = containerd.dir().join("config.yaml");
    let text = format!(
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\ncontainerd: {{socket: {}}}\n",
        containerd.socket()
    );
    std::fs::write(&config, text).unwrap();
    std::fs::set_permissions(
        containerd.socket(),
        std::os::unix::fs::PermissionsExt::from_mode(0o0),
    )
    .unwrap();
    let (program, config) = (program.to_str().unwrap(), config.to_str().unwrap());
    let inspect = [
        program,
        "inspect",
        "-o",
        "json",
        "--config",
        config,
        &registry.image("multi"),
    ];
    let out = tokio::task::block_in_place(|| containerd.as_stranger(&inspect));
    assert!(out.contains("\"source\": \"registry\""), "{out}");
}

#[tokio::test]
async fn a_full_disk_only_stops_persisting() {
    let binary = Containerd::binaries().remove(1);
    let mut containerd = Containerd::start(&binary).await;
    let registry = registry().await;
    let resolver = containerd.resolver(settings());
    assert!(
        resolve(&resolver, &registry.image("multi"), &Keyring::default())
            .await
            .is_ok()
    );
    wait_until_persisted(&containerd, "multi").await;
    containerd.limit_files("1");
    for n in 0..20 {
        let name = format!("full-{n}");
        registry.add(
            &name,
            &testimg::find(if n % 2 == 0 { "unnamed" } else { "amd64-arm64" }),
        );
        assert!(
            resolve(&resolver, &registry.image(&name), &Keyring::default())
                .await
                .is_ok()
        );
    }
    // containerd itself may exit, because its database writes too. After a restart with free space,
    // the persisted content is there.
    containerd.restart().await;
    let digest = format!(
        "{}@{}",
        registry.image("multi"),
        testimg::find("multi").root.digest
    );
    let fresh = containerd.resolver(settings());
    assert_eq!(
        resolve(&fresh, &digest, &Keyring::default())
            .await
            .unwrap()
            .source,
        ResolutionSource::Containerd
    );
}
