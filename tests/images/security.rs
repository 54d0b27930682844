//! Credentials and answers never cross registries, token endpoints, hosts or tenants.

use archaware::image::{
    Reason, ResolutionSource,
    credentials::{Credential, LazyKeyring},
};
use futures::FutureExt;
use testimg::{Auth, Script};

use super::*;

fn challenge(registry: &FakeRegistry, realm: &str) {
    let header = (
        "www-authenticate".to_owned(),
        format!("Bearer realm=\"{realm}\",service=\"s\""),
    );
    registry.script("/v2/", Script::Status(401, vec![header]));
}

#[tokio::test]
async fn a_credential_is_not_shown_to_a_foreign_token_endpoint() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    let keyring = credentials::keyring(&registry.address(), "user", "secret");
    for realm in [
        "https://auth.evil.example/token",
        "http://auth.evil.example/token",
    ] {
        challenge(&registry, realm);
        let error = resolve_as(
            &resolver,
            &registry.image(&format!("app:{}", realm.len())),
            &keyring,
        )
        .await
        .unwrap_err();
        assert_eq!(error.reason(), Reason::Denied);
        assert!(
            error.chain().contains("registries.tokenEndpoints"),
            "{}",
            error.chain()
        );
    }
}

#[tokio::test]
async fn a_redirect_takes_no_header_and_no_secret_along() {
    let (front, other) = (registry().await, registry().await);
    let image = testimg::find("amd64");
    front.add("app", &image);
    other.add("app", &image);
    // `localhost` is another host than 127.0.0.1.
    let there = other.address().replace("127.0.0.1", "localhost");
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("reg.test");
    std::fs::create_dir(&dir).unwrap();
    let text = format!(
        "server = \"http://{}\"\n[header]\n  x-operator = \"hunter2\"\n",
        front.address()
    );
    std::fs::write(dir.join("hosts.toml"), text).unwrap();
    let mut settings = settings();
    settings.registry.hosts_directories = vec![root.path().to_owned()];
    let resolver = resolver_with(settings);
    front.require(Auth::Basic("user".into(), "secret".into()));
    let config = image
        .blobs
        .iter()
        .find(|blob| blob.media_type.contains("config"))
        .unwrap();
    front.script(
        "/blobs/",
        Script::Redirect(format!("http://{there}/v2/app/blobs/{}", config.digest)),
    );
    let keyring = credentials::keyring("reg.test", "user", "secret");
    let resolved = resolve_as(&resolver, "reg.test/app", &keyring)
        .await
        .unwrap();
    assert_eq!(platforms(&resolved), ["linux/amd64"]);
    assert!(front.seen().iter().all(|seen| {
        seen.headers
            .contains(&("x-operator".into(), "hunter2".into()))
    }));
    assert_eq!(other.seen().len(), 1);
    let at_other = &other.seen()[0];
    assert_eq!(at_other.authorization, None);
    assert!(
        at_other
            .headers
            .iter()
            .all(|(name, _)| name != "x-operator"),
        "{at_other:?}"
    );
    // A token endpoint that redirects the form with the refresh token causes an error.
    let tokens = registry().await;
    tokens.add("app", &image);
    tokens.require(Auth::Bearer(None));
    tokens.script("/token", Script::Redirect(format!("http://{there}/token")));
    let identity = Credential::identity_token("refresh-me".to_owned().into());
    let identity = Keyring::new([(tokens.address(), identity)]);
    let error = resolve_as(&resolver, &tokens.image("app"), &identity)
        .await
        .unwrap_err();
    assert!(error.chain().contains("another host"), "{}", error.chain());
    assert_eq!(other.count("POST", "/"), 0);
}

#[tokio::test]
async fn a_mirror_that_lies_or_fails_does_not_matter() {
    let (mirror, origin) = (registry().await, registry().await);
    origin.add("app", &testimg::find("multi"));
    let (root, host) = (mirrored_by(&mirror, &origin), origin.address());
    let scripts = [
        Script::Status(404, Vec::new()),
        Script::Status(500, Vec::new()),
        Script::Status(403, Vec::new()),
        Script::OtherContent("{}".into()),
        Script::Redirect("/v2/".into()),
        Script::Oversized(8 << 20),
        Script::CutShort,
    ];
    for script in scripts {
        let mut settings = settings();
        settings.registry.hosts_directories = vec![root.path().to_owned()];
        let resolver = resolver_with(settings);
        mirror.forget();
        mirror.unscript();
        mirror.script("/", script.clone());
        let resolved = resolve(&resolver, &format!("{host}/app")).await.unwrap();
        assert_eq!(platforms(&resolved).len(), 3, "{script:?}");
        assert_eq!(mirror.count("HEAD", ""), 0, "it may not resolve tags");
        assert!(
            mirror.count("GET", "?ns=127.0.0.1:") > 0,
            "{:?}",
            mirror.seen()
        );
    }
    // A mirror with the right content suffices, and the registry itself is only asked for the tag.
    mirror.unscript();
    mirror.add("app", &testimg::find("multi"));
    origin.forget();
    let mut settings = settings();
    settings.registry.hosts_directories = vec![root.path().to_owned()];
    assert!(
        resolve(&resolver_with(settings), &format!("{host}/app"))
            .await
            .is_ok()
    );
    assert_eq!((origin.count("HEAD", ""), origin.count("GET", "")), (1, 0));
}

#[tokio::test]
async fn cached_public_images_need_no_secret() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    resolve(&resolver, &registry.image("app")).await.unwrap();
    let never: LazyKeyring = async { panic!("a secret was read") }.boxed().shared();
    let digest = format!(
        "{}@{}",
        registry.image("app"),
        testimg::find("multi").root.digest
    );
    for image in [registry.image("app"), digest] {
        let request = ResolveRequest {
            image: &image,
            policy: PullPolicy::IfNotPresent,
            keyring: &never,
            tenant: "",
        };
        assert_eq!(
            resolver.resolve(request).await.unwrap().source,
            ResolutionSource::Memory
        );
    }
}

#[tokio::test]
async fn per_credential_shares_nothing() {
    let registry = registry().await;
    registry.add("app", &testimg::find("multi"));
    let mut strict = settings();
    strict.per_credential = true;
    let resolver = resolver_with(strict);
    let (image, digest) = (registry.image("app"), testimg::find("multi").root.digest);
    let by_digest = format!("{image}@{digest}");
    // The registry is public, so each answer could be shared; with `perCredential` each credential
    // asks itself.
    let askers = [
        Keyring::default(),
        credentials::keyring(&registry.address(), "a", "secret"),
        credentials::keyring(&registry.address(), "b", "secret"),
    ];
    for (number, keyring) in askers.iter().enumerate() {
        for (image, source) in [
            (&image, ResolutionSource::Registry),
            (&image, ResolutionSource::Memory),
            (&by_digest, ResolutionSource::Memory),
        ] {
            assert_eq!(
                resolve_as(&resolver, image, keyring).await.unwrap().source,
                source
            );
        }
        assert_eq!(
            (registry.count("HEAD", ""), registry.count("GET", "")),
            (number + 1, number + 1)
        );
    }
    // Without it, one lookup serves all.
    registry.forget();
    let resolver = super::resolver();
    for keyring in askers {
        resolve_as(&resolver, &image, &keyring).await.unwrap();
    }
    assert_eq!(
        (registry.count("HEAD", ""), registry.count("GET", "")),
        (1, 1)
    );
}

#[tokio::test]
async fn a_good_credential_shares_documents_and_not_tags() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
    let image = registry.image("app");
    let right = credentials::keyring(&registry.address(), "user", "secret");
    resolve_as(&resolver, &image, &right).await.unwrap();
    let before = registry.seen().len();
    // Content addressed by digest needs no request.
    let by_digest = format!("{image}@{}", testimg::find("multi").root.digest);
    let shared = resolve(&resolver, &by_digest).await.unwrap();
    assert_eq!(
        (shared.source, registry.seen().len()),
        (ResolutionSource::Memory, before)
    );
    // The tag is cached for the credential only, and so are its tokens.
    let stranger = credentials::keyring(&registry.address(), "user", "guess");
    for keyring in [Keyring::default(), stranger] {
        let asked = registry.count("GET", "/token");
        let error = resolve_as(&resolver, &image, &keyring).await.unwrap_err();
        assert_eq!(error.reason(), Reason::Denied);
        assert_eq!(
            registry.count("GET", "/token"),
            asked + 1,
            "its own token request"
        );
    }
}

/// Errors get into events, which more people read than the image.
#[tokio::test]
async fn no_text_of_a_body_gets_into_an_error() {
    let registry = registry().await;
    let digest = format!("sha256:{}", "0".repeat(64));
    let long = "hunter2".repeat(40);
    for body in [
        "hunter2".to_owned(),
        r#"{"schemaVersion": "hunter2"}"#.to_owned(),
        r#"{"manifests": "hunter2"}"#.to_owned(),
        r#"{"config": {"digest": "hunter2"}}"#.to_owned(),
        format!(
            r#"{{"config": {{"digest": "hunter2:{}"}}}}"#,
            "0".repeat(64)
        ),
        format!(r#"{{"config": {{"digest": "{digest}", "size": "hunter2"}}}}"#),
        r#"{"manifests": [{"digest": "hunter2"}], "mediaType": "hunter2"}"#.to_owned(),
        format!(r#"{{"manifests": [{{"digest": "{long}"}}]}}"#),
    ] {
        registry.unscript();
        registry.script("/v2/", Script::OtherContent(body.clone().into()));
        let error = resolve(&resolver(), &registry.image("app"))
            .await
            .unwrap_err();
        let text = format!("{} {error:?}", error.chain());
        assert!(!text.contains("hunter2"), "{body}: {text}");
        assert_ne!(error.reason(), Reason::Unavailable, "{body}: {text}");
    }
}
