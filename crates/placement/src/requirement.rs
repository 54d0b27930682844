//! A requirement on a label of a node, with the semantics of the scheduler: `nodeaffinity` of
//! k8s.io/component-helpers, and `Requirement.Matches` of k8s.io/apimachinery's `labels`.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

/// One of `matchExpressions` of a node selector term.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Requirement {
    /// The label key.
    pub key: String,
    /// The condition on the label.
    pub operator: Operator,
    /// Values for [`Operator::In`] and [`Operator::NotIn`]; a single integer for [`Operator::Gt`]
    /// and [`Operator::Lt`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// The operators of node affinity.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is missing.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is missing.
    DoesNotExist,
    /// The label is an integer above the value.
    Gt,
    /// The label is an integer below the value.
    Lt,
    /// An operator that the API server rejects, but only after it has called webhooks. archaware
    /// keeps the text that the author wrote.
    #[serde(untagged)]
    Unknown(String),
}

impl Default for Operator {
    fn default() -> Self {
        Self::Unknown(String::new())
    }
}

impl Requirement {
    /// `values`: as the operator needs them.
    pub fn new(key: &str, operator: Operator, values: Vec<String>) -> Self {
        Self {
            key: key.to_owned(),
            operator,
            values,
        }
    }

    /// Whether it holds for a node with these labels.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.holds(labels.get(&self.key).map(String::as_str))
    }

    /// Whether the requirement holds for this value of its label. A requirement that the API server
    /// would reject holds for no value.
    pub(super) fn holds(&self, value: Option<&str>) -> bool {
        let is_listed = |value: &str| self.values.iter().any(|listed| listed == value);
        let integer = |text: &str| text.parse::<i64>().ok();
        let compares = |ordering: fn(&i64, &i64) -> bool| {
            let [bound] = self.values.as_slice() else {
                return false;
            };
            let both = value.and_then(integer).zip(integer(bound));
            both.is_some_and(|(number, bound)| ordering(&number, &bound))
        };
        match &self.operator {
            Operator::In => value.is_some_and(is_listed),
            Operator::NotIn => !self.values.is_empty() && !value.is_some_and(is_listed),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::Gt => compares(i64::gt),
            Operator::Lt => compares(i64::lt),
            Operator::Unknown(_) => false,
        }
    }

    /// Whether no value satisfies both requirements. Conflicts with `Gt` or `Lt` are not detected.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        let excludes = |first: &Self, second: &Self| match (&first.operator, &second.operator) {
            (Operator::In, Operator::In) => !first
                .values
                .iter()
                .any(|value| second.values.contains(value)),
            (Operator::In, Operator::NotIn) => first
                .values
                .iter()
                .all(|value| second.values.contains(value)),
            (Operator::In | Operator::Exists, Operator::DoesNotExist) => true,
            _ => false,
        };
        self.key == other.key && (excludes(self, other) || excludes(other, self))
    }
}

/// For example `kubernetes.io/arch in (amd64, arm64)`.
impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, values) = (&self.key, self.values.join(", "));
        match &self.operator {
            Operator::In => write!(f, "{key} in ({values})"),
            Operator::NotIn => write!(f, "{key} not in ({values})"),
            Operator::Exists => write!(f, "{key} exists"),
            Operator::DoesNotExist => write!(f, "{key} does not exist"),
            Operator::Gt => write!(f, "{key} > {values}"),
            Operator::Lt => write!(f, "{key} < {values}"),
            Operator::Unknown(text) => write!(f, "{key} {text} ({values})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_unknown_operator_keeps_its_text() {
        for operator in ["In", "Gt", "in", "", "Near"] {
            let written = json!({"key": "zone", "operator": operator, "values": ["1"]});
            let requirement: Requirement = serde_json::from_value(written.clone()).unwrap();
            let is_unknown = matches!(requirement.operator, Operator::Unknown(_));
            assert_eq!(is_unknown, !["In", "Gt"].contains(&operator));
            assert_eq!(serde_json::to_value(&requirement).unwrap(), written);
        }
    }
}
