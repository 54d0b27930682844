use std::{fs, path::Path};

use rustls::pki_types::{CertificateDer, pem::PemObject};

use super::{read::read, *};

fn hosts(roots: &[&Path], image: &str, plain: &[&str]) -> Hosts {
    let _ = image;
    Hosts::new(&RegistryClient {
        plain_http: plain.iter().map(|name| (*name).to_owned()).collect(),
        hosts_directories: roots.iter().map(|root| root.to_path_buf()).collect(),
        ..RegistryClient::default()
    })
}

/// The certificates of a host as DER.
fn authorities(host: &Host) -> Vec<Vec<u8>> {
    let bundles = host.transport.authorities.iter();
    bundles
        .flat_map(|bundle| bundle.iter().map(<[u8]>::to_vec))
        .collect()
}

/// What is wrong with the files of `reg.io`.
fn problem(root: &Path, host: &Host) -> String {
    let read = read(
        &[root.to_owned()],
        None,
        &Bundles::new(),
        "reg.io",
        host.clone(),
    );
    read.problem.unwrap()
}

async fn hosts_of(roots: &[&Path], image: &str) -> Vec<Host> {
    let reference = Reference::parse(image).unwrap();
    hosts(roots, image, &[])
        .for_reference(&reference)
        .await
        .unwrap()
        .to_vec()
}

/// The URLs of a manifest with their capabilities: `pr` pulls and resolves, `o` is the origin.
async fn urls(roots: &[&Path], image: &str) -> Vec<String> {
    let flag = |on: bool, flag: &'static str| if on { flag } else { "" };
    let describe = |host: &Host| {
        let url = host.endpoint.url("app", "manifests/v1");
        let flags = [
            flag(host.pulls, "p"),
            flag(host.resolves, "r"),
            flag(host.role == Role::Origin, "o"),
        ];
        format!("{} {url}", flags.concat())
    };
    hosts_of(roots, image).await.iter().map(describe).collect()
}

#[tokio::test]
async fn plain_http_only_where_it_is_meant() {
    for (image, expected) in [
        ("localhost:5000/x", "http://localhost:5000/v2"),
        ("127.0.0.1/x", "https://127.0.0.1/v2"),
        ("localhost/x", "https://localhost/v2"),
        ("127.3.2.1:8080/x", "http://127.3.2.1:8080/v2"),
        ("[::1]:5000/x", "http://[::1]:5000/v2"),
        ("localhost:443/x", "https://localhost/v2"),
        ("Reg.Local:5000/x", "http://reg.local:5000/v2"),
        ("reg.local/x", "https://reg.local/v2"),
        ("nginx", "https://registry-1.docker.io/v2"),
    ] {
        let reference = Reference::parse(image).unwrap();
        let hosts = hosts(&[], image, &["reg.local:5000"])
            .for_reference(&reference)
            .await
            .unwrap();
        assert_eq!(hosts[0].endpoint.base, expected, "{image}");
        assert!(hosts[0].role == Role::Origin && hosts.len() == 1);
        // As in containerd, nobody verifies a certificate on loopback.
        let unverified =
            expected.starts_with("https://localhost") || expected.starts_with("https://127.");
        assert_eq!(hosts[0].transport.skip_verify, unverified, "{image}");
    }
}

#[tokio::test]
async fn mirrors_come_in_their_order_and_the_registry_last() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("docker.io");
    fs::create_dir(&dir).unwrap();
    let file = r#"
        [host."https://z.example/mirror"]
          capabilities = ["pull"]
        [host."a.example:5000"]
          capabilities = ["pull", "resolve", "push"]
        [host."https://b.example/as/it/is"]
          override_path = true
        [host."http://c.example:81//x/./v2/"]
    "#;
    fs::write(dir.join("hosts.toml"), file).unwrap();
    assert_eq!(
        urls(&[root.path()], "nginx").await,
        [
            "p https://z.example/mirror/v2/app/manifests/v1?ns=docker.io",
            "pr https://a.example:5000/v2/app/manifests/v1?ns=docker.io",
            "pr https://b.example/as/it/is/app/manifests/v1?ns=docker.io",
            "pr http://c.example:81/x/v2/app/manifests/v1?ns=docker.io",
            "pro https://registry-1.docker.io/v2/app/manifests/v1",
        ]
    );
}

/// As k3s writes the file from the `rewrite` of its `registries.yaml`.
#[tokio::test]
async fn repositories_have_other_names_on_a_host_that_rewrites_them() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("docker.io");
    fs::create_dir(&dir).unwrap();
    let file = r#"
        server = "https://registry-1.docker.io/v2"
        capabilities = ["pull", "resolve", "push"]
        [host]
        [host."https://mirror.example/v2"]
          capabilities = ["pull", "resolve"]
          [host."https://mirror.example/v2".rewrite]
            "^rancher/(.*)" = "hub/${1}-copy"
            "^library/" = ""
            "(app)" = "x/$1"
    "#;
    fs::write(dir.join("hosts.toml"), file).unwrap();
    let hosts = hosts_of(&[root.path()], "nginx").await;
    for (repository, on_mirror) in [
        ("rancher/app", "hub/app-copy"),
        ("library/nginx", "nginx"),
        ("other/app", "other/x/app"),
        ("other/nginx", "other/nginx"),
    ] {
        let names = hosts.iter().map(|host| host.rewrites.apply(repository));
        assert_eq!(names.collect::<Vec<_>>(), [on_mirror, repository]);
    }
}

#[tokio::test]
async fn unknown_keys_are_reported() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("reg.io");
    fs::create_dir(&dir).unwrap();
    let file = "server = 'https://reg.io'\nrewrites = 1\n[host.'a.example']\nmirror = 'secret'\n";
    fs::write(dir.join("hosts.toml"), file).unwrap();
    let hosts = hosts_of(&[root.path()], "reg.io/app").await;
    assert_eq!(hosts.len(), 2, "the other keys count");
    let problem = problem(root.path(), &hosts[1]);
    for key in ["\"rewrites\"", "\"mirror\""] {
        assert!(problem.contains(key), "{problem}");
    }
    assert!(
        !problem.contains("secret") && !problem.contains("server"),
        "{problem}"
    );
    fs::write(dir.join("hosts.toml"), "[rewrite]\n'(' = 'a'\n").unwrap();
    let problem = self::problem(root.path(), &hosts[1]);
    assert!(problem.contains("rewrite has"), "{problem}");
}

#[tokio::test]
async fn the_first_folder_that_exists_counts() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |root: &Path, folder: &str| {
        let dir = root.join(folder);
        fs::create_dir(&dir).unwrap();
        fs::write(
            dir.join("hosts.toml"),
            format!("server = \"https://{folder}.example\""),
        )
        .unwrap();
    };
    write(second.path(), "reg.io:5000");
    write(second.path(), "_default");
    let roots = [first.path(), second.path()];
    let server = |name: &str| {
        vec![format!(
            "pro https://{name}.example/v2/app/manifests/v1?ns=reg.io:5000"
        )]
    };
    // The address `https://reg.io:5000.example` has a malformed port. So the file is rejected, and
    // the registry is asked directly.
    assert_eq!(
        urls(&roots, "reg.io:5000/x").await,
        ["pro https://reg.io:5000/v2/app/manifests/v1"]
    );
    write(second.path(), "reg.io_5000_");
    assert_eq!(urls(&roots, "reg.io:5000/x").await, server("reg.io_5000_"));
    assert_eq!(
        urls(&roots, "other.io/x").await,
        ["pr https://_default.example/v2/app/manifests/v1?ns=other.io"]
    );
    write(first.path(), "_default");
    let from_first = urls(&roots, "reg.io:5000/x").await;
    assert_eq!(
        from_first,
        ["pr https://_default.example/v2/app/manifests/v1?ns=reg.io:5000"]
    );
}

const AUTHORITY: &str = include_str!("authority.pem");

fn authority() -> Vec<u8> {
    CertificateDer::from_pem_slice(AUTHORITY.as_bytes())
        .unwrap()
        .to_vec()
}

#[tokio::test]
async fn files_of_certificates_and_headers_are_read() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("reg.io");
    fs::create_dir(&dir).unwrap();
    for name in ["both.pem", "one.cert", "one.key", "empty.pem"] {
        fs::write(dir.join(name), name).unwrap();
    }
    // An unreadable certificate is skipped.
    let odd = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for name in ["ca.pem", "b.crt", "a.crt"] {
        fs::write(dir.join(name), format!("{odd}{AUTHORITY}")).unwrap();
    }
    // Docker's layout, without hosts.toml and with an empty one.
    for _ in 0..2 {
        let only = hosts_of(&[root.path()], "reg.io/x").await;
        assert_eq!(authorities(&only[0]), [authority(), authority()]);
        let identity = only[0].transport.identity.as_deref();
        assert_eq!(identity, Some(&b"one.cert\none.key"[..]));
        fs::write(dir.join("hosts.toml"), "").unwrap();
    }
    fs::remove_file(dir.join("one.key")).unwrap();
    let single = hosts_of(&[root.path()], "reg.io/x").await;
    assert_eq!(
        single[0].transport.identity.as_deref(),
        Some(&b"one.cert"[..])
    );
    fs::write(dir.join("one.key"), "one.key").unwrap();
    let file = r#"
        server = "https://reg.io:443"
        ca = "ca.pem"
        client = [["one.cert", "one.key"]]
        [header]
          x-token = ["a", "b"]
        [host."https://m.io"]
          client = "both.pem"
          skip_verify = true
          dial_timeout = "3s"
          capabilities = ["PULL"]
          [host."https://m.io".header]
            authorization = "Basic c2VjcmV0"
        [host."https://user:hunter2@n.io"]
        [host."http://plain.io:8080"]
          ca = ["ca.pem", "missing.pem", "empty.pem"]
          capabilities = []
          dial_timeout = "0s"
    "#;
    fs::write(dir.join("hosts.toml"), file).unwrap();
    let hosts = hosts_of(&[root.path()], "reg.io/x").await;
    let bases: Vec<_> = hosts
        .iter()
        .map(|host| host.endpoint.base.as_str())
        .collect();
    // TLS settings on an http address: https first, and neither address gets credentials.
    let expected = [
        "https://m.io/v2",
        "https://plain.io:8080/v2",
        "http://plain.io:8080/v2",
        "https://reg.io/v2",
    ];
    assert_eq!(bases, expected);
    let flags: Vec<_> = hosts
        .iter()
        .map(|host| (host.resolves, host.role))
        .collect();
    assert_eq!(
        flags,
        [
            (false, Role::Mirror),
            (true, Role::Mirror),
            (true, Role::Fallback),
            (true, Role::Origin),
        ]
    );
    assert!(hosts[0].transport.skip_verify && !hosts[3].transport.skip_verify);
    assert_eq!(
        hosts[0].transport.identity.as_deref(),
        Some(&b"both.pem"[..])
    );
    assert_eq!(
        hosts[0].transport.dial_timeout,
        Some(Duration::from_secs(3))
    );
    assert_eq!(
        (
            hosts[1].transport.dial_timeout,
            hosts[1].transport.authorities.len()
        ),
        (None, 1)
    );
    assert_eq!(hosts[0].headers["authorization"], "Basic c2VjcmV0");
    assert!(hosts[1].headers.is_empty());
    assert_eq!(hosts[3].headers.get_all("x-token").iter().count(), 2);
    assert_eq!(
        hosts[3].endpoint.namespace, None,
        "the default port makes no other host"
    );
    assert!(!format!("{:?}", hosts[0].headers).contains("c2VjcmV0"));
    let problem = problem(root.path(), &hosts[3]);
    for part in ["contains a password", "missing.pem", "empty.pem"] {
        assert!(problem.contains(part), "{problem}");
    }
    assert!(!problem.contains("hunter2"), "{problem}");
}

#[tokio::test]
async fn what_cannot_be_parsed_falls_back_to_certificates() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("reg.io");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a.crt"), AUTHORITY).unwrap();
    for broken in [
        &b"server = ["[..],
        b"server = 1",
        b"host = 1",
        b"capabilities = [\"reslove\"]",
        b"capabilities = \"pull\"",
        b"ca = {}",
        b"client = [[\"a\", \"b\", \"c\"]]",
        b"[header]\n\"a b\" = \"hunter2\"",
        b"dial_timeout = \"soon\"",
        b"skip_verify = \"yes\"",
        b"\x00\xff\xfe",
        b"# \xff",
    ] {
        fs::write(dir.join("hosts.toml"), broken).unwrap();
        let text = String::from_utf8_lossy(broken);
        let hosts = hosts_of(&[root.path()], "reg.io/x").await;
        assert_eq!(hosts.len(), 1, "{text}");
        assert_eq!(authorities(&hosts[0]), [authority()], "{text}");
        let problem = problem(root.path(), &hosts[0]);
        assert!(
            problem.contains("hosts.toml") && !problem.contains("hunter2"),
            "{text}: {problem}"
        );
    }
}

#[tokio::test]
async fn a_default_for_all_registries_is_none_of_them() {
    let root = tempfile::tempdir().unwrap();
    let write = |folder: &str| {
        let dir = root.path().join(folder);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("hosts.toml"), "server = \"https://mirror.corp\"\n").unwrap();
    };
    write("_default");
    let shown = |hosts: Vec<Host>| hosts.iter().map(|host| host.role).collect::<Vec<_>>();
    assert_eq!(
        shown(hosts_of(&[root.path()], "ghcr.io/x").await),
        [Role::Mirror]
    );
    // In the registry's own folder, `server` is the registry's address.
    write("ghcr.io");
    assert_eq!(
        shown(hosts_of(&[root.path()], "ghcr.io/x").await),
        [Role::Origin]
    );
}

#[tokio::test]
async fn changes_are_seen_after_a_while() {
    let root = tempfile::tempdir().unwrap();
    let reference = Reference::parse("reg.io/x").unwrap();
    let hosts = hosts(&[root.path()], "reg.io/x", &[]);
    assert_eq!(hosts.for_reference(&reference).await.unwrap().len(), 1);
    let dir = root.path().join("reg.io");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("hosts.toml"), "[host.\"https://m.io\"]\n").unwrap();
    assert_eq!(
        hosts.for_reference(&reference).await.unwrap().len(),
        1,
        "within its time"
    );
    let mut known = hosts.known.get("reg.io").unwrap();
    known.read = Instant::now().checked_sub(REREAD_INTERVAL).unwrap();
    hosts.known.insert("reg.io".to_owned(), known);
    assert_eq!(hosts.for_reference(&reference).await.unwrap().len(), 2);
}

mod corpus {
    use proptest::prelude::*;

    use super::super::file;

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,400}") {
            let _ = file::parse(std::path::Path::new("/x"), &text, &mut Vec::new());
        }

        #[test]
        fn no_value_makes_the_parser_panic(
            key in "(server|host|ca|client|capabilities|header|skip_verify|override_path|dial_timeout)",
            value in r#"("[^"\\]{0,40}"|[0-9]{1,6}|true|\[("[^"\\]{0,9}",?){0,3}\]|\[\[("[^"\\]{0,9}",){0,3}\]\]|\{a = "b"\})"#,
        ) {
            let text = format!("[host.\"https://m.io\"]\n{key} = {value}\n");
            if let Ok(entries) = file::parse(std::path::Path::new("/x"), &text, &mut Vec::new()) {
                prop_assert_eq!(entries.len(), 2);
            }
        }
    }
}

#[tokio::test]
async fn registries_share_the_certificates_of_a_file() {
    let file = tempfile::tempdir().unwrap();
    let bundle = file.path().join("bundle.pem");
    fs::write(&bundle, AUTHORITY).unwrap();
    let hosts = Hosts::new(&RegistryClient {
        ca_bundle: Some(bundle),
        ..RegistryClient::default()
    });
    let mut found = Vec::new();
    for image in ["a.io/x", "b.io/x"] {
        let reference = Reference::parse(image).unwrap();
        let host = hosts.for_reference(&reference).await.unwrap()[0].clone();
        found.push(host.transport.authorities[0].clone());
    }
    assert!(Arc::ptr_eq(&found[0], &found[1]), "parsed once");
}
