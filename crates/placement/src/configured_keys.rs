//! The keys by which archaware recognises its own taints and tolerations.
//!
//! Annotations record archaware's additions, but other writers can forge them: a kubelet may change
//! the annotations of its node though not its taints (the admission plugin `NodeRestriction`). So
//! archaware trusts a record only for keys that it is or was configured with, and for values that
//! are architectures.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use archaware_platform::Architecture;

use super::{Taint, taint::text, variants::architecture_of};

/// Keys that archaware is or was configured with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfiguredKeys {
    /// The keys of taints (`taint.key`), and of the tolerations for these taints.
    pub taints: BTreeSet<String>,
    /// The keys of additional tolerations (`tolerations`).
    pub tolerations: BTreeSet<String>,
}

impl ConfiguredKeys {
    /// Adds keys of another configuration.
    pub fn extend(&mut self, other: &Self) {
        self.taints.extend(other.taints.iter().cloned());
        self.tolerations.extend(other.tolerations.iter().cloned());
    }

    /// Whether a taint of a node with this architecture can be archaware's.
    pub fn can_own_taint(&self, taint: &Taint, node: &str) -> bool {
        names_architecture(taint, node) && self.taints.contains(&taint.kind.key)
    }

    /// Whether a toleration, in the API's form, can be archaware's.
    pub fn can_own_toleration(&self, toleration: &Value) -> bool {
        let key = text(toleration, "key");
        // An image may name any architecture, so an unknown name is accepted.
        let names_architecture = text(toleration, "value").parse::<Architecture>().is_ok();
        let of_taint = names_architecture || text(toleration, "operator") == "Exists";
        (of_taint && self.taints.contains(key)) || self.tolerations.contains(key)
    }
}

/// Whether the value of a taint is a known architecture, or the architecture of its node.
pub(super) fn names_architecture(taint: &Taint, node: &str) -> bool {
    architecture_of(&taint.value).is_some_and(|named| {
        named.is_known() || node.parse::<Architecture>().is_ok_and(|node| node == named)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_configured_keys_and_architectures_are_believed() {
        let mut keys = ConfiguredKeys::default();
        keys.extend(&ConfiguredKeys {
            taints: ["a/b".to_owned()].into(),
            tolerations: ["pool".to_owned()].into(),
        });
        for (taint, node, expected) in [
            ("a/b=arm64:NoSchedule", "", true),
            ("a/b=new64:NoExecute", "new64", true),
            ("a/b=amd64-v3:NoExecute", "amd64", true),
            ("a/b=amd64-v9:NoExecute", "amd64", false),
            ("a/b=new64:NoSchedule", "arm64", false),
            ("a/b=secure:NoSchedule", "arm64", false),
            ("dedicated=secure:NoSchedule", "arm64", false),
            ("dedicated=arm64:NoSchedule", "arm64", false),
            ("pool=arm64:NoSchedule", "arm64", false),
        ] {
            let found = keys.can_own_taint(&taint.parse().unwrap(), node);
            assert_eq!(found, expected, "{taint}");
        }
        for (toleration, expected) in [
            (json!({"key": "a/b", "operator": "Exists"}), true),
            (
                json!({"key": "a/b", "operator": "Equal", "value": "arm64"}),
                true,
            ),
            (
                json!({"key": "a/b", "operator": "Equal", "value": ""}),
                false,
            ),
            (
                json!({"key": "pool", "operator": "Equal", "value": "x"}),
                true,
            ),
            (json!({"key": "gpu", "operator": "Exists"}), false),
            (json!({"operator": "Exists"}), false),
            (json!("nonsense"), false),
        ] {
            assert_eq!(
                keys.can_own_toleration(&toleration),
                expected,
                "{toleration}"
            );
        }
    }
}
