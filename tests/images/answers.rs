//! Unusual answers of registries: each causes a typed error within the time limit, and nothing
//! wrong is cached.

use std::time::Duration;

use archaware::image::Reason;
use testimg::Script;
use tokio::{io::AsyncWriteExt, net::TcpListener};

use super::*;

/// Work that ends by its own time limits, long before this one.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(Duration::from_mins(1), work).await;
    ended.expect("it ends by itself")
}

/// Scripts every manifest of a registry with `multi`, and returns the reason of the failure.
async fn failing(script: Script) -> Reason {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.script("/manifests/", script);
    let image = registry.image("app");
    let error = in_time(resolve(&resolver, &image)).await.unwrap_err();
    error.reason()
}

/// The same, but only for the document by digest, not for the HEAD of the tag.
async fn failing_document(script: Script) -> Reason {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.script("/manifests/sha256", script);
    let image = registry.image("app");
    let error = in_time(resolve(&resolver, &image)).await.unwrap_err();
    registry.unscript();
    // Nothing of the wrong answer was cached for the image.
    let fresh = super::resolver();
    assert!(resolve(&fresh, &registry.image("app")).await.is_ok());
    error.reason()
}

fn status(code: u16) -> Script {
    Script::Status(code, Vec::new())
}

#[tokio::test]
async fn refusals() {
    assert_eq!(failing(status(404)).await, Reason::NotFound);
    assert_eq!(failing(status(403)).await, Reason::Denied);
    assert_eq!(
        failing(status(401)).await,
        Reason::Denied,
        "no challenge to answer"
    );
    assert_eq!(failing(status(500)).await, Reason::Unavailable);
    assert_eq!(failing(status(418)).await, Reason::Unavailable);
}

#[tokio::test]
async fn a_body_that_is_too_large_is_not_read() {
    let size = 256 * 1024 * 1024;
    assert_eq!(
        failing_document(Script::Oversized(size)).await,
        Reason::TooLarge
    );
}

#[tokio::test]
async fn a_body_that_trickles_is_cut() {
    let pause = Duration::from_millis(100);
    assert_eq!(
        failing_document(Script::Trickle(pause)).await,
        Reason::Unavailable
    );
}

#[tokio::test]
async fn a_registry_that_hangs_is_cut() {
    assert_eq!(failing(Script::Hang).await, Reason::Unavailable);
}

#[tokio::test]
async fn content_of_another_digest_is_corrupt() {
    let other = testimg::find("amd64").root.bytes;
    assert_eq!(
        failing_document(Script::OtherContent(other)).await,
        Reason::Corrupt
    );
    let page = "<html>Sign in</html>".into();
    assert_eq!(
        failing_document(Script::OtherContent(page)).await,
        Reason::Corrupt
    );
}

#[tokio::test]
async fn a_body_that_is_cut_short_is_no_answer() {
    assert_eq!(
        failing_document(Script::CutShort).await,
        Reason::Unavailable
    );
}

#[tokio::test]
async fn a_gzip_bomb_is_too_large() {
    // 64 MiB of spaces, compressed to some 64 KiB.
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    let packed = include_bytes!("spaces.gz").to_vec();
    registry.script("/manifests/sha256", Script::Packed(packed.into()));
    let error = resolve(&resolver, &registry.image("app"))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::TooLarge, "{}", error.chain());
}

#[tokio::test]
async fn redirects_are_followed_but_not_for_ever() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("amd64"));
    let config = testimg::find("amd64")
        .blobs
        .into_iter()
        .find(|b| b.media_type.contains("config"));
    let there = format!(
        "http://{}/v2/app/blobs/{}?there",
        registry.address(),
        config.unwrap().digest
    );
    registry.script("/blobs/", Script::Redirect(format!("{there}/v2/")));
    let error = resolve(&resolver, &registry.image("app"))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
    assert!(registry.count("GET", "/blobs/") <= 12);
}

#[tokio::test]
async fn a_redirect_leads_to_the_content() {
    let (front, store, resolver) = (registry().await, registry().await, resolver());
    let image = testimg::find("amd64");
    front.add("app", &image);
    store.add("app", &image);
    front.require(testimg::Auth::Basic("user".into(), "secret".into()));
    let config = image
        .blobs
        .iter()
        .find(|blob| blob.media_type.contains("config"))
        .unwrap();
    let there = format!(
        "http://localhost:{}/v2/app/blobs/{}",
        store.address().rsplit(':').next().unwrap(),
        config.digest
    );
    front.script("/blobs/", Script::Redirect(there));
    let keyring = super::credentials::keyring(&front.address(), "user", "secret");
    let resolved = resolve_as(&resolver, &front.image("app"), &keyring)
        .await
        .unwrap();
    assert_eq!(platforms(&resolved), ["linux/amd64"]);
    let at_store = store.seen();
    assert!(!at_store.is_empty());
    assert!(
        at_store.iter().all(|seen| seen.authorization.is_none()),
        "credentials crossed hosts"
    );
}

#[tokio::test]
async fn a_registry_without_digest_headers_is_read_by_content() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.script("/manifests/", Script::NoDigestHeader);
    let resolved = resolve(&resolver, &registry.image("app")).await.unwrap();
    assert_eq!(platforms(&resolved).len(), 3);
    assert_eq!(
        registry.count("GET", "/manifests/"),
        1,
        "the document came with the tag"
    );
}

#[tokio::test]
async fn no_connection_and_no_http() {
    let resolver = resolver();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let babbler = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
        }
    });
    let error = resolve(&resolver, &format!("{address}/app"))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
    babbler.abort();
    let _ = babbler.await;
    let error = resolve(&super::resolver(), &format!("{address}/app"))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
}

#[tokio::test]
async fn a_rate_limit_closes_the_gate_without_further_requests() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("a", &testimg::find("multi"));
    registry.add("b", &testimg::find("multi"));
    let header = ("retry-after".to_owned(), "120".to_owned());
    registry.script("/v2/a/", Script::Status(429, vec![header]));
    let error = resolve(&resolver, &registry.image("a")).await.unwrap_err();
    assert_eq!(error.reason(), Reason::RateLimited);
    assert!(error.retry_after().unwrap() > Duration::from_secs(100));
    let seen = registry.seen().len();
    let other = resolve(&resolver, &registry.image("b")).await.unwrap_err();
    assert_eq!(other.reason(), Reason::RateLimited);
    assert_eq!(
        registry.seen().len(),
        seen,
        "the registry was asked while its gate was closed"
    );
}

#[tokio::test]
async fn a_host_that_never_answers_fails_fast_after_three_timeouts() {
    let (registry, resolver) = (registry().await, resolver());
    registry.script("/", Script::Hang);
    let images: Vec<_> = (0..40)
        .map(|n| registry.image(&format!("app{n}")))
        .collect();
    let resolving = images.iter().map(|image| resolve(&resolver, image));
    let answers = in_time(futures::future::join_all(resolving)).await;
    assert!(answers.iter().all(|answer| {
        answer
            .as_ref()
            .is_err_and(|e| e.reason() == Reason::Unavailable)
    }));
    // Requests in progress when the host is paused, at most eight at once, and those admitted by
    // then; not forty.
    let asked = registry.seen().len();
    assert!(asked <= 16, "{asked} requests to a host that never answers");
    let late = registry.image("late");
    assert!(in_time(resolve(&resolver, &late)).await.is_err());
    assert_eq!(registry.seen().len(), asked, "it is left alone");
}

#[tokio::test]
async fn a_failing_server_is_tried_again() {
    let (registry, resolver) = (registry().await, resolver());
    registry.script("/", Script::Status(502, Vec::new()));
    assert!(resolve(&resolver, &registry.image("app")).await.is_err());
    assert_eq!(registry.count("HEAD", ""), 3);
}

/// A captive portal's page is temporary: it is not an image and must not be cached as one.
#[tokio::test]
async fn a_page_that_is_no_image_is_not_what_the_tag_points_at() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.script(
        "/manifests/latest",
        Script::OtherContent("<html>please sign in</html>".into()),
    );
    let image = registry.image("app");
    for _ in 0..2 {
        let error = resolve(&resolver, &image).await.unwrap_err();
        assert_eq!(error.reason(), Reason::Corrupt, "{}", error.chain());
    }
    assert_eq!(
        registry.count("GET", "/manifests/sha256:"),
        0,
        "its digest is not cached"
    );
    registry.unscript();
    // The failure is cached for a while for this credential; the tag is not cached at all.
    let keyring = super::credentials::keyring(&registry.address(), "user", "secret");
    let resolved = resolve_as(&resolver, &image, &keyring).await.unwrap();
    assert_eq!(platforms(&resolved).len(), 3);
}

/// Documents of 4 MiB each: their sum is bounded too.
#[tokio::test]
async fn many_large_documents_of_one_image_are_too_much() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::swollen(8, 3 << 20));
    let error = resolve(&resolver, &registry.image("app"))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::TooLarge, "{}", error.chain());
    // The root, and children of 3 MiB up to 16 MiB.
    assert_eq!(registry.count("GET", "/manifests/sha256:"), 7);
}
