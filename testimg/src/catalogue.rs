//! A named image of every kind that archaware must understand.

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::blob::{Blob, DOCKER, Image, OCI, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST, platform_of};

/// The expected result of resolving an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// These platforms, sorted.
    Platforms(&'static [&'static str]),
    /// No platforms, for this reason.
    Note(&'static str),
    /// A failure with this reason.
    Error(&'static str),
}

use Expected::{Error, Note, Platforms};

/// Name, image and expected result.
type Entry = (&'static str, Image, Expected);

/// The image called `name`.
///
/// # Panics
/// When there is none.
#[allow(clippy::panic, reason = "a test that names no image cannot go on")]
pub fn find(name: &str) -> Image {
    let found = catalogue().iter().find(|(entry, ..)| *entry == name);
    found.map_or_else(
        || panic!("no test image is called {name}"),
        |(_, image, _)| image.clone(),
    )
}

/// One of any number of different images: an index of a few platforms with its number in an
/// annotation.
#[allow(
    clippy::indexing_slicing,
    reason = "assigning to a key of a JSON object makes it"
)]
pub fn numbered(number: usize) -> Image {
    // Created once, because some callers need thousands.
    static KINDS: LazyLock<[Image; 3]> =
        LazyLock::new(|| ["multi", "amd64-arm64", "docker-list"].map(find));
    let mut image = KINDS[number % 3].clone();
    let mut document: Value = serde_json::from_slice(&image.root.bytes).unwrap_or_default();
    document["annotations"] = json!({ "number": number.to_string() });
    image.root = Blob::json(&image.root.media_type, &document);
    image
}

/// An index of this many manifests without platform, each padded to this many bytes.
pub fn swollen(number: usize, size: usize) -> Image {
    let children: Vec<Image> = (0..number)
        .map(|number| {
            let mut child = Image::single(OCI, "linux/amd64");
            let mut bytes = child.root.bytes.to_vec();
            bytes.resize(size + number, b' ');
            child.root = Blob::new(OCI_MANIFEST, bytes);
            child
        })
        .collect();
    let manifests: Vec<Value> = children
        .iter()
        .map(|child| child.root.descriptor())
        .collect();
    let index = json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests });
    Image {
        root: Blob::json(OCI_INDEX, &index),
        manifests: children.iter().map(|child| child.root.clone()).collect(),
        blobs: children.into_iter().flat_map(|child| child.blobs).collect(),
    }
}

/// All images.
pub fn catalogue() -> &'static [Entry] {
    // Created once, because the large indexes take half a second in a debug build.
    static CATALOGUE: LazyLock<Vec<Entry>> = LazyLock::new(|| {
        let mut all = ordinary();
        all.extend(odd_indexes());
        all.extend(odd_manifests());
        all
    });
    &CATALOGUE
}

fn ordinary() -> Vec<Entry> {
    let single = |platform| Image::single(OCI, platform);
    vec![
        ("amd64", single("linux/amd64"), Platforms(&["linux/amd64"])),
        ("arm64", single("linux/arm64"), Platforms(&["linux/arm64"])),
        ("s390x", single("linux/s390x"), Platforms(&["linux/s390x"])),
        ("386", single("linux/386"), Platforms(&["linux/386"])),
        ("wasi", single("wasi/wasm"), Platforms(&["wasi/wasm"])),
        (
            "armv7",
            single("linux/arm/v7"),
            Platforms(&["linux/arm/v7"]),
        ),
        (
            "docker-amd64",
            Image::single(DOCKER, "linux/amd64"),
            Platforms(&["linux/amd64"]),
        ),
        (
            "multi",
            Image::multi(OCI, &["linux/amd64", "linux/arm64", "linux/s390x"]),
            Platforms(&["linux/amd64", "linux/arm64", "linux/s390x"]),
        ),
        (
            "amd64-arm64",
            Image::multi(OCI, &["linux/amd64", "linux/arm64"]),
            Platforms(&["linux/amd64", "linux/arm64"]),
        ),
        (
            "arm64-s390x",
            Image::multi(OCI, &["linux/arm64", "linux/s390x"]),
            Platforms(&["linux/arm64", "linux/s390x"]),
        ),
        (
            "docker-list",
            Image::multi(DOCKER, &["linux/amd64", "linux/arm64/v8"]),
            Platforms(&["linux/amd64", "linux/arm64"]),
        ),
        (
            "index-only-arm64",
            Image::multi(OCI, &["linux/arm64"]),
            Platforms(&["linux/arm64"]),
        ),
        (
            "windows",
            Image::multi(OCI, &["linux/amd64", "windows/arm64"]),
            Platforms(&["linux/amd64", "windows/arm64"]),
        ),
        (
            "windows-only",
            Image::multi(OCI, &["windows/amd64"]),
            Platforms(&["windows/amd64"]),
        ),
        (
            "amd64-v3",
            single("linux/amd64/v3"),
            Platforms(&["linux/amd64/v3"]),
        ),
        (
            "amd64-and-v3",
            Image::multi(OCI, &["linux/amd64", "linux/amd64/v3"]),
            Platforms(&["linux/amd64", "linux/amd64/v3"]),
        ),
        (
            "amd64-v3-arm64",
            Image::multi(OCI, &["linux/amd64/v3", "linux/arm64"]),
            Platforms(&["linux/amd64/v3", "linux/arm64"]),
        ),
        (
            "amd64-levels",
            Image::multi(OCI, &["linux/amd64/v2", "linux/amd64/v3", "linux/amd64/v4"]),
            Platforms(&["linux/amd64/v2", "linux/amd64/v3", "linux/amd64/v4"]),
        ),
        // Its program is for another architecture than it says.
        (
            "mislabelled",
            Image::with_program(OCI, "linux/amd64", "arm64"),
            Platforms(&["linux/amd64"]),
        ),
        (
            "spelling",
            Image::single(OCI, "linux/x86_64"),
            Platforms(&["linux/amd64"]),
        ),
    ]
}

fn attestation(extra: Value) -> (Image, Value) {
    (Image::single(OCI, "unknown/unknown"), extra)
}

#[allow(clippy::too_many_lines, reason = "a table")]
fn odd_indexes() -> Vec<Entry> {
    let single = |platform| Image::single(OCI, platform);
    let named = |platform: &str| (Image::single(OCI, platform), platform_of(platform));
    let by_type = json!({ "annotations": {
        "vnd.docker.reference.type": "attestation-manifest",
        "vnd.docker.reference.digest": "sha256:0",
    }, "platform": { "os": "linux", "architecture": "arm64" } });
    let by_digest_only = json!({
        "annotations": { "vnd.docker.reference.digest": "sha256:0" },
        "platform": { "os": "linux", "architecture": "s390x" },
    });
    let nested = |image| Image::index(OCI, vec![(image, json!({}))]);
    let mut gone = Image::index(
        OCI,
        vec![named("linux/amd64"), (single("linux/arm64"), json!({}))],
    );
    gone.manifests.clear();
    let mut all_gone = Image::index(OCI, vec![(single("linux/arm64"), json!({}))]);
    all_gone.manifests.clear();
    let mut lying = Image::index(OCI, vec![(single("linux/amd64"), json!({ "size": 7 }))]);
    lying.blobs.clear();
    let many: Vec<Value> = (0..5000)
        .map(|n| {
            let architecture = if n % 2 == 0 { "amd64" } else { "arm64" };
            json!({ "mediaType": OCI_MANIFEST, "size": 2, "digest": format!("sha256:{n:064x}"),
                "platform": { "os": "linux", "architecture": architecture } })
        })
        .collect();
    let bare = |value: Value| Image {
        root: Blob::json(OCI_INDEX, &value),
        manifests: Vec::new(),
        blobs: Vec::new(),
    };
    vec![
        (
            "attested",
            Image::index(
                OCI,
                vec![
                    named("linux/amd64"),
                    attestation(platform_of("unknown/unknown")),
                    (Image::single(OCI, "linux/arm64"), by_type),
                ],
            ),
            Platforms(&["linux/amd64"]),
        ),
        (
            "digest-annotation",
            Image::index(
                OCI,
                vec![
                    named("linux/amd64"),
                    (single("linux/s390x"), by_digest_only),
                ],
            ),
            Platforms(&["linux/amd64", "linux/s390x"]),
        ),
        (
            "only-attestations",
            Image::index(OCI, vec![attestation(platform_of("unknown/unknown"))]),
            Note("NoArchitecture"),
        ),
        (
            "unnamed",
            Image::index(
                OCI,
                vec![
                    (single("linux/amd64"), json!({})),
                    (single("linux/arm64"), json!({ "platform": {} })),
                    (
                        single("linux/s390x"),
                        json!({ "platform": { "os": "linux" } }),
                    ),
                ],
            ),
            Platforms(&["linux/amd64", "linux/arm64", "linux/s390x"]),
        ),
        (
            "index-wins",
            Image::index(
                OCI,
                vec![(single("linux/amd64"), platform_of("linux/arm64"))],
            ),
            Platforms(&["linux/arm64"]),
        ),
        (
            "nested",
            nested(Image::multi(OCI, &["linux/amd64", "linux/arm64"])),
            Platforms(&["linux/amd64", "linux/arm64"]),
        ),
        (
            "nested-4",
            nested(nested(nested(Image::multi(OCI, &["linux/arm64"])))),
            Platforms(&["linux/arm64"]),
        ),
        (
            "nested-5",
            nested(nested(nested(nested(Image::multi(OCI, &["linux/arm64"]))))),
            Error("Unsupported"),
        ),
        ("child-gone", gone, Platforms(&["linux/amd64"])),
        ("children-gone", all_gone, Error("NotFound")),
        ("child-size-lies", lying, Error("Corrupt")),
        (
            "empty-index",
            bare(json!({ "schemaVersion": 2, "manifests": [] })),
            Note("NoArchitecture"),
        ),
        (
            "entries-5000",
            bare(json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": many })),
            Platforms(&["linux/amd64", "linux/arm64"]),
        ),
        (
            "unnamed-257",
            bare(
                json!({ "schemaVersion": 2, "manifests": (0..257).map(|n| json!({
                "mediaType": OCI_MANIFEST, "digest": format!("sha256:{n:064x}") })).collect::<Vec<_>>() }),
            ),
            Error("Unsupported"),
        ),
        (
            "hybrid",
            bare(
                json!({ "schemaVersion": 2, "manifests": [], "config": { "digest": "sha256:0" } }),
            ),
            Error("Corrupt"),
        ),
        (
            "index-called-manifest",
            bare(json!({ "schemaVersion": 2, "mediaType": OCI_MANIFEST, "manifests": [] })),
            Error("Corrupt"),
        ),
        (
            "foreign-digest",
            bare(json!({ "schemaVersion": 2, "manifests": [
                { "mediaType": OCI_MANIFEST, "digest": format!("blake3:{:064x}", 1) }] })),
            Error("Unsupported"),
        ),
        ("too-large", large_index(), Error("TooLarge")),
    ]
}

/// A little over 4 MiB of well-formed index.
fn large_index() -> Image {
    let padding = "x".repeat(4 * 1024 * 1024);
    let index =
        json!({ "schemaVersion": 2, "manifests": [], "annotations": { "padding": padding } });
    Image {
        root: Blob::json(OCI_INDEX, &index),
        manifests: Vec::new(),
        blobs: Vec::new(),
    }
}

fn odd_manifests() -> Vec<Entry> {
    let config = |value: Value| Image::with_config(OCI, Blob::json(OCI_CONFIG, &value), Vec::new());
    let typed = |config: Blob| Image::with_config(OCI, config, Vec::new());
    let artifact =
        |media_type: &str| Image::with_config(OCI, Blob::json(media_type, &json!({})), Vec::new());
    let manifest = |media_type: &str, value: Value| Image {
        root: Blob::json(media_type, &value),
        manifests: Vec::new(),
        blobs: Vec::new(),
    };
    let text = |bytes: &'static str| Image {
        root: Blob::new(OCI_MANIFEST, bytes),
        manifests: Vec::new(),
        blobs: Vec::new(),
    };
    let mut without_config = Image::single(OCI, "linux/amd64");
    without_config.blobs.clear();
    let untyped = Image::single(OCI, "linux/arm64");
    let untyped_config = untyped
        .blobs
        .iter()
        .find(|blob| blob.media_type == OCI_CONFIG)
        .cloned();
    let untyped = untyped_config.map(|config| Image {
        root: Blob::json(
            "application/json",
            &json!({ "schemaVersion": 2, "layers": [],
                "config": { "digest": config.digest, "size": config.bytes.len() } }),
        ),
        manifests: Vec::new(),
        blobs: vec![config],
    });
    let mut all = vec![
        (
            "helm",
            artifact("application/vnd.cncf.helm.config.v1+json"),
            Note("NotAnImage"),
        ),
        (
            "wasm",
            artifact("application/vnd.wasm.config.v0+json"),
            Note("NotAnImage"),
        ),
        (
            "empty-config",
            artifact("application/vnd.oci.empty.v1+json"),
            Note("NotAnImage"),
        ),
        (
            "no-architecture",
            config(json!({ "os": "linux" })),
            Note("NoArchitecture"),
        ),
        (
            "no-os",
            config(json!({ "architecture": "arm64" })),
            Platforms(&["*/arm64"]),
        ),
        (
            "octet-stream",
            typed(Blob::new("application/octet-stream", "\u{7f}ELF")),
            Note("NotAnImage"),
        ),
        (
            "octet-stream-config",
            typed(Blob::json(
                "application/octet-stream",
                &json!({ "architecture": "arm64", "os": "linux" }),
            )),
            Platforms(&["linux/arm64"]),
        ),
        (
            "config-is-no-json",
            typed(Blob::new(OCI_CONFIG, "\u{7f}ELF")),
            Error("Corrupt"),
        ),
        ("config-gone", without_config, Error("NotFound")),
        (
            "schema1",
            manifest(
                "application/vnd.docker.distribution.manifest.v1+prettyjws",
                json!({ "schemaVersion": 1, "architecture": "amd64", "fsLayers": [] }),
            ),
            Error("Unsupported"),
        ),
        (
            "html",
            text("<!DOCTYPE html><html><body>Sign in</body></html>"),
            Error("Corrupt"),
        ),
        (
            "not-a-manifest",
            text("{\"schemaVersion\": 2}"),
            Error("Corrupt"),
        ),
        ("garbage", text("\u{0}\u{1}\u{2}"), Error("Corrupt")),
    ];
    all.extend(untyped.map(|image| ("untyped", image, Platforms(&["linux/arm64"]))));
    all
}
