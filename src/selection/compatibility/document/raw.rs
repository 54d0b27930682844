//! Documents as they are written.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
pub(super) struct RawDocument {
    pub(super) compatibilities: Vec<RawCompatibility>,
}

#[derive(Deserialize)]
pub(super) struct RawCompatibility {
    #[serde(default)]
    pub(super) tag: String,
    #[serde(default)]
    pub(super) description: String,
    #[serde(default)]
    pub(super) weight: i64,
    #[serde(default)]
    pub(super) rules: Vec<RawRule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawRule {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) match_features: Vec<RawMatch>,
    #[serde(default)]
    pub(super) match_any: Vec<RawAny>,
    #[serde(default)]
    pub(super) vars: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) vars_template: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawAny {
    pub(super) match_features: Vec<RawMatch>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawMatch {
    #[serde(default)]
    pub(super) feature: String,
    pub(super) match_expressions: Option<RawExpressions>,
    pub(super) match_name: Option<RawExpression>,
}

/// A list in ocifit-k8s' format, a map in NFD's.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum RawExpressions {
    Labels(Vec<RawLabel>),
    Elements(BTreeMap<String, RawExpression>),
}

#[derive(Deserialize)]
pub(super) struct RawLabel {
    pub(super) key: String,
    #[serde(flatten)]
    pub(super) expression: RawExpression,
}

#[derive(Deserialize)]
pub(super) struct RawExpression {
    #[serde(default)]
    pub(super) op: String,
    #[serde(default, deserialize_with = "values")]
    pub(super) value: Vec<String>,
    #[serde(default, rename = "type")]
    pub(super) value_type: String,
}

/// A single value or a list; numbers and booleans count as their text.
fn values<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        Text(String),
        Boolean(bool),
        Integer(i64),
        Number(f64),
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Values {
        Many(Vec<Scalar>),
        One(Scalar),
        None(()),
    }
    let text = |scalar| match scalar {
        Scalar::Text(text) => text,
        Scalar::Boolean(value) => value.to_string(),
        Scalar::Integer(value) => value.to_string(),
        Scalar::Number(value) => value.to_string(),
    };
    Ok(match Values::deserialize(deserializer)? {
        Values::Many(all) => all.into_iter().map(text).collect(),
        Values::One(one) => vec![text(one)],
        Values::None(()) => Vec::new(),
    })
}
