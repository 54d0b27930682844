//! Compatibility documents are read as images are: with the same credentials, caches and limits.

use std::{sync::Arc, time::Duration};

use archaware::{
    image::Reason,
    selection::{
        COMPATIBILITY,
        compatibility::{Compatibility, CompatibilityDocument, RuleKeys},
        parse,
    },
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
    let content = resolver
        .artifact_by(&COMPATIBILITY, request, deadline)
        .await?;
    parse(&content).map(Arc::new)
}

async fn read(resolver: &Resolver, image: &str) -> Result<Arc<CompatibilityDocument>, ImageError> {
    read_as(resolver, image, &Keyring::default()).await
}

#[tokio::test]
async fn both_formats_are_read_once() {
    let (registry, resolver) = (registry().await, resolver());
    let yaml = "compatibilities:\n- tag: fast\n  weight: 90\n  rules: []\n";
    let json = r#"{"compatibilities": [{"tag": "fast", "weight": 90, "rules": []}]}"#;
    for (name, media_type, text, format) in [
        ("ocifit", OCIFIT, DOCUMENT, RuleKeys::Labels),
        ("nfd", NFD, yaml, RuleKeys::Features),
        (
            "nfd-json",
            &NFD.replace("yaml", "json"),
            json,
            RuleKeys::Features,
        ),
    ] {
        let artifact = Image::artifact("application/vnd.test", media_type, text);
        registry.add(name, &artifact);
        registry.forget();
        let image = registry.image(name);
        let all = futures::future::join_all((0..16).map(|_| read(&resolver, &image))).await;
        for document in all {
            let document = document.unwrap();
            assert_eq!((document.keys, document.entries.len()), (format, 1));
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
            "no layer with a compatibility document",
        ),
        (
            "index",
            testimg::find("multi"),
            Reason::Corrupt,
            "no layer with a compatibility document",
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
            "256 entries",
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
    // Its digest is no secret: it is in manifests and logs.
    let by_digest = format!("{image}@{}", artifact.root.digest);
    let denied = read(&resolver, &by_digest).await.unwrap_err();
    assert_eq!(denied.reason(), Reason::Denied);
    let requests = registry.seen().len();
    for image in [&image, &by_digest] {
        assert!(read_as(&resolver, image, &right).await.is_ok());
    }
    assert_eq!(registry.seen().len(), requests);
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

const NFD_ARTIFACT: &str = "application/vnd.nfd.image-compatibility.v1alpha1";

fn weights(document: &CompatibilityDocument) -> Vec<i64> {
    document.entries.iter().map(|entry| entry.weight).collect()
}

/// Node Feature Discovery attaches its documents to images: found by the referrers API, or by a tag
/// where a registry lacks it.
#[tokio::test]
async fn what_is_attached_to_an_image_is_read() {
    let registry = registry().await;
    let image = testimg::find("multi");
    registry.add("app", &image);
    let attached = |weight: i64, created: &str| {
        let text = format!("compatibilities: [{{weight: {weight}, rules: []}}]");
        Image::artifact(NFD_ARTIFACT, NFD, &text).attached_to(&image.root, created)
    };
    let (old, new) = (
        attached(1, "2026-02-01T00:30:00+02:00"),
        attached(2, "2026-01-31T23:00:00.5Z"),
    );
    let other = Image::artifact("application/vnd.other", NFD, "x").attached_to(&image.root, "2027");
    for artifact in [&old, &new, &other] {
        registry.add_tag("app", "attached", artifact);
    }
    let name = registry.image("app");
    // A tag, as clients maintain it.
    let tag = image.root.digest.replace(':', "-");
    registry.add_manifest("app", &tag, Image::referrers(&[&old]));
    assert_eq!(weights(&read(&resolver(), &name).await.unwrap()), [1]);
    // The API counts more. The newest of the right type is used.
    registry.set_referrers("app", &image.root.digest, Some(&[&new, &old, &other]));
    let resolver = resolver();
    let document = read(&resolver, &name).await.unwrap();
    assert_eq!((weights(&document), &document.subject), (vec![2], &None));
    registry.forget();
    read(&resolver, &name).await.unwrap();
    assert_eq!(registry.seen(), [], "it is cached");
    // The artifact itself says which image it is about.
    let artifact = format!("{name}@{}", new.root.digest);
    let document = read(&resolver, &artifact).await.unwrap();
    assert_eq!(document.subject.as_deref(), Some(&*image.root.digest));
}

/// An index may have a document for each of its platforms (`oras attach --platform`). One of the
/// index itself counts more.
#[tokio::test]
async fn what_is_attached_to_single_platforms_is_read() {
    let registry = registry().await;
    let image = testimg::find("multi");
    registry.add("app", &image);
    let children: Vec<_> = image.manifests.clone();
    assert!(children.len() > 2);
    let attach = |subject: &testimg::Blob, weight: i64| {
        let text = format!("compatibilities: [{{weight: {weight}, rules: []}}]");
        let artifact = Image::artifact(NFD_ARTIFACT, NFD, &text).attached_to(subject, "2026");
        registry.add_tag("app", "attached", &artifact);
        registry.set_referrers("app", &subject.digest, Some(&[&artifact]));
    };
    let name = registry.image("app");
    let error = read(&resolver(), &name).await.unwrap_err();
    assert_eq!(error.reason(), Reason::Corrupt, "{}", error.chain());
    attach(&children[1], 7);
    registry.forget();
    let resolver = resolver();
    let document = read(&resolver, &name).await.unwrap();
    let on = |entry: &Compatibility| (entry.tag.clone(), entry.weight);
    let found: Vec<_> = document.entries.iter().map(on).collect();
    let index: serde_json::Value = serde_json::from_slice(&image.root.bytes).unwrap();
    let platforms = index["manifests"].as_array().unwrap().iter();
    let expected = platforms.enumerate().map(|(n, entry)| {
        let platform = |name: &str| entry["platform"][name].as_str().unwrap().to_owned();
        let name = format!("{}/{}", platform("os"), platform("architecture"));
        (name, if n == 1 { 7 } else { 0 })
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
    assert_eq!(
        registry.count("GET", "/v2/app/referrers/"),
        children.len() + 1
    );
    registry.forget();
    read(&resolver, &name).await.unwrap();
    assert_eq!(registry.seen(), [], "it is cached");
    // Not to know one of them is to know nothing.
    let part = format!("/referrers/{}", children[2].digest);
    registry.script(&part, Script::Status(500, Vec::new()));
    let error = read(&super::resolver(), &name).await.unwrap_err();
    assert_eq!(error.reason(), Reason::Unavailable, "{}", error.chain());
    registry.unscript();
    attach(&image.root, 9);
    let document = read(&super::resolver(), &name).await.unwrap();
    assert_eq!(weights(&document), [9]);
}

/// An index with very many images is not asked about: each costs a request.
#[tokio::test]
async fn of_very_many_images_nothing_is_read() {
    let registry = registry().await;
    let mut image = testimg::find("multi");
    for (images, asked, reason) in [(32, 33, Reason::Corrupt), (33, 1, Reason::Unsupported)] {
        let mut index: serde_json::Value = serde_json::from_slice(&image.root.bytes).unwrap();
        let entry = index["manifests"][0].clone();
        let entries = (0..images).map(|number| {
            let mut entry = entry.clone();
            entry["digest"] = format!("sha256:{number:064}").into();
            entry
        });
        index["manifests"] = entries.collect();
        image.root = testimg::Blob::json(&image.root.media_type, &index);
        registry.add("app", &image);
        registry.forget();
        let error = read(&resolver(), &registry.image("app")).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{}", error.chain());
        assert_eq!(registry.count("GET", "/v2/app/referrers/"), asked);
    }
}

/// A registry may answer in pages; the next one is asked for in the same repository, wherever the
/// link points.
#[tokio::test]
async fn what_is_attached_on_further_pages_is_found() {
    let registry = registry().await;
    let image = testimg::find("multi");
    registry.add("app", &image);
    let attached: Vec<Image> = (0..12)
        .map(|n| {
            let text = format!("compatibilities: [{{weight: {n}, rules: []}}]");
            let created = format!("20{:02}-01-01T00:00:00Z", 10 + n);
            Image::artifact(NFD_ARTIFACT, NFD, &text).attached_to(&image.root, &created)
        })
        .collect();
    for artifact in &attached {
        registry.add_tag("app", "attached", artifact);
    }
    let all: Vec<&Image> = attached.iter().take(5).collect();
    registry.set_referrers("app", &image.root.digest, Some(&all));
    registry.split_referrers();
    let name = registry.image("app");
    assert_eq!(weights(&read(&resolver(), &name).await.unwrap()), [4]);
    assert_eq!(registry.count("GET", "/v2/app/referrers/"), 5);
    // Links without end cost eight requests.
    let all: Vec<&Image> = attached.iter().collect();
    registry.set_referrers("app", &image.root.digest, Some(&all));
    registry.forget();
    assert_eq!(weights(&read(&resolver(), &name).await.unwrap()), [7]);
    assert_eq!(registry.count("GET", "/referrers/"), 8);
}

/// As images are, documents and what is attached are read from a mirror.
#[tokio::test]
async fn mirrors_have_documents_too() {
    let (mirror, origin) = (registry().await, registry().await);
    let root = mirrored_by(&mirror, &origin);
    let mut settings = settings();
    settings.registry.hosts_directories = vec![root.path().to_owned()];
    let resolver = resolver_with(settings);
    let document = Image::artifact("application/vnd.test", OCIFIT, DOCUMENT);
    let image = testimg::find("multi");
    let text = "compatibilities: [{weight: 7, rules: []}]";
    let attached = Image::artifact(NFD_ARTIFACT, NFD, text).attached_to(&image.root, "2026");
    for registry in [&mirror, &origin] {
        registry.add("document", &document);
        registry.add("app", &image);
    }
    mirror.add_tag("app", "attached", &attached);
    mirror.set_referrers("app", &image.root.digest, Some(&[&attached]));
    for (name, expected) in [("document", 1), ("app", 7)] {
        let found = read(&resolver, &origin.image(name)).await.unwrap();
        assert_eq!(weights(&found), [expected], "{name}");
    }
    // Tags only are looked up at the registry itself.
    assert_eq!((origin.count("HEAD", ""), origin.count("GET", "")), (2, 0));
}

/// A document that was attached later is found when the tag of its image is looked up again.
#[tokio::test]
async fn what_is_attached_later_is_found() {
    let registry = registry().await;
    let image = testimg::find("multi");
    registry.add("app", &image);
    let mut short = settings();
    short.tag_ttl = Duration::from_millis(50);
    let resolver = resolver_with(short);
    let attach = |weight: i64| {
        let text = format!("compatibilities: [{{weight: {weight}, rules: []}}]");
        let artifact = Image::artifact(NFD_ARTIFACT, NFD, &text).attached_to(&image.root, "2026");
        registry.add_tag("app", "attached", &artifact);
        registry.set_referrers("app", &image.root.digest, Some(&[&artifact]));
    };
    attach(1);
    let name = format!("{}@{}", registry.image("app"), image.root.digest);
    assert_eq!(weights(&read(&resolver, &name).await.unwrap()), [1]);
    attach(2);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while weights(&read(&resolver, &name).await.unwrap()) != [2] {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Who answers neither, or with nonsense.
#[tokio::test]
async fn nothing_or_nonsense_is_attached() {
    let registry = registry().await;
    let image = testimg::find("multi");
    let artifact = |layer: &str| {
        Image::artifact(NFD_ARTIFACT, layer, "compatibilities: []").attached_to(&image.root, "")
    };
    for (name, script, attached, reason) in [
        ("nothing", None, Some(vec![]), Reason::Corrupt),
        ("neither", None, None, Reason::Corrupt),
        (
            "layer",
            None,
            Some(vec![artifact("text/plain")]),
            Reason::Corrupt,
        ),
        (
            "gone",
            None,
            Some(vec![artifact(NFD).attached_to(&image.root, "9")]),
            Reason::NotFound,
        ),
        (
            "text",
            Some(Script::OtherContent("hello".into())),
            None,
            Reason::Corrupt,
        ),
        (
            "broken",
            Some(Script::Status(500, Vec::new())),
            None,
            Reason::Unavailable,
        ),
        (
            "denied",
            Some(Script::Status(403, Vec::new())),
            None,
            Reason::Denied,
        ),
        (
            "large",
            Some(Script::Oversized(5 * 1024 * 1024)),
            None,
            Reason::TooLarge,
        ),
    ] {
        registry.unscript();
        registry.add(name, &image);
        for one in attached.iter().flatten().filter(|_| name != "gone") {
            registry.add_tag(name, "attached", one);
        }
        let all: Option<Vec<&Image>> = attached.as_ref().map(|all| all.iter().collect());
        registry.set_referrers(name, &image.root.digest, all.as_deref());
        if let Some(script) = script {
            registry.script("/referrers/", script);
        }
        let error = read(&resolver(), &registry.image(name)).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{name}: {}", error.chain());
    }
}

/// A document that is attached in one repository does not apply to the same image in another
/// repository.
#[tokio::test]
async fn what_is_attached_counts_in_its_repository_only() {
    let (registry, resolver) = (registry().await, resolver());
    let image = testimg::find("multi");
    for (repository, weight) in [("evil", 1), ("app", 2)] {
        registry.add(repository, &image);
        let text = format!("compatibilities: [{{weight: {weight}, rules: []}}]");
        let artifact = Image::artifact(NFD_ARTIFACT, NFD, &text).attached_to(&image.root, "2026");
        registry.add_tag(repository, "attached", &artifact);
        registry.set_referrers(repository, &image.root.digest, Some(&[&artifact]));
        let document = read(&resolver, &registry.image(repository)).await.unwrap();
        assert_eq!(weights(&document), [weight]);
    }
}

/// What is attached to the image of a pod that does not ask for it costs a request for each image,
/// not for each of its platforms.
#[tokio::test]
async fn what_is_attached_to_the_image_itself_is_asked_for_once() {
    let (registry, resolver) = (registry().await, resolver());
    let image = testimg::find("multi");
    for name in ["app", "plain", "slow"] {
        registry.add(name, &image);
    }
    let text = "compatibilities: [{weight: 7, rules: []}]";
    let attach = |name: &str, subject: &testimg::Blob| {
        let artifact = Image::artifact(NFD_ARTIFACT, NFD, text).attached_to(subject, "2026");
        registry.add_tag(name, "attached", &artifact);
        registry.set_referrers(name, &subject.digest, Some(&[&artifact]));
    };
    attach("app", &image.root);
    attach("plain", &image.manifests[0]);
    registry.set_referrers("plain", &image.root.digest, Some(&[]));
    let keyring = ready_keyring(Keyring::default());
    let within = |name: &str, wait: Duration| {
        let (image, keyring, resolver) = (registry.image(name), keyring.clone(), resolver.clone());
        async move {
            let request = ResolveRequest {
                image: &image,
                policy: PullPolicy::IfNotPresent,
                keyring: &keyring,
                tenant: "",
            };
            let deadline = tokio::time::Instant::now() + wait;
            let content = resolver
                .attached_by(&COMPATIBILITY, request, deadline)
                .await?;
            parse(&content)
        }
    };
    let ask = |name: &str| within(name, Duration::from_secs(30));
    // Known images, as those of pods are.
    for name in ["app", "plain", "slow"] {
        resolve(&resolver, &registry.image(name)).await.unwrap();
    }
    registry.forget();
    let all = futures::future::join_all((0..16).map(|_| ask("app"))).await;
    for document in all {
        assert_eq!(weights(&document.unwrap()), [7]);
    }
    // The list, the manifest and the layer.
    assert_eq!(
        (registry.count("GET", ""), registry.count("HEAD", "")),
        (3, 0)
    );
    ask("app").await.unwrap();
    assert_eq!(registry.count("GET", ""), 3, "it is cached");
    for _ in 0..3 {
        let error = ask("plain").await.unwrap_err();
        assert_eq!(error.reason(), Reason::Corrupt, "{}", error.chain());
    }
    assert_eq!(registry.count("GET", "/v2/plain/"), 1);
    // The annotation asks for more.
    let document = read(&resolver, &registry.image("plain")).await.unwrap();
    assert!(weights(&document).contains(&7));
    // What does not come in time is there for the next pod.
    attach("slow", &image.root);
    registry.forget();
    registry.script("/v2/slow/", Script::Slow(Duration::from_millis(700)));
    let wait = Duration::from_millis(200);
    let all = futures::future::join_all((0..32).map(|_| within("slow", wait))).await;
    assert!(all.iter().all(Result::is_err));
    assert_eq!(weights(&ask("slow").await.unwrap()), [7]);
    assert_eq!(registry.count("GET", "/v2/slow/"), 3, "one read");
}
