//! Names of namespaced and cluster-scoped objects, written `namespace/name`.

use std::fmt;

use kube::{Resource, ResourceExt};

/// The name of an object and its namespace, if its kind has one; written as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespacedName {
    /// `None` for kinds without namespaces.
    pub namespace: Option<String>,
    pub name: String,
}

impl NamespacedName {
    /// An object in a namespace.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: Some(namespace.to_owned()),
            name: name.to_owned(),
        }
    }

    /// An object of a kind without namespaces.
    pub fn cluster(name: &str) -> Self {
        Self {
            namespace: None,
            name: name.to_owned(),
        }
    }

    pub fn of_object<K: Resource>(object: &K) -> Self {
        Self {
            namespace: object.namespace(),
            name: object.name_any(),
        }
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.name)
    }
}
