//! Compatibility documents that are attached to images, in registries with the referrers API and
//! without it.

use std::time::Duration;

use archaware::{
    image::{
        PullPolicy, Reason, ResolveRequest,
        credentials::{Keyring, ready_keyring},
    },
    selection::{COMPATIBILITY, parse},
};
use testimg::Image;
use testsupport::servers::{Referrers, Registry};

use crate::resolving::{resolver, settings};

const ARTIFACT: &str = "application/vnd.nfd.image-compatibility.v1alpha1";
const LAYER: &str = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml";

/// The weights of the document of an image.
async fn weights(image: &str) -> Result<Vec<i64>, Reason> {
    let resolver = resolver(settings());
    let request = ResolveRequest {
        image,
        policy: PullPolicy::IfNotPresent,
        keyring: &ready_keyring(Keyring::default()),
        tenant: "",
    };
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    let content = resolver
        .artifact_by(&COMPATIBILITY, request, deadline)
        .await;
    let document = content.and_then(|content| parse(&content));
    let document = document.map_err(|error| error.reason())?;
    Ok(document.entries.iter().map(|entry| entry.weight).collect())
}

#[tokio::test]
async fn documents_are_found_with_and_without_the_api() {
    let (with, without) = (Referrers::start().await, Registry::open(&[]).await);
    let http = reqwest::Client::builder()
        .tls_certs_only([])
        .build()
        .unwrap();
    let image = testimg::find("multi");
    for (address, has_api) in [
        (with.address(), true),
        (without.address().to_owned(), false),
    ] {
        let push = async |repository: &str, tag: &str, image: &Image| {
            testimg::push(&http, &address, repository, tag, image)
                .await
                .unwrap();
        };
        // To the index, and to the image of its first platform.
        let platforms = image.manifests.len();
        let mut of_first = vec![0; platforms];
        of_first[0] = 7;
        for (repository, subject, expected) in [
            ("index", &image.root, vec![7]),
            ("platform", &image.manifests[0], of_first),
        ] {
            push(repository, "latest", &image).await;
            let name = format!("{address}/{repository}");
            assert_eq!(
                weights(&name).await,
                Err(Reason::Corrupt),
                "none is attached"
            );
            let mut attached = Vec::new();
            for (weight, created) in [(7, "2026-02-01T00:00:00Z"), (3, "2026-01-01T00:00:00Z")] {
                let text = format!("compatibilities:\n- weight: {weight}\n  rules: []\n");
                // go-containerregistry knows this way only.
                let artifact = Image::artifact(ARTIFACT, LAYER, &text).typed_by_config();
                let artifact = artifact.attached_to(subject, created);
                push(repository, &artifact.root.digest, &artifact).await;
                attached.push(artifact);
            }
            if !has_api {
                // As clients do where a registry does not say `OCI-Subject` when they push.
                let mut index = image.clone();
                index.root = Image::referrers(&attached.iter().collect::<Vec<_>>());
                push(repository, &subject.digest.replace(':', "-"), &index).await;
            }
            assert_eq!(
                weights(&name).await,
                Ok(expected),
                "{repository}: the newest"
            );
        }
    }
}
