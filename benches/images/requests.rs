//! Number of registry requests per image, by kind.

use futures::future::join_all;
use testimg::{Auth, FakeRegistry};

use archaware::image::credentials::Keyring;

use testsupport::servers::{Containerd, eventually};

use crate::resolving::{WithContainerd, keyring, resolve, resolver, settings};

use super::report;

/// `HEAD + GET + tokens` so far. Requests answered with a challenge are not counted.
fn counts(registry: &FakeRegistry) -> String {
    let seen = registry.seen();
    let answered = |method: &str| {
        let answered = |s: &&testimg::Seen| s.method == method && s.path.starts_with("/v2/");
        let shown = seen.iter().any(|s| s.authorization.is_some());
        seen.iter()
            .filter(answered)
            .filter(|s| !shown || s.authorization.is_some())
            .count()
    };
    let tokens = seen.iter().filter(|s| s.path.starts_with("/token")).count();
    format!("{} + {} + {tokens}", answered("HEAD"), answered("GET"))
}

pub(crate) async fn cold() {
    let registry = FakeRegistry::start().await.unwrap();
    for (what, image, private, at_once, target) in [
        ("index, public", "multi", false, 1, "1 + 1 + 0"),
        ("single manifest, public", "amd64", false, 1, "1 + 2 + 0"),
        ("index, private", "multi", true, 1, "1 + 1 + 1"),
        ("single manifest, private", "amd64", true, 1, "1 + 2 + 1"),
        ("index, private, 64 at once", "multi", true, 64, "1 + 1 + 1"),
    ] {
        let name = what.replace([' ', ','], "-");
        registry.add(&name, &testimg::find(image));
        if private {
            registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
        }
        registry.forget();
        let resolver = resolver(settings());
        let keyring = if private {
            keyring(&registry.address(), "user", "secret")
        } else {
            Keyring::default()
        };
        let image = registry.image(&name);
        let asked = join_all((0..at_once).map(|_| resolve(&resolver, &image, &keyring))).await;
        assert!(asked.iter().all(Result::is_ok));
        report(
            &format!("HEAD + GET + tokens, {what}"),
            &counts(&registry),
            "-",
            target,
        );
    }
}

pub(crate) async fn restart() {
    for private in [false, true] {
        let registry = FakeRegistry::start().await.unwrap();
        let containerd = Containerd::start(&Containerd::binaries()[0]).await;
        if private {
            registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
        }
        let keyring = if private {
            keyring(&registry.address(), "user", "secret")
        } else {
            Keyring::default()
        };
        let images: Vec<_> = (0..50)
            .map(|n| (format!("app{n}"), testimg::numbered(n)))
            .collect();
        let first = containerd.resolver(settings());
        for (name, image) in &images {
            registry.add(name, image);
            resolve(&first, &registry.image(name), &keyring)
                .await
                .unwrap();
        }
        eventually("all trees in containerd", || async {
            let held = containerd.ctr("archaware", &["content", "ls"]);
            let wanted = if private {
                "sha256:"
            } else {
                "archaware.dev/tagged=true"
            };
            (held.matches(wanted).count() >= images.len()).then_some(())
        })
        .await;
        drop(first);
        registry.forget();
        let second = containerd.resolver(settings());
        for (name, _) in &images {
            resolve(&second, &registry.image(name), &keyring)
                .await
                .unwrap();
        }
        let (what, target) = if private {
            ("private", "50 + 0 + 50")
        } else {
            ("public", "0 + 0 + 0")
        };
        report(
            &format!("HEAD + GET + tokens after a restart, 50 {what} images"),
            &counts(&registry),
            "-",
            target,
        );
    }
}
