//! The settings of additional tolerations, for clusters whose nodes have other taints than
//! archaware's. `toleration.rs` applies them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use archaware_base::names::{QualifiedName, is_label_value};
use archaware_platform::{Architecture, Os};

/// One rule of `tolerations`: pods of one of the platforms get the toleration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TolerationRule {
    /// Platforms that the rule applies to; empty means all.
    #[serde(default)]
    pub platforms: Vec<RulePlatform>,
    /// The toleration that is added.
    pub toleration: TolerationConfig,
}

/// `os/architecture`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct RulePlatform {
    /// OS of the pod.
    pub os: Os,
    /// One of the architectures that the pod's images share.
    pub architecture: Architecture,
}

/// A toleration. `{arch}` in its value is replaced by the architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", try_from = "Fields")]
#[schemars(with = "Fields")]
pub struct TolerationConfig {
    /// Key of the taint.
    pub key: QualifiedName,
    /// How the value is compared.
    pub operator: TolerationOperator,
    /// Value of the taint; empty with `Exists`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// Effect of the taint; `None` means every effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<TolerationEffect>,
    /// For how long a pod stays on a node that gets the taint; `None` means for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toleration_seconds: Option<i64>,
}

/// The serialised form.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Fields {
    /// Key of the taint.
    key: QualifiedName,
    /// `Equal` or `Exists`.
    #[serde(default)]
    operator: TolerationOperator,
    /// Value of the taint, with `Equal`. `{arch}` is replaced by the architecture.
    #[serde(default)]
    value: String,
    /// Effect of the taint; all effects when omitted.
    effect: Option<TolerationEffect>,
    /// With the effect `NoExecute`: for how long a pod stays on a node that gets the taint; for
    /// ever when omitted.
    toleration_seconds: Option<i64>,
}

/// How a toleration compares values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TolerationOperator {
    /// The value must be equal.
    #[default]
    Equal,
    /// Any value matches.
    Exists,
}

/// Effects that can be tolerated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TolerationEffect {
    /// Pods that do not tolerate the taint are not scheduled to the node.
    NoSchedule,
    /// Pods that do not tolerate the taint are also evicted from the node.
    NoExecute,
    /// Pods that do not tolerate the taint are scheduled to other nodes if possible.
    PreferNoSchedule,
}

/// Placeholder for the architecture in a value.
pub(super) const ARCH: &str = "{arch}";

impl TryFrom<String> for RulePlatform {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let malformed = || format!("{text:?} is not a platform like linux/arm64");
        let (os, architecture) = text.split_once('/').ok_or_else(malformed)?;
        let architecture: Architecture = architecture.parse().map_err(|_| malformed())?;
        if !architecture.is_known() {
            return Err(format!("{text:?} has no architecture that Go knows"));
        }
        Ok(Self {
            os: os.parse().map_err(|_| malformed())?,
            architecture,
        })
    }
}

impl From<RulePlatform> for String {
    fn from(platform: RulePlatform) -> Self {
        format!("{}/{}", platform.os, platform.architecture)
    }
}

impl TolerationConfig {
    /// In the API's form, for an architecture.
    pub(super) fn toleration(&self, architecture: &str) -> Value {
        let value = self.value.replace(ARCH, architecture);
        // The API server drops an empty value. Owned tolerations are recognised by equality, so it
        // is dropped here too.
        let value = Some(value).filter(|value| !value.is_empty());
        let fields = [
            ("key", Some(json!(self.key))),
            ("operator", Some(json!(self.operator))),
            ("value", value.map(Value::String)),
            ("effect", self.effect.map(|effect| json!(effect))),
            (
                "tolerationSeconds",
                self.toleration_seconds.map(Value::from),
            ),
        ];
        let present = fields
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Value::Object(present.collect())
    }
}

impl TryFrom<Fields> for TolerationConfig {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, &'static str> {
        if fields.operator == TolerationOperator::Exists && !fields.value.is_empty() {
            return Err("a toleration with operator Exists has no value");
        }
        // Values of taints follow the API's rule for label values.
        if fields.value.matches(ARCH).count() > 1 {
            return Err("{arch} may occur only once in the value of a toleration");
        }
        let value = fields.value.replacen(ARCH, "a", 1);
        if value.len() > 50 || !is_label_value(&value) {
            return Err(
                "the value of a toleration may contain letters, digits, '-', '_', '.' and {arch}, at most 50 characters",
            );
        }
        // `validateTolerations` of k8s.io/kubernetes.
        let evicts = fields.effect == Some(TolerationEffect::NoExecute);
        if fields.toleration_seconds.is_some() && !evicts {
            return Err("tolerationSeconds needs the effect NoExecute");
        }
        Ok(Self {
            key: fields.key,
            operator: fields.operator,
            value: fields.value,
            effect: fields.effect,
            toleration_seconds: fields.toleration_seconds,
        })
    }
}
