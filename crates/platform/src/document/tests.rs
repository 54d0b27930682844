use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn parse(text: &str) -> Result<Document, DocumentError> {
    Document::parse(text.as_bytes(), None)
}

#[test]
fn one_odd_entry_does_not_hide_the_others() {
    let index = r#"{"manifests": [
        {"platform": {"os": "linux", "architecture": "amd64"}},
        {"platform": null, "digest": "d", "annotations": null, "size": null, "mediaType": null},
        {"platform": {"os": "linux"}, "digest": "e", "mediaType": "application/vnd.oci.image.manifest.v1+json"},
        null, "text", {"platform": "linux"}, {"size": "7"},
        {"digest": "layer", "mediaType": "application/vnd.oci.image.layer.v1.tar"},
        {}
    ]}"#;
    let Ok(Document::Index(index)) = parse(index) else {
        panic!("not an index")
    };
    assert_eq!(
        (index.platforms.len(), index.without_platform.len()),
        (1, 2)
    );
}

#[test]
fn an_index_of_many_is_read_and_a_hostile_one_is_not_kept() {
    let entry = |n: usize| format!(r#"{{"platform": {{"os": "linux", "architecture": "a{n}"}}}}"#);
    let index = |count: usize, different: usize| {
        let entries: Vec<_> = (0..count).map(|n| entry(n % different)).collect();
        parse(&format!(r#"{{"manifests": [{}]}}"#, entries.join(",")))
    };
    assert!(matches!(index(5000, 200), Ok(Document::Index(index)) if index.platforms.len() == 200));
    assert!(matches!(
        index(5000, 300),
        Err(DocumentError::TooManyEntries)
    ));
}

#[test]
fn what_the_carrier_says_must_fit() {
    let (index, manifest) = (r#"{"manifests": []}"#, r#"{"config": {"digest": "d"}}"#);
    for (text, content_type, fits) in [
        (
            index,
            "application/vnd.oci.image.index.v1+json; charset=utf-8",
            true,
        ),
        (index, "application/vnd.oci.image.manifest.v1+json", false),
        (index, "text/plain", true),
        (
            manifest,
            "application/vnd.docker.distribution.manifest.v2+json",
            true,
        ),
        (
            manifest,
            "application/vnd.docker.distribution.manifest.list.v2+json",
            false,
        ),
    ] {
        let parsed = Document::parse(text.as_bytes(), Some(content_type));
        assert_eq!(parsed.is_ok(), fits, "{text} {content_type}");
    }
}

#[test]
fn deep_nesting_and_repeated_keys_are_malformed() {
    let nested = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    // Such an entry is not a descriptor and is skipped.
    let entry = parse(&format!("{{\"manifests\": [{nested}]}}")).unwrap();
    assert_eq!(entry, Document::Index(Index::default()));
    let deep = format!("{{\"mediaType\": {nested}}}");
    for text in [
        deep.as_str(),
        r#"{"manifests": [], "manifests": []}"#,
        "[]",
        "null",
        "",
    ] {
        assert!(
            matches!(parse(text), Err(DocumentError::Malformed(_))),
            "{text:.40}"
        );
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Document::parse(&bytes, None);
        let _ = ImageConfig::parse(&bytes);
    }

    #[test]
    fn any_json_is_read_or_refused(text in r#"[{}\[\]":,a-z0-9]{0,60}"#) {
        let _ = parse(&format!(r#"{{"manifests": {text}}}"#));
        let _ = parse(&format!(r#"{{"config": {text}}}"#));
    }
}

#[test]
fn errors_do_not_carry_the_document_along() {
    let long = "A".repeat(100_000);
    for text in [
        format!("{{\"manifests\": \"{long}\"}}"),
        format!("{{\"config\": \"{long}\"}}"),
        format!("{{\"{long}\""),
    ] {
        let error = parse(&text).unwrap_err();
        assert!(format!("{error} {error:?}").len() < 300);
    }
}

/// `buildah manifest add --artifact` gives the entry a platform and an `artifactType`.
#[test]
fn an_entry_of_an_artifact_is_no_platform() {
    let entry = |digest: &str, artifact_type: Value| {
        json!({"mediaType": media_type::OCI_MANIFEST, "size": 2, "digest": digest,
            "artifactType": artifact_type, "platform": {"os": "linux", "architecture": digest}})
    };
    let manifests = json!([
        entry("amd64", Value::Null),
        entry("arm64", json!("application/vnd.example.sbom")),
        entry("s390x", json!("")),
        entry("ppc64le", json!(media_type::OCI_CONFIG)),
    ]);
    let text = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    let Document::Index(index) = parse(&text).unwrap() else {
        panic!("it is an index");
    };
    let platforms: Vec<_> = index.platforms.iter().map(ToString::to_string).collect();
    assert_eq!(platforms, ["linux/amd64", "linux/ppc64le", "linux/s390x"]);
    assert!(index.without_platform.is_empty());
    let images = Artifact::parse(text.as_bytes()).unwrap().images;
    assert_eq!(images.len(), 3);
    let referrers = Referrers::parse(text.as_bytes()).unwrap();
    assert_eq!(referrers.0[1].artifact_type, "application/vnd.example.sbom");
}
