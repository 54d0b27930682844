//! NFD's `NodeFeature`.

use std::borrow::Cow;

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;
use serde::Deserialize;

use crate::cluster::objects::stored;

use super::compatibility::NodeFeatures;

/// A `NodeFeature` of Node Feature Discovery (`nfd.k8s-sigs.io/v1alpha1`): the features of a node.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct NodeFeature {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
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
