use proptest::prelude::*;

use super::*;

/// Made by `ParseNormalizedNamed` and `TagNameOnly` of `github.com/distribution/reference` v0.6.0:
/// a reference, a tab, and its normalised form, or `!` where Go refuses it.
const CORPUS: &str = include_str!("corpus.tsv");

#[test]
fn agrees_with_go_on_the_corpus() {
    for line in CORPUS.lines() {
        let (text, expected) = line.split_once('\t').unwrap();
        let actual = match Reference::parse(text) {
            Ok(reference) => reference.to_string(),
            Err(ReferenceError::Algorithm(_)) => "!algorithm".to_owned(),
            Err(ReferenceError::Invalid { .. }) => "!".to_owned(),
        };
        assert_eq!(actual, expected, "{text:?}");
    }
}

#[test]
fn parts_of_a_reference() {
    let reference = Reference::parse("[::1]:5000/team/app:v1").unwrap();
    assert_eq!(reference.registry(), "[::1]:5000");
    assert_eq!(reference.host_name(), "::1");
    assert_eq!(reference.name(), "[::1]:5000/team/app");
    let hub = Reference::parse("nginx").unwrap();
    assert_eq!(hub.api_host(), "registry-1.docker.io");
    assert_eq!(hub.host_name(), "docker.io");
}

proptest! {
    #[test]
    fn never_panics_and_is_idempotent(text in "[a-zA-Z0-9.:/@_\\-\\[\\] ]{0,80}") {
        if let Ok(reference) = Reference::parse(&text) {
            let normal = reference.to_string();
            prop_assert_eq!(Reference::parse(&normal).unwrap(), reference);
        }
    }

    #[test]
    fn any_unicode_is_refused_or_read(text in "\\PC{0,40}") {
        let _ = Reference::parse(&text);
    }
}
