//! NFD's `NodeFeature`.

use std::borrow::Cow;

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;
use serde::{Deserialize, Deserializer};

use crate::{bounded::Budget, cluster::objects::stored};

use super::compatibility::NodeFeatures;

/// Maximum number of elements, and bytes of text, of an object. NFD finds some ten thousand
/// elements, most of them options of the kernel.
const MAX_ELEMENTS: usize = 64 * 1024;
const MAX_TEXT: usize = 2 << 20;

/// A `NodeFeature` of Node Feature Discovery (`nfd.k8s-sigs.io/v1alpha1`): the features of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NodeFeature {
    /// The metadata that archaware reads.
    pub metadata: ObjectMeta,
    /// The features that NFD found.
    pub spec: NodeFeatureSpec,
}

/// A `NodeFeature`'s spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct NodeFeatureSpec {
    /// Features by their names.
    pub features: NodeFeatures,
}

impl<'de> Deserialize<'de> for NodeFeature {
    /// An object that exceeds the limits is read without its features.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize, Default)]
        #[serde(default)]
        struct StoredNodeFeature {
            #[serde(deserialize_with = "stored::metadata")]
            metadata: ObjectMeta,
            spec: NodeFeatureSpec,
        }
        let budget = Budget::new(MAX_ELEMENTS, MAX_TEXT);
        let stored: StoredNodeFeature = budget.parse(deserializer)?;
        let is_whole = !budget.is_exceeded();
        Ok(Self {
            metadata: stored.metadata,
            spec: if is_whole {
                stored.spec
            } else {
                NodeFeatureSpec::default()
            },
        })
    }
}

impl Resource for NodeFeature {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "NodeFeature".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "nfd.k8s-sigs.io".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1alpha1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodefeatures".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use testsupport::mutated;

    use super::*;

    #[test]
    fn an_object_with_too_many_features_has_none() {
        let object = |count: usize| -> NodeFeature {
            let flags = (0..count).map(|flag| (format!("f{flag}"), json!({})));
            let flags: serde_json::Map<_, _> = flags.collect();
            let features = json!({"flags": {"cpu.cpuid": {"elements": flags}}});
            let object = json!({"metadata": {"name": "n"}, "spec": {"features": features}});
            serde_json::from_value(object).unwrap()
        };
        assert_ne!(object(10_000).spec, NodeFeatureSpec::default());
        let large = object(MAX_ELEMENTS);
        assert_eq!(large.spec, NodeFeatureSpec::default());
        assert_eq!(large.metadata.name.as_deref(), Some("n"));
    }

    proptest! {
        #[test]
        fn any_object_is_read_or_refused(object in mutated(json!({
            "metadata": {"name": "n", "labels": {"nfd.node.kubernetes.io/node-name": "n"}},
            "spec": {"features": {
                "flags": {"cpu.cpuid": {"elements": {"AVX2": {}, "SVE": {}}}},
                "attributes": {"cpu.model": {"elements": {"family": "6"}}},
                "instances": {"pci.device": {"elements": [{"attributes": {"class": "0300"}}]}},
            }},
        }))) {
            let from_text = serde_json::from_str::<NodeFeature>(&object.to_string()).ok();
            let from_value = serde_json::from_value::<NodeFeature>(object).ok();
            prop_assert_eq!(&from_text, &from_value);
            if let Some(object) = from_text {
                let mut merged = NodeFeatures::default();
                merged.merge(&object.spec.features);
                prop_assert_eq!(&merged, &object.spec.features);
            }
        }
    }
}
