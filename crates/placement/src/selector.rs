//! Label selectors in text form: `a=b,c!=d,e in (f, g),h notin (i),j,!k`.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_base::names::{is_label_value, is_qualified_name};

use super::requirement::{Operator, Requirement};

/// A parsed selector that keeps its text. The empty selector matches everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct LabelSelector {
    text: String,
    requirements: Vec<Requirement>,
}

/// Text that is not a label selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a label selector: {problem}")]
pub struct SelectorError {
    text: String,
    problem: &'static str,
}

impl LabelSelector {
    /// Whether all requirements match.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements
            .iter()
            .all(|requirement| requirement.selects(labels))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// As requirements of node affinity.
    pub(super) fn requirements(&self) -> Vec<Requirement> {
        self.requirements.clone()
    }
}

impl TryFrom<String> for LabelSelector {
    type Error = SelectorError;

    fn try_from(text: String) -> Result<Self, SelectorError> {
        match split(&text).into_iter().map(requirement).collect() {
            Ok(requirements) => Ok(Self { text, requirements }),
            Err(problem) => Err(SelectorError { text, problem }),
        }
    }
}

impl From<LabelSelector> for String {
    fn from(selector: LabelSelector) -> Self {
        selector.text
    }
}

/// Splits at commas outside parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut inside = false;
    if text.trim().is_empty() {
        return Vec::new();
    }
    text.split(move |c| {
        match c {
            '(' => inside = true,
            ')' => inside = false,
            _ => {}
        }
        c == ',' && !inside
    })
    .collect()
}

fn requirement(text: &str) -> Result<Requirement, &'static str> {
    let text = text.trim();
    if let Some((key, value)) = text.split_once("!=") {
        return requirement_on_value(key, Operator::NotIn, value);
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return requirement_on_value(key, Operator::In, value);
    }
    if let Some(key) = text.strip_prefix('!') {
        return requirement_on_key(key, Operator::DoesNotExist);
    }
    let Some((key, rest)) = text.split_once(char::is_whitespace) else {
        return requirement_on_key(text, Operator::Exists);
    };
    let (operator, values) = rest
        .trim()
        .split_once('(')
        .ok_or("a requirement without operator")?;
    let values = values
        .trim_end()
        .strip_suffix(')')
        .ok_or("a list without closing parenthesis")?;
    let operator = match operator.trim() {
        "in" => Operator::In,
        "notin" => Operator::NotIn,
        _ => return Err("an unknown operator"),
    };
    let values: BTreeSet<String> = values
        .split(',')
        .map(parse_value)
        .collect::<Result<_, _>>()?;
    let values = values.into_iter().collect();
    Ok(Requirement::new(parse_key(key)?, operator, values))
}

fn requirement_on_key(key: &str, operator: Operator) -> Result<Requirement, &'static str> {
    Ok(Requirement::new(parse_key(key)?, operator, Vec::new()))
}

fn requirement_on_value(
    key: &str,
    operator: Operator,
    value: &str,
) -> Result<Requirement, &'static str> {
    Ok(Requirement::new(
        parse_key(key)?,
        operator,
        vec![parse_value(value)?],
    ))
}

fn parse_key(text: &str) -> Result<&str, &'static str> {
    let text = text.trim();
    is_qualified_name(text)
        .then_some(text)
        .ok_or("a malformed key")
}

fn parse_value(text: &str) -> Result<String, &'static str> {
    let text = text.trim();
    is_label_value(text)
        .then(|| text.to_owned())
        .ok_or("a malformed value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator() {
        let labels: BTreeMap<_, _> = [("a", "1"), ("b", "2")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into();
        for (text, expected) in [
            ("", true),
            ("a", true),
            ("c", false),
            ("!c", true),
            ("!a", false),
            ("a=1", true),
            ("a==1,b=2", true),
            ("a=2", false),
            ("a!=2", true),
            ("c!=2", true),
            ("a in (1, 3),b", true),
            ("a notin (1,3)", false),
            ("c notin (1)", true),
        ] {
            let selector = LabelSelector::try_from(text.to_owned()).unwrap();
            assert_eq!(selector.matches(&labels), expected, "{text}");
        }
        for bad in ["=", "a in 1", "a in (1", "a near (1)", "a=b c", "ä=1", ","] {
            assert!(LabelSelector::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
