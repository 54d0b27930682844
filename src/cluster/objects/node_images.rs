//! The images that a node holds, as its kubelet reports them: at most 50 by default
//! (`nodeStatusMaxImages`), the largest first.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
};

use serde::{Deserialize, Deserializer, de};

/// Maximum number of image names that are kept per node: several times as many as a kubelet reports
/// by default.
const MAX_NAMES: usize = 1024;

/// The hash of an image name. It saves memory: thousands of nodes report the same long names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageKey(u64);

impl ImageKey {
    /// `name`: normalised, like `docker.io/library/nginx:latest` or
    /// `registry.example/app@sha256:…`, as containerd names images.
    pub fn from_name(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// `status.images`: which images a node holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeImages(Box<[ImageKey]>);

impl NodeImages {
    /// Whether the node holds an image.
    pub fn contains(&self, image: ImageKey) -> bool {
        self.0.binary_search(&image).is_ok()
    }
}

/// `status.images[]`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ContainerImage {
    names: Option<Vec<ImageKey>>,
}

impl<'de> Deserialize<'de> for NodeImages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let images = Option::<Vec<ContainerImage>>::deserialize(deserializer)?;
        let names = images.into_iter().flatten().filter_map(|image| image.names);
        let mut names: Vec<ImageKey> = names.flatten().take(MAX_NAMES).collect();
        names.sort_unstable();
        names.dedup();
        Ok(Self(names.into()))
    }
}

impl<'de> Deserialize<'de> for ImageKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl de::Visitor<'_> for NameVisitor {
    type Value = ImageKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of an image")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<ImageKey, E> {
        Ok(ImageKey::from_name(name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Node;
    use super::*;

    #[test]
    fn a_node_is_asked_for_images_by_name() {
        let node = |images: serde_json::Value| -> NodeImages {
            let node: Node = serde_json::from_value(json!({"status": {"images": images}})).unwrap();
            node.status.images
        };
        let held = node(json!([
            {"names": ["r.example/a@sha256:00", "r.example/a:1"], "sizeBytes": 5},
            {"names": null},
            {"sizeBytes": 1},
        ]));
        for (name, expected) in [
            ("r.example/a:1", true),
            ("r.example/a@sha256:00", true),
            ("r.example/a:2", false),
            ("a:1", false),
        ] {
            assert_eq!(held.contains(ImageKey::from_name(name)), expected, "{name}");
        }
        assert_eq!(node(json!(null)), NodeImages::default());
        let many: Vec<_> = (0..2000)
            .map(|n| json!({"names": [n.to_string()]}))
            .collect();
        assert_eq!(node(json!(many)).0.len(), MAX_NAMES);
    }
}
