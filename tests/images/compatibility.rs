//! Compatibility documents are read as images are: with the same credentials, caches and limits.

use std::{sync::Arc, time::Duration};

use archaware::{
    image::Reason,
    placement::selection::{CompatibilityDocument, DocumentFormat},
};
use testimg::{Auth, Image, Script};

use super::*;

const OCIFIT: &str = "application/vnd.oci.image.compatibilities.v1+json";
const NFD: &str = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml";
const DOCUMENT: &str = r#"{"version": "v1alpha1", "compatibilities": [{"tag": "reg/app:fast", "weight": 1, "rules": []}]}"#;

async fn read_as(
    resolver: &Resolver,
    image: &str,
    keyring: &Keyring,
) -> Result<Arc<CompatibilityDocument>, ImageError> {
    let request = ResolveRequest {
        image,
        policy: PullPolicy::IfNotPresent,
        keyring: &ready_keyring(keyring.clone()),
        tenant: "",
    };
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    resolver.compatibility_by(request, deadline).await
}

async fn read(resolver: &Resolver, image: &str) -> Result<Arc<CompatibilityDocument>, ImageError> {
    read_as(resolver, image, &Keyring::default()).await
}

#[tokio::test]
async fn both_formats_are_read_once() {
    let (registry, resolver) = (registry().await, resolver());
    let yaml = "compatibilities:\n- tag: fast\n  weight: 90\n  rules: []\n";
    for (name, media_type, text, format) in [
        ("ocifit", OCIFIT, DOCUMENT, DocumentFormat::Labels),
        ("nfd", NFD, yaml, DocumentFormat::Features),
    ] {
        let artifact = Image::artifact("application/vnd.test", media_type, text);
        registry.add(name, &artifact);
        registry.forget();
        let image = registry.image(name);
        let all = futures::future::join_all((0..16).map(|_| read(&resolver, &image))).await;
        for document in all {
            let document = document.unwrap();
            assert_eq!((document.format, document.entries.len()), (format, 1));
        }
        // The manifest may come with the digest of its tag.
        let requests = registry.seen().len();
        assert!(
            requests <= 3 && registry.count("GET", "/blobs/") == 1,
            "{requests}"
        );
        read(&resolver, &image).await.unwrap();
        let by_digest = format!("{image}@{}", artifact.root.digest);
        read(&resolver, &by_digest).await.unwrap();
        assert_eq!(registry.seen().len(), requests);
        // The same artifact is no image.
        assert!(platforms(&resolve(&resolver, &image).await.unwrap()).is_empty());
    }
}

#[tokio::test]
async fn what_is_no_document_is_an_error() {
    let (registry, resolver) = (registry().await, resolver());
    let artifact =
        |media_type: &str, text: &str| Image::artifact("application/vnd.test", media_type, text);
    let large = format!("{DOCUMENT}{}", " ".repeat(256 * 1024));
    let many = format!(
        r#"{{"compatibilities": [{}]}}"#,
        vec![r#"{"tag": "a"}"#; 300].join(",")
    );
    let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\ncompatibilities: [*e,*e,*e,*e,*e,*e,*e,*e,*e]";
    for (name, image, reason, part) in [
        (
            "image",
            testimg::find("amd64"),
            Reason::Corrupt,
            "no layer is a compatibility document",
        ),
        (
            "index",
            testimg::find("multi"),
            Reason::Corrupt,
            "no layer is a compatibility document",
        ),
        (
            "other",
            artifact("application/json", DOCUMENT),
            Reason::Corrupt,
            "no layer",
        ),
        (
            "text",
            artifact(OCIFIT, "hello"),
            Reason::Corrupt,
            "no compatibility document",
        ),
        (
            "large",
            artifact(OCIFIT, &large),
            Reason::TooLarge,
            "256 KiB",
        ),
        (
            "many",
            artifact(OCIFIT, &many),
            Reason::TooLarge,
            "more than 256 entries",
        ),
        (
            "bomb",
            artifact(NFD, bomb),
            Reason::Corrupt,
            "no compatibility document",
        ),
    ] {
        registry.add(name, &image);
        let error = read(&resolver, &registry.image(name)).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{name}: {}", error.chain());
        assert!(error.chain().contains(part), "{name}: {}", error.chain());
        // It is not asked for again at once.
        registry.forget();
        assert!(read(&resolver, &registry.image(name)).await.is_err());
        assert_eq!(registry.count("GET", ""), 0, "{name}");
    }
    registry.add("gone", &artifact(OCIFIT, DOCUMENT));
    registry.script("/blobs/", Script::Status(404, Vec::new()));
    let error = read(&resolver, &registry.image("gone")).await.unwrap_err();
    assert_eq!(error.reason(), Reason::NotFound);
}

#[tokio::test]
async fn a_private_document_is_for_holders_of_the_credential() {
    let (registry, resolver) = (registry().await, resolver());
    let artifact = Image::artifact("application/vnd.test", OCIFIT, DOCUMENT);
    registry.add("private", &artifact);
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let image = registry.image("private");
    let right = credentials::keyring(&registry.address(), "user", "secret");
    assert!(read_as(&resolver, &image, &right).await.is_ok());
    let denied = read(&resolver, &image).await.unwrap_err();
    assert_eq!(denied.reason(), Reason::Denied);
    assert!(read_as(&resolver, &image, &right).await.is_ok());
}

/// A document that is none says nothing about the same reference as an image.
#[tokio::test]
async fn an_image_that_is_no_document_stays_an_image() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    let image = registry.image("app");
    assert!(read(&resolver, &image).await.is_err());
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()).len(),
        3
    );
}
