//! Kubernetes' validation rules for names (`k8s.io/apimachinery/pkg/util/validation`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A key of labels or taints: a qualified name (`[prefix/]name`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String")]
#[schemars(with = "String")]
pub struct QualifiedName(String);

impl TryFrom<String> for QualifiedName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if is_qualified_name(&text) {
            Ok(Self(text))
        } else {
            Err(format!("{text:?} cannot be the key of a taint or label"))
        }
    }
}

impl QualifiedName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A name that is written in archaware's code, and therefore not validated.
    pub fn constant(text: &'static str) -> Self {
        Self(text.to_owned())
    }
}

impl From<QualifiedName> for String {
    fn from(key: QualifiedName) -> Self {
        key.0
    }
}

/// Whether `text` is a DNS subdomain, the rule for most object names (`IsDNS1123Subdomain`).
pub fn is_dns_subdomain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_label = |label: &str| {
        label.starts_with(plain)
            && label.ends_with(plain)
            && label.chars().all(|c| plain(c) || c == '-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Whether `text` is `[prefix/]name`, the rule for keys of labels, annotations and taints
/// (`IsQualifiedName`).
pub fn is_qualified_name(text: &str) -> bool {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    prefix.is_none_or(is_dns_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Whether `text` is a valid label value, the rule for taint values too (`IsValidLabelValue`).
/// Empty is valid.
pub fn is_label_value(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && edge(text.chars().next())
        && edge(text.chars().next_back())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules_of_the_api() {
        let long = "a".repeat(64);
        for (text, subdomain, qualified, value) in [
            ("a", true, true, true),
            ("a.b-c.9", true, true, true),
            ("A_b", false, true, true),
            ("a.example/b_C", false, true, false),
            ("a_b.example/c", false, false, false),
            ("", false, false, true),
            ("a/", false, false, false),
            ("/a", false, false, false),
            ("a/b/c", false, false, false),
            ("-a", false, false, false),
            ("a-", false, false, false),
            (".a", false, false, false),
            ("a..b", false, true, true),
            ("a b", false, false, false),
            ("../a", false, false, false),
            (&long, true, false, false),
            (&long.repeat(4), false, false, false),
        ] {
            let found = (
                is_dns_subdomain(text),
                is_qualified_name(text),
                is_label_value(text),
            );
            assert_eq!(found, (subdomain, qualified, value), "{text:?}");
        }
    }
}
