//! Content-addressed parts of images.
#![allow(
    clippy::indexing_slicing,
    reason = "assigning to a key of a JSON object makes it"
)]

use std::fmt::Write as _;

use bytes::Bytes;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::elf;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
pub(crate) const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";

/// A document or layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its media type.
    pub media_type: String,
    /// `sha256:…` of the bytes.
    pub digest: String,
    /// Its content.
    pub bytes: Bytes,
}

/// An image: a root document and everything that it refers to.
#[derive(Clone, Debug)]
pub struct Image {
    /// The document that its tag points at.
    pub root: Blob,
    /// Further indexes and manifests.
    pub manifests: Vec<Blob>,
    /// Configs and layers.
    pub blobs: Vec<Blob>,
}

impl Blob {
    pub(crate) fn new(media_type: &str, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let mut digest = String::from("sha256:");
        for byte in Sha256::digest(&bytes) {
            let _ = write!(digest, "{byte:02x}");
        }
        Self {
            media_type: media_type.to_owned(),
            digest,
            bytes,
        }
    }

    /// `serde_json` sorts keys, so the bytes are always the same.
    pub fn json(media_type: &str, value: &Value) -> Self {
        Self::new(media_type, value.to_string())
    }

    pub(crate) fn descriptor(&self) -> Value {
        json!({ "mediaType": self.media_type, "digest": self.digest, "size": self.bytes.len() })
    }
}

/// Media types of one family of documents.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    pub(crate) index: &'static str,
    pub(crate) manifest: &'static str,
    pub(crate) config: &'static str,
    pub(crate) layer: &'static str,
}

pub(crate) const OCI: Family = Family {
    index: OCI_INDEX,
    manifest: OCI_MANIFEST,
    config: OCI_CONFIG,
    layer: OCI_LAYER,
};
pub(crate) const DOCKER: Family = Family {
    index: DOCKER_LIST,
    manifest: DOCKER_MANIFEST,
    config: DOCKER_CONFIG,
    layer: DOCKER_LAYER,
};

impl Image {
    /// An image of one platform (`linux/arm/v7`) whose only file `/app` waits forever.
    pub(crate) fn single(family: Family, platform: &str) -> Self {
        let (_, architecture, _) = split(platform);
        Self::with_program(family, platform, architecture)
    }

    /// The same with a program for another architecture.
    pub(crate) fn with_program(family: Family, platform: &str, program: &str) -> Self {
        let (os, architecture, variant) = split(platform);
        let layer = Blob::new(family.layer, elf::layer(program));
        let mut config = json!({
            "architecture": architecture,
            "os": os,
            "config": { "Entrypoint": ["/app"] },
            "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
            "history": [{ "created_by": "testimg" }],
        });
        if !variant.is_empty() {
            config["variant"] = json!(variant);
        }
        Self::with_config(family, Blob::json(family.config, &config), vec![layer])
    }

    /// An image with an arbitrary config.
    pub(crate) fn with_config(family: Family, config: Blob, layers: Vec<Blob>) -> Self {
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": family.manifest,
            "config": config.descriptor(),
            "layers": layers.iter().map(Blob::descriptor).collect::<Vec<_>>(),
        });
        let mut blobs = layers;
        blobs.push(config);
        Self {
            root: Blob::json(family.manifest, &manifest),
            manifests: Vec::new(),
            blobs,
        }
    }

    /// An artifact of one layer.
    pub fn artifact(artifact_type: &str, media_type: &str, content: &str) -> Self {
        let layer = Blob::new(media_type, content.as_bytes().to_vec());
        let config = Blob::new("application/vnd.oci.empty.v1+json", b"{}".to_vec());
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": artifact_type,
            "config": config.descriptor(),
            "layers": [layer.descriptor()],
        });
        Self {
            root: Blob::json(OCI_MANIFEST, &manifest),
            manifests: Vec::new(),
            blobs: vec![layer, config],
        }
    }

    /// An artifact with one layer more.
    #[must_use]
    pub fn with_layer(mut self, media_type: &str, content: &str) -> Self {
        let layer = Blob::new(media_type, content.as_bytes().to_vec());
        let mut manifest: Value = serde_json::from_slice(&self.root.bytes).unwrap_or_default();
        if let Some(layers) = manifest["layers"].as_array_mut() {
            layers.push(layer.descriptor());
        }
        self.root = Blob::json(OCI_MANIFEST, &manifest);
        self.blobs.push(layer);
        self
    }

    /// An artifact that is attached to a manifest.
    #[must_use]
    pub fn attached_to(mut self, subject: &Blob, created: &str) -> Self {
        let mut manifest: Value = serde_json::from_slice(&self.root.bytes).unwrap_or_default();
        manifest["subject"] = subject.descriptor();
        manifest["annotations"] = json!({"org.opencontainers.image.created": created});
        self.root = Blob::json(OCI_MANIFEST, &manifest);
        self
    }

    /// With its type as that of its config, as artifacts are in the image specification 1.0.
    #[must_use]
    pub fn typed_by_config(mut self) -> Self {
        let mut manifest: Value = serde_json::from_slice(&self.root.bytes).unwrap_or_default();
        manifest["config"]["mediaType"] = manifest["artifactType"].take();
        self.root = Blob::json(OCI_MANIFEST, &manifest);
        self
    }

    /// The index of what is attached to a manifest, as registries answer it and clients push it
    /// under a tag.
    pub fn referrers(attached: &[&Self]) -> Blob {
        let entry = |image: &&Self| {
            let manifest: Value = serde_json::from_slice(&image.root.bytes).unwrap_or_default();
            let mut entry = image.root.descriptor();
            entry["artifactType"] = match &manifest["artifactType"] {
                Value::Null => manifest["config"]["mediaType"].clone(),
                own => own.clone(),
            };
            entry["annotations"] = manifest["annotations"].clone();
            entry
        };
        let entries: Vec<_> = attached.iter().map(entry).collect();
        Blob::json(
            OCI_INDEX,
            &json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}),
        )
    }

    /// An index of images; `entry` makes each entry from the child's descriptor.
    pub(crate) fn index(family: Family, children: Vec<(Self, Value)>) -> Self {
        let mut entries = Vec::new();
        let (mut manifests, mut blobs) = (Vec::new(), Vec::new());
        for (child, extra) in children {
            let mut entry = child.root.descriptor();
            if let (Some(entry), Some(extra)) = (entry.as_object_mut(), extra.as_object()) {
                entry.extend(extra.clone());
            }
            entries.push(entry);
            manifests.extend(child.manifests);
            manifests.push(child.root);
            blobs.extend(child.blobs);
        }
        blobs.sort_by(|a, b| a.digest.cmp(&b.digest));
        blobs.dedup();
        let index = json!({ "schemaVersion": 2, "mediaType": family.index, "manifests": entries });
        Self {
            root: Blob::json(family.index, &index),
            manifests,
            blobs,
        }
    }

    /// A typical multi-platform image.
    pub(crate) fn multi(family: Family, platforms: &[&str]) -> Self {
        let child = |platform: &&str| (Self::single(family, platform), platform_of(platform));
        Self::index(family, platforms.iter().map(child).collect())
    }
}

/// The `platform` of an index entry.
pub(crate) fn platform_of(platform: &str) -> Value {
    let (os, architecture, variant) = split(platform);
    let mut value = json!({ "os": os, "architecture": architecture });
    if !variant.is_empty() {
        value["variant"] = json!(variant);
    }
    json!({ "platform": value })
}

fn split(platform: &str) -> (&str, &str, &str) {
    let mut parts = platform.split('/');
    let mut next = || parts.next().unwrap_or_default();
    (next(), next(), next())
}
