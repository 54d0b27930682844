//! Label selectors in text form: `a=b,c!=d,e in (f, g),h notin (i),j,!k`.

use std::collections::BTreeMap;

use kube_core::{Expression, Selector, SelectorExt};
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
    selector: Selector,
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
        self.selector.matches(labels)
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

fn requirement(expression: &Expression) -> Requirement {
    let (key, operator, values) = match expression {
        Expression::In(key, values) => (key, Operator::In, values.iter().cloned().collect()),
        Expression::NotIn(key, values) => (key, Operator::NotIn, values.iter().cloned().collect()),
        Expression::Equal(key, value) => (key, Operator::In, vec![value.clone()]),
        Expression::NotEqual(key, value) => (key, Operator::NotIn, vec![value.clone()]),
        Expression::Exists(key) => (key, Operator::Exists, Vec::new()),
        Expression::DoesNotExist(key) => (key, Operator::DoesNotExist, Vec::new()),
    };
    Requirement::new(key, operator, values)
}

impl TryFrom<String> for LabelSelector {
    type Error = SelectorError;

    fn try_from(text: String) -> Result<Self, SelectorError> {
        let expressions: Result<Vec<Expression>, &'static str> =
            requirements(&text).into_iter().map(expression).collect();
        match expressions {
            Ok(expressions) => Ok(Self {
                requirements: expressions.iter().map(requirement).collect(),
                selector: expressions.into_iter().collect(),
                text,
            }),
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
fn requirements(text: &str) -> Vec<&str> {
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

fn expression(text: &str) -> Result<Expression, &'static str> {
    let text = text.trim();
    if let Some((key, value)) = text.split_once("!=") {
        return Ok(Expression::NotEqual(key_of(key)?, value_of(value)?));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(Expression::Equal(key_of(key)?, value_of(value)?));
    }
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Expression::DoesNotExist(key_of(key)?));
    }
    let Some((key, rest)) = text.split_once(char::is_whitespace) else {
        return Ok(Expression::Exists(key_of(text)?));
    };
    let (operator, values) = rest
        .trim()
        .split_once('(')
        .ok_or("a requirement without operator")?;
    let values = values
        .trim_end()
        .strip_suffix(')')
        .ok_or("a list without closing parenthesis")?;
    let values = values.split(',').map(value_of).collect::<Result<_, _>>()?;
    match operator.trim() {
        "in" => Ok(Expression::In(key_of(key)?, values)),
        "notin" => Ok(Expression::NotIn(key_of(key)?, values)),
        _ => Err("an unknown operator"),
    }
}

fn key_of(text: &str) -> Result<String, &'static str> {
    let text = text.trim();
    is_qualified_name(text)
        .then(|| text.to_owned())
        .ok_or("a malformed key")
}

fn value_of(text: &str) -> Result<String, &'static str> {
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
