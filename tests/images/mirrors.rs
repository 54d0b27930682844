//! Mirrors of `hosts.toml`.

use testimg::Auth;

use super::*;

/// The mirror has the image under another name, and needs a token for that name.
#[tokio::test]
async fn a_mirror_is_asked_for_the_rewritten_repository() {
    let (mirror, origin) = (registry().await, registry().await);
    mirror.add("hub/app", &testimg::find("arm64"));
    mirror.require(Auth::Bearer(None));
    origin.add("rancher/app", &testimg::find("amd64"));
    origin.add("rancher/only-here", &testimg::find("s390x"));
    let address = mirror.address();
    let hosts = format!(
        "[host.\"http://{address}\"]\n[host.\"http://{address}\".rewrite]\n\"^rancher/(.*)\" = \"hub/$1\"\n"
    );
    let folder = hosts_directory(&origin, &hosts);
    let mut settings = settings();
    settings.registry.hosts_directories = vec![folder.path().to_owned()];
    let resolver = resolver_with(settings);
    for (repository, platform) in [
        ("rancher/app", "linux/arm64"),
        ("rancher/only-here", "linux/s390x"),
    ] {
        let resolved = resolve(&resolver, &origin.image(repository)).await.unwrap();
        assert_eq!(platforms(&resolved), [platform], "{repository}");
    }
    let seen = mirror.seen();
    let asked: Vec<_> = seen.iter().map(|seen| seen.path.as_str()).collect();
    assert!(
        asked.iter().all(|path| !path.contains("rancher")),
        "{asked:?}"
    );
    let token = "scope=repository%3Ahub%2Fapp%3Apull";
    assert!(asked.iter().any(|path| path.contains(token)), "{asked:?}");
}
