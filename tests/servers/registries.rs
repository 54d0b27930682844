//! docker-registry, open and protected, with and without TLS, directly and behind `hosts.toml`.

use std::{fs, path::Path, process::Command};

use archaware::image::{
    Reason, ResolutionSource, ResolverSettings,
    credentials::{Credential, Keyring},
};
use serde_json::Value;

use testsupport::servers::{Pki, Registry, Tokens};

use crate::resolving::{keyring, platforms, resolve, resolver, settings};

const MULTI: [&str; 3] = ["linux/amd64", "linux/arm64", "linux/s390x"];

/// A directory with the `hosts.toml` of one registry.
fn tree(root: &Path, registry: &str, text: &str) -> ResolverSettings {
    let (host, port) = registry.rsplit_once(':').unwrap_or((registry, ""));
    let name = if port.is_empty() {
        host.to_owned()
    } else {
        format!("{host}_{port}_")
    };
    let dir = root.join(name);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("hosts.toml"), text).unwrap();
    settings_of(root)
}

/// Settings with the directories below this root.
fn settings_of(root: &Path) -> ResolverSettings {
    let mut settings = settings();
    settings.registry.hosts_directories = vec![root.to_owned()];
    settings
}

#[tokio::test]
async fn without_authentication() {
    let registry = Registry::open(&["multi", "amd64"]).await;
    let resolver = resolver(settings());
    for (image, expected, requests) in [
        ("multi", &MULTI[..], (1, 1)),
        ("amd64", &["linux/amd64"], (1, 2)),
    ] {
        let before = (registry.count("HEAD"), registry.count("GET"));
        let resolved = resolve(&resolver, &registry.image(image), &Keyring::default())
            .await
            .unwrap();
        assert_eq!(platforms(&resolved), expected);
        assert_eq!(
            (
                registry.count("HEAD") - before.0,
                registry.count("GET") - before.1
            ),
            requests,
            "{image}"
        );
    }
}

#[tokio::test]
async fn with_user_and_password() {
    let registry = Registry::with_password(&["multi"]).await;
    let resolver = resolver(settings());
    let image = registry.image("multi");
    for wrong in [
        Keyring::default(),
        keyring(registry.address(), "user", "guess"),
    ] {
        let error = resolve(&resolver, &image, &wrong).await.unwrap_err();
        assert_eq!(error.reason(), Reason::Denied, "{}", error.chain());
    }
    let right = keyring(registry.address(), "user", "secret");
    let resolved = resolve(&resolver, &image, &right).await.unwrap();
    assert_eq!(platforms(&resolved), MULTI);
    // Answers for the valid credential are not used for others.
    let error = resolve(&resolver, &image, &Keyring::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Denied);
}

#[tokio::test]
async fn with_tokens_of_which_each_credential_gets_its_own() {
    let tokens = Tokens::start(&[
        ("all", "secret", "*"),
        ("one", "secret", "amd64"),
        ("none", "secret", "-"),
    ])
    .await;
    let registry = Registry::with_tokens(&["multi", "amd64"], &tokens).await;
    let resolver = resolver(settings());
    let (multi, amd64) = (registry.image("multi"), registry.image("amd64"));
    let user = |name| keyring(registry.address(), name, "secret");
    let many = (0..32).map(|_| async {
        resolve(&resolver, &multi, &user("all"))
            .await
            .map(|r| platforms(&r))
    });
    for answer in futures::future::join_all(many).await {
        assert_eq!(answer.unwrap(), MULTI);
    }
    assert_eq!(tokens.seen().len(), 1, "one token for all who need it");
    // Each user has a token for its own repository, which does not allow the other one.
    assert!(resolve(&resolver, &amd64, &user("one")).await.is_ok());
    for (image, name) in [(&multi, "one"), (&multi, "none"), (&amd64, "none")] {
        let error = resolve(&resolver, image, &user(name)).await.unwrap_err();
        assert_eq!(error.reason(), Reason::Denied, "{name}: {}", error.chain());
    }
    let error = resolve(&resolver, &amd64, &Keyring::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Denied);
    assert!(resolve(&resolver, &amd64, &user("all")).await.is_ok());
    // An identity token is exchanged by POST.
    let identity = Credential::identity_token("all:secret".to_owned().into());
    let identity = Keyring::new([(registry.address().to_owned(), identity)]);
    let before = tokens.seen().len();
    assert!(resolve(&resolver, &multi, &identity).await.is_ok());
    assert_eq!(tokens.seen().len(), before + 1);
}

#[tokio::test]
async fn with_a_private_authority() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::new(dir.path());
    pki.leaf("server");
    let registry = Registry::with_tls(&["multi"], &pki, false).await;
    let (roots, server) = (
        tempfile::tempdir().unwrap(),
        format!("server = \"{}\"\n", registry.url()),
    );
    let authority = format!("{server}ca = \"{}\"\n", pki.path("ca.crt"));
    let unverified = format!("{server}skip_verify = true\n");
    let (of_tree, unsafely, strange) = (
        tree(&roots.path().join("a"), "reg.test", &authority),
        tree(&roots.path().join("b"), "reg.test", &unverified),
        tree(&roots.path().join("c"), "reg.test", &server),
    );
    let mut of_bundle = strange.clone();
    of_bundle.registry.ca_bundle = Some(pki.path("ca.crt").into());
    for (settings, works) in [
        (of_tree, true),
        (unsafely, true),
        (of_bundle, true),
        (strange, false),
    ] {
        let result = resolve(&resolver(settings), "reg.test/multi", &Keyring::default()).await;
        match result {
            Ok(resolved) => assert!(works && platforms(&resolved) == MULTI),
            Err(error) => {
                assert!(!works, "{}", error.chain());
                assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
            }
        }
    }
}

#[tokio::test]
async fn certificates_on_an_http_address_mean_https_first() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::new(dir.path());
    pki.leaf("server");
    let (secure, plain) = (
        Registry::with_tls(&["multi"], &pki, false).await,
        Registry::open(&["multi"]).await,
    );
    let roots = tempfile::tempdir().unwrap();
    for (name, registry) in [("secure", &secure), ("plain", &plain)] {
        let address = registry.address();
        let text = format!(
            "server = \"http://127.0.0.1:1\"\n[host.\"http://{address}\"]\nca = \"{}\"\n",
            pki.path("ca.crt")
        );
        let settings = tree(&roots.path().join(name), "reg.test", &text);
        let resolved = resolve(&resolver(settings), "reg.test/multi", &Keyring::default()).await;
        assert_eq!(platforms(&resolved.unwrap()), MULTI, "{name}");
        // Docker's layout, for a registry on loopback that would otherwise be accessed by plain
        // HTTP.
        let port = address.rsplit(':').next().unwrap();
        let folder = roots.path().join(name).join(format!("127.0.0.1_{port}_"));
        fs::create_dir(&folder).unwrap();
        fs::copy(pki.path("ca.crt"), folder.join("ca.crt")).unwrap();
        let settings = settings_of(&roots.path().join(name));
        let image = registry.image("multi");
        let resolved = resolve(&resolver(settings), &image, &Keyring::default()).await;
        assert_eq!(platforms(&resolved.unwrap()), MULTI, "{name}");
    }
}

#[tokio::test]
async fn with_certificates_of_clients() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::new(dir.path());
    pki.leaf("server");
    pki.leaf("client");
    let registry = Registry::with_tls(&["multi"], &pki, true).await;
    let roots = tempfile::tempdir().unwrap();
    let text = format!(
        "server = \"{}\"\nca = \"{}\"\n",
        registry.url(),
        pki.path("ca.crt")
    );
    let client = format!(
        "{text}client = [[\"{}\", \"{}\"]]\n",
        pki.path("client.crt"),
        pki.path("client.key")
    );
    let with = resolver(tree(&roots.path().join("a"), "reg.test", &client));
    let without = resolver(tree(&roots.path().join("b"), "reg.test", &text));
    assert!(
        resolve(&with, "reg.test/multi", &Keyring::default())
            .await
            .is_ok()
    );
    assert!(
        resolve(&without, "reg.test/multi", &Keyring::default())
            .await
            .is_err()
    );
    // Docker's layout without hosts.toml.
    let folder = roots.path().join("c").join(format!(
        "127.0.0.1_{}_",
        registry.address().rsplit(':').next().unwrap()
    ));
    fs::create_dir_all(&folder).unwrap();
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        ("client.crt", "one.cert"),
        ("client.key", "one.key"),
    ] {
        fs::copy(pki.path(from), folder.join(to)).unwrap();
    }
    let mut docker = settings();
    docker.registry.hosts_directories = vec![roots.path().join("c")];
    let hosts = format!(
        "server = \"{}\"\nca = \"ca.crt\"\nclient = [[\"one.cert\", \"one.key\"]]\n",
        registry.url()
    );
    fs::write(folder.join("hosts.toml"), hosts).unwrap();
    assert!(
        resolve(
            &resolver(docker),
            &registry.image("multi"),
            &Keyring::default()
        )
        .await
        .is_ok()
    );
}

#[tokio::test]
async fn mirrors_first_and_the_registry_last() {
    let mirror = Registry::open(&["multi"]).await;
    let origin = Registry::with_password(&["multi", "amd64"]).await;
    let roots = tempfile::tempdir().unwrap();
    let text = format!(
        "[host.\"{}\"]\n  capabilities = [\"pull\", \"resolve\"]\n",
        mirror.url()
    );
    let resolver = resolver(tree(roots.path(), origin.address(), &text));
    let anonymous = Keyring::default();
    let resolved = resolve(&resolver, &origin.image("multi"), &anonymous)
        .await
        .unwrap();
    assert_eq!(
        (platforms(&resolved), resolved.source),
        (
            MULTI.map(str::to_owned).to_vec(),
            ResolutionSource::Registry
        )
    );
    assert_eq!(origin.count("HEAD") + origin.count("GET"), 0);
    // What the mirror lacks is fetched from the registry, with permission.
    let error = resolve(&resolver, &origin.image("amd64"), &anonymous)
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Denied);
    let right = keyring(origin.address(), "user", "secret");
    assert!(
        resolve(&resolver, &origin.image("amd64"), &right)
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn mirrors_are_shown_credentials_only_if_the_operator_says_so() {
    let mirror = Registry::with_password(&["multi"]).await;
    let roots = tempfile::tempdir().unwrap();
    let text = format!(
        "server = \"http://127.0.0.1:1\"\n[host.\"{}\"]\n",
        mirror.url()
    );
    let right = keyring("reg.test", "user", "secret");
    let closed = tree(roots.path(), "reg.test", &text);
    let mut open = closed.clone();
    open.registry.mirror_credentials = true;
    let error = resolve(&resolver(closed), "reg.test/multi", &right)
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
    assert!(
        resolve(&resolver(open), "reg.test/multi", &right)
            .await
            .is_ok()
    );
    // Headers in hosts.toml are set by the operator.
    let header = format!(
        "{text}[host.\"{}\".header]\n  authorization = \"Basic dXNlcjpzZWNyZXQ=\"\n",
        mirror.url()
    );
    let headed = tree(&roots.path().join("headed"), "reg.test", &header);
    assert!(
        resolve(&resolver(headed), "reg.test/multi", &Keyring::default())
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_rewritten_name_stands_for_the_original() {
    let registry = Registry::with_password(&["multi"]).await;
    let mut settings = settings();
    let rule = |prefix: &str, replacement: &str| archaware::image::Rewrite {
        prefix: prefix.to_owned(),
        replacement: replacement.to_owned(),
    };
    settings.rewrites = vec![
        rule("docker.io/library", "hub.test"),
        rule("hub.test", registry.address()),
    ];
    let resolver = resolver(settings);
    assert_eq!(
        resolver.reference("multi").unwrap().to_string(),
        format!("{}:latest", registry.image("multi"))
    );
    // Credentials are matched against the rewritten name.
    assert!(
        resolve(&resolver, "multi", &keyring("docker.io", "user", "secret"))
            .await
            .is_err()
    );
    let right = keyring(registry.address(), "user", "secret");
    assert_eq!(
        platforms(&resolve(&resolver, "multi", &right).await.unwrap()),
        MULTI
    );
}

#[tokio::test]
async fn on_an_ipv6_address() {
    let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else {
        panic!("this machine has no IPv6 loopback");
    };
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let registry = Registry::open(&["multi"]).await;
    let to = registry.address().to_owned();
    // Forwards a port, because docker-registry listens on one address only.
    let listener = tokio::net::TcpListener::bind(format!("[::1]:{port}"))
        .await
        .unwrap();
    let forward = tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            let mut to = tokio::net::TcpStream::connect(&to).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await });
        }
    });
    let resolver = resolver(settings());
    let resolved = resolve(
        &resolver,
        &format!("[::1]:{port}/multi"),
        &Keyring::default(),
    )
    .await
    .unwrap();
    assert_eq!(platforms(&resolved), MULTI);
    forward.abort();
}

/// The environment belongs to a process, so this test runs the program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_a_proxy_from_the_environment() {
    let registry = Registry::open(&["multi"]).await;
    let proxy = testimg::FakeRegistry::start().await.unwrap();
    proxy.add("multi", &testimg::find("arm64"));
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let text = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nregistries: {plainHttp: [reg.test]}\n";
    fs::write(&config, text).unwrap();
    let inspect = |image: &str, no_proxy: &str| -> Value {
        let output = Command::new(testsupport::program())
            .args([
                "inspect",
                "-o",
                "json",
                "--config",
                config.to_str().unwrap(),
                image,
            ])
            .env("HTTP_PROXY", format!("http://{}", proxy.address()))
            .env("http_proxy", format!("http://{}", proxy.address()))
            .env("NO_PROXY", no_proxy)
            .output()
            .unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()[0].clone()
    };
    // Only the proxy can resolve this name.
    let line = tokio::task::block_in_place(|| inspect("reg.test/multi", ""));
    assert_eq!(
        line["platforms"],
        serde_json::json!(["linux/arm64"]),
        "{line}"
    );
    assert!(proxy.seen()[0].path.contains("reg.test") || proxy.count("HEAD", "/v2/multi") == 1);
    // Loopback bypasses the proxy, and NO_PROXY is obeyed.
    let line = tokio::task::block_in_place(|| inspect(&registry.image("multi"), ""));
    assert_eq!(line["platforms"], serde_json::json!(MULTI), "{line}");
    let line = tokio::task::block_in_place(|| inspect("reg.test/multi", "reg.test"));
    assert_eq!(line["error"]["reason"], "Unavailable", "{line}");
}
