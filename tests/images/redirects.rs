//! A redirect's target is a host of its own: its challenge, its token, its limits. Nothing of the
//! registry goes along.

use archaware::image::Reason;
use testimg::{Auth, Script};

use super::*;

/// The address of a registry under another name, which makes it another host.
fn elsewhere(registry: &FakeRegistry) -> String {
    registry.address().replace("127.0.0.1", "localhost")
}

/// Redirects everything that `front` is asked about `app` to the same path at `other`.
fn redirect(front: &FakeRegistry, other: &FakeRegistry) {
    let root = testimg::find("multi").root.digest;
    for version in ["latest", &root] {
        let path = format!("/v2/app/manifests/{version}");
        let to = format!("http://{}{path}", elsewhere(other));
        front.script(&path, Script::Redirect(to));
    }
}

async fn pair() -> (FakeRegistry, FakeRegistry) {
    let (front, other) = (registry().await, registry().await);
    for registry in [&front, &other] {
        registry.add("app", &testimg::find("multi"));
    }
    redirect(&front, &other);
    (front, other)
}

#[tokio::test]
async fn the_challenge_of_another_host_is_answered_anonymously() {
    let (front, other) = pair().await;
    other.require(Auth::Bearer(None));
    let keyring = credentials::keyring(&front.address(), "user", "hunter2");
    let resolver = resolver();
    let resolved = resolve_as(&resolver, &front.image("app"), &keyring)
        .await
        .unwrap();
    assert_eq!(platforms(&resolved).len(), 3);
    let tokens: Vec<_> = other
        .seen()
        .into_iter()
        .filter(|seen| seen.path.starts_with("/token"))
        .collect();
    assert_eq!(tokens.len(), 1, "one token serves both requests");
    assert_eq!(tokens[0].authorization, None);
    assert!(
        tokens[0].path.contains("scope=repository%3Aapp%3Apull"),
        "{}",
        tokens[0].path
    );
    // The registry asked for nothing, so it was shown nothing.
    assert!(front.seen().iter().all(|seen| seen.authorization.is_none()));
}

#[tokio::test]
async fn the_registry_may_ask_for_a_password_first() {
    let (front, other) = pair().await;
    let challenge = (
        "www-authenticate".to_owned(),
        "Basic realm=\"x\"".to_owned(),
    );
    let image = testimg::find("multi");
    front.unscript();
    let to = |version: &str| format!("http://{}/v2/app/manifests/{version}", elsewhere(&other));
    front.script(
        "/manifests/",
        Script::Authorized(
            challenge,
            vec![
                ("latest".to_owned(), to("latest")),
                (image.root.digest.clone(), to(&image.root.digest)),
            ],
        ),
    );
    other.require(Auth::Bearer(None));
    let keyring = credentials::keyring(&front.address(), "user", "hunter2");
    let resolved = resolve_as(&resolver(), &front.image("app"), &keyring)
        .await
        .unwrap();
    assert_eq!(platforms(&resolved).len(), 3);
    for seen in other.seen() {
        let authorization = seen.authorization.unwrap_or_default();
        assert!(authorization.is_empty() || authorization.starts_with("Bearer token-"));
    }
}

/// The other host names the token server of the registry, where the pull secret would be accepted.
#[tokio::test]
async fn another_host_gets_no_token_of_the_registry() {
    let (front, other) = pair().await;
    let realm = format!("http://{}/token", front.address());
    let challenge =
        format!("Bearer realm=\"{realm}\",service=\"fake\",scope=\"repository:app:pull\"");
    other.script(
        "/v2/",
        Script::Status(401, vec![("www-authenticate".to_owned(), challenge)]),
    );
    let keyring = credentials::keyring(&front.address(), "user", "hunter2");
    let error = resolve_as(&resolver(), &front.image("app"), &keyring)
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Denied);
    for seen in front.seen() {
        assert_eq!(seen.authorization, None, "{seen:?}");
    }
    for seen in other.seen() {
        let shown = seen.authorization.unwrap_or_default();
        assert!(!shown.starts_with("Basic"), "{shown}");
    }
}

/// Alternating storage hosts: the second request to a host that limits its rate is not sent.
#[tokio::test]
async fn the_limits_of_another_host_are_its_own() {
    let (front, other) = pair().await;
    let limited = vec![("retry-after".to_owned(), "600".to_owned())];
    other.script("/v2/", Script::Status(429, limited));
    let resolver = resolver();
    let error = resolve(&resolver, &front.image("app")).await.unwrap_err();
    assert_eq!(error.reason(), Reason::RateLimited);
    assert!(
        error.chain().contains(&elsewhere(&other)),
        "{}",
        error.chain()
    );
    let digest = format!(
        "{}@{}",
        front.image("app"),
        testimg::find("multi").root.digest
    );
    let again = resolve(&resolver, &digest).await.unwrap_err();
    assert_eq!(again.reason(), Reason::RateLimited);
    assert_eq!(other.seen().len(), 1, "{:?}", other.seen());
    // The registry itself is not limited.
    front.unscript();
    assert!(resolve(&resolver, &digest).await.is_ok());
}

#[tokio::test]
async fn a_redirect_into_this_machine_is_not_followed() {
    let front = registry().await;
    for (number, target) in [
        "http://169.254.169.254/latest/meta-data",
        "http://[fd00:ec2::254]/",
    ]
    .iter()
    .enumerate()
    {
        front.script("/v2/", Script::Redirect((*target).to_owned()));
        let error = resolve(&resolver(), &front.image(&format!("app:{number}")))
            .await
            .unwrap_err();
        assert_eq!(
            error.reason(),
            Reason::Denied,
            "{target}: {}",
            error.chain()
        );
        assert!(
            error.chain().contains("registries.allowLocalAddresses"),
            "{}",
            error.chain()
        );
    }
}

/// A registry that takes nearly all of the time and then redirects cannot make another host look
/// dead.
#[tokio::test]
async fn a_host_that_got_no_time_is_not_to_blame() {
    let (front, other) = (registry().await, registry().await);
    other.script("/slow/", Script::Slow(TIMEOUT));
    other.add("app", &testimg::find("multi"));
    let to = format!("http://{}/v2/slow/manifests/x", elsewhere(&other));
    front.script("/v2/", Script::SlowRedirect(TIMEOUT.mul_f32(0.9), to));
    let resolver = resolver();
    for number in 0..4 {
        let error = resolve(&resolver, &front.image(&format!("app:{number}"))).await;
        assert_eq!(error.unwrap_err().reason(), Reason::Unavailable);
    }
    assert!(other.seen().len() >= 4);
    let healthy = format!("{}/app", elsewhere(&other));
    assert!(
        resolve(&resolver, &healthy).await.is_ok(),
        "it is not paused"
    );
}

/// What the operator wrote into a hosts.toml may be anywhere; nothing listens there.
#[tokio::test]
async fn a_link_local_mirror_of_the_operator_is_asked() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("reg.test");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("hosts.toml"), "server = \"http://0.0.0.0:1\"\n").unwrap();
    let mut settings = settings();
    settings.registry.hosts_directories = vec![root.path().to_owned()];
    let error = resolve(&resolver_with(settings), "reg.test/app")
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
}
