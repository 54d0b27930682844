//! Taints and tolerations, and the API's rule for which toleration matches which taint.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Effect of archaware's taint. `PreferNoSchedule` is not offered because it keeps no pod away.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
)]
pub enum Effect {
    /// Pods that do not tolerate the taint are not scheduled to the node.
    NoSchedule,
    /// Pods that do not tolerate the taint are also evicted from the node.
    NoExecute,
}

impl Effect {
    /// The spelling of the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The default key of the taint. Managed clusters use it on their Arm nodes, so existing manifests
/// keep working.
pub const TAINT_KEY: &str = "kubernetes.io/arch";

/// Key and effect of archaware's taint. A toleration with both and the operator `Exists` matches
/// every value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TaintKind {
    /// Key of the taint.
    pub key: String,
    /// Effect of the taint.
    pub effect: Effect,
}

impl Default for TaintKind {
    fn default() -> Self {
        Self {
            key: TAINT_KEY.to_owned(),
            effect: Effect::NoSchedule,
        }
    }
}

/// A taint with an architecture as its value, or an architecture and a variant: `amd64-v3`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Taint {
    /// Key and effect.
    pub kind: TaintKind,
    /// The architecture, with the variant if the variant is part of the taint.
    pub value: String,
}

/// Text that is not `key=value:effect`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a taint like key=value:NoSchedule")]
pub struct MalformedTaint(String);

impl TaintKind {
    /// The taint of this value.
    pub fn taint(&self, value: impl Into<String>) -> Taint {
        Taint {
            kind: self.clone(),
            value: value.into(),
        }
    }

    /// Whether a taint, in the API's form, has this key and effect.
    pub fn is_of(&self, taint: &Value) -> bool {
        text(taint, "key") == self.key && text(taint, "effect") == self.effect.as_str()
    }

    /// The toleration for every architecture and for no other taint.
    pub fn toleration_of_all(&self) -> Value {
        json!({ "key": self.key, "operator": "Exists", "effect": self.effect.as_str() })
    }

    /// Whether a toleration, in the API's form, matches every value of this taint.
    pub fn is_tolerated_by(&self, toleration: &Value) -> bool {
        text(toleration, "operator") == "Exists" && self.is_named_by(toleration)
    }

    /// Compares key and effect.
    fn is_named_by(&self, toleration: &Value) -> bool {
        names(toleration, &self.key, self.effect.as_str())
    }
}

/// Compares key and effect as `Toleration.ToleratesTaint` does: an empty field of the toleration
/// matches every value.
fn names(toleration: &Value, key: &str, effect: &str) -> bool {
    let matches = |field: &str, value: &str| {
        let named = text(toleration, field);
        named.is_empty() || named == value
    };
    matches("key", key) && matches("effect", effect)
}

/// Whether a toleration, in the API's form, matches a taint: `Toleration.ToleratesTaint` of
/// `k8s.io/api/core/v1`. Its numeric operators never match an architecture.
pub fn tolerates(toleration: &Value, taint: &Taint) -> bool {
    let Taint { kind, value } = taint;
    tolerates_parts(toleration, &kind.key, value, kind.effect.as_str())
}

fn tolerates_parts(toleration: &Value, key: &str, value: &str, effect: &str) -> bool {
    names(toleration, key, effect)
        && match text(toleration, "operator") {
            "" | "Equal" => text(toleration, "value") == value,
            "Exists" => true,
            _ => false,
        }
}

/// Whether a taint, in the API's form, keeps a pod with these tolerations from being scheduled to
/// the node. Tolerations with numeric operators (`Gt`, `Lt`) are ignored.
pub fn keeps_away<'a>(taint: &Value, tolerations: impl IntoIterator<Item = &'a Value>) -> bool {
    let [key, value, effect] = ["key", "value", "effect"].map(|field| text(taint, field));
    let mut all = tolerations.into_iter();
    is_hard(taint) && !all.any(|toleration| tolerates_parts(toleration, key, value, effect))
}

/// Whether a taint, in the API's form, keeps pods away. `PreferNoSchedule` does not.
pub fn is_hard(taint: &Value) -> bool {
    matches!(text(taint, "effect"), "NoSchedule" | "NoExecute")
}

pub(super) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

impl Taint {
    /// The toleration for exactly this taint.
    pub fn toleration(&self) -> Value {
        json!({
            "key": self.kind.key,
            "operator": "Equal",
            "value": self.value,
            "effect": self.kind.effect.as_str(),
        })
    }

    /// The taint in the API's form.
    pub fn to_json(&self) -> Value {
        json!({
            "key": self.kind.key,
            "value": self.value,
            "effect": self.kind.effect.as_str(),
        })
    }
}

/// `key=value:effect`, the format of `kubectl taint`.
impl fmt::Display for Taint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}={}:{}",
            self.kind.key,
            self.value,
            self.kind.effect.as_str()
        )
    }
}

impl FromStr for Taint {
    type Err = MalformedTaint;

    fn from_str(text: &str) -> Result<Self, MalformedTaint> {
        let malformed = || MalformedTaint(text.to_owned());
        let (key, rest) = text.split_once('=').ok_or_else(malformed)?;
        let (value, effect) = rest.rsplit_once(':').ok_or_else(malformed)?;
        let effect = match effect {
            "NoSchedule" => Effect::NoSchedule,
            "NoExecute" => Effect::NoExecute,
            _ => return Err(malformed()),
        };
        if key.is_empty() {
            return Err(malformed());
        }
        Ok(Self {
            kind: TaintKind {
                key: key.to_owned(),
                effect,
            },
            value: value.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_as_the_api_does() {
        let taint: Taint = "kubernetes.io/arch=arm64:NoSchedule".parse().unwrap();
        assert_eq!(taint.to_string(), "kubernetes.io/arch=arm64:NoSchedule");
        for (toleration, expected) in [
            (json!({"operator": "Exists"}), true),
            (
                json!({"key": "kubernetes.io/arch", "operator": "Exists"}),
                true,
            ),
            (
                json!({"key": "kubernetes.io/arch", "operator": "Exists", "effect": "NoExecute"}),
                false,
            ),
            (json!({"key": "kubernetes.io/arch", "value": "arm64"}), true),
            (
                json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}),
                true,
            ),
            (
                json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": "amd64"}),
                false,
            ),
            (json!({"key": "other", "operator": "Exists"}), false),
            (
                json!({"key": "kubernetes.io/arch", "operator": "Gt", "value": "1"}),
                false,
            ),
            (json!({"effect": "NoSchedule", "operator": "Exists"}), true),
            (json!("nonsense"), false),
        ] {
            assert_eq!(tolerates(&toleration, &taint), expected, "{toleration}");
        }
    }

    #[test]
    fn malformed_taints_are_refused() {
        for bad in ["", "a", "a=b", "=b:NoSchedule", "a=b:Never", "a=b:"] {
            assert!(bad.parse::<Taint>().is_err(), "{bad}");
        }
    }
}
