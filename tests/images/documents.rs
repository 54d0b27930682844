//! The result for every kind of image.

use testimg::{Expected, catalogue};

use super::*;

#[tokio::test]
async fn every_kind_of_image_is_understood() {
    let registry = registry().await;
    for (name, image, expected) in catalogue() {
        registry.add(name, image);
        // Some share a root document, so each gets an empty cache.
        let resolver = resolver();
        let answer = resolve(&resolver, &registry.image(name)).await;
        match (*expected, answer) {
            (Expected::Platforms(expected), Ok(resolved)) => {
                assert_eq!(platforms(&resolved), expected, "{name}");
                assert_eq!(resolved.digest.to_string(), image.root.digest, "{name}");
            }
            (Expected::Note(note), Ok(resolved)) => {
                assert!(platforms(&resolved).is_empty(), "{name}");
                assert_eq!(
                    resolved
                        .platforms
                        .no_platform_reason()
                        .map(archaware::platform::NoPlatformReason::as_str),
                    Some(note),
                    "{name}"
                );
            }
            (Expected::Error(reason), Err(error)) => {
                assert_eq!(error.reason().as_str(), reason, "{name}: {}", error.chain());
            }
            (expected, answer) => panic!("{name}: expected {expected:?}, got {answer:?}"),
        }
    }
}

/// Other tests and users of `testimg/update.sh` rely on these images.
#[test]
fn test_images_have_fixed_digests() {
    let line = |(name, image, _): &(_, testimg::Image, _)| format!("{name} {}", image.root.digest);
    let actual: Vec<String> = catalogue().iter().map(line).collect();
    let actual = actual.join(
        "
",
    ) + "
";
    assert_eq!(
        actual,
        include_str!("digests.txt"),
        "after a wanted change: testimg list > tests/images/digests.txt"
    );
}

#[tokio::test]
async fn a_digest_decides_and_a_tag_beside_it_is_ignored() {
    let (registry, resolver) = (registry().await, resolver());
    let (old, new) = (testimg::find("amd64"), testimg::find("arm64"));
    registry.add("app", &old);
    registry.add("app", &new);
    let image = format!("{}:latest@{}", registry.image("app"), old.root.digest);
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()),
        ["linux/amd64"]
    );
    assert_eq!(registry.count("HEAD", ""), 0, "a digest needs no HEAD");
    let tagged = resolve(&resolver, &registry.image("app")).await.unwrap();
    assert_eq!(platforms(&tagged), ["linux/arm64"]);
}

#[tokio::test]
async fn all_four_media_types_are_accepted() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    resolve(&resolver, &registry.image("app")).await.unwrap();
    for seen in registry.seen() {
        let accept = seen.accept.unwrap();
        for media_type in archaware::platform::media_type::MANIFESTS {
            assert!(accept.contains(media_type), "{} {accept}", seen.method);
        }
    }
}
