//! Expressions of compatibility rules: an operator and its values, compiled once.
//!
//! Two formats have expressions, with differences. In ocifit-k8s (`Labels` here) the keys are node
//! labels. In Node Feature Discovery (`Features`; `evaluateMatchExpression` in its package
//! `nodefeaturerule`) the keys are elements of a feature.

use std::{
    collections::BTreeSet,
    ops::{Bound, RangeBounds},
    str::FromStr,
};

use regex::bytes::{Regex, RegexBuilder};

use crate::{
    names::{is_label_value, is_qualified_name},
    placement::requirement::{Operator, Requirement},
    text::{brief, brief_list},
};

use super::{
    Fact, RuleKeys,
    limits::{COST_OF_PATTERN, MAX_PATTERN, MAX_TEXT, MAX_VALUES},
    version::Version,
};

/// An expression in a document.
#[derive(Clone, Copy, Debug)]
pub struct WrittenExpression<'a> {
    /// `op`; in NFD an empty operator always holds.
    pub operator: &'a str,
    /// `value`.
    pub values: &'a [String],
    /// `type` of NFD: the kind of comparison; empty for integers.
    pub value_type: &'a str,
}

/// A compiled expression.
#[derive(Clone, Debug)]
pub struct Expression(Test);

#[derive(Clone, Debug)]
enum Test {
    Always,
    Exists,
    DoesNotExist,
    In(Vec<String>),
    NotIn {
        values: Vec<String>,
        holds_if_missing: bool,
    },
    InRegexp(Vec<Regex>),
    /// An integer between two exclusive bounds.
    Between(Option<i64>, Option<i64>),
    Versions(Bound<Version>, Bound<Version>),
    Is(&'static str),
}

/// An invalid expression. A rule with an invalid expression holds nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidExpression {
    /// The format has no such operator.
    #[error("unknown operator {0:?}")]
    Operator(String),
    /// The operator needs another number of values.
    #[error("{0} with {1} values")]
    Values(&'static str, usize),
    /// The operator compares integers.
    #[error("{0:?} is no integer")]
    NoInteger(String),
    /// The operator compares versions.
    #[error("{0:?} is no version")]
    NoVersion(String),
    /// The operator does not compare values of this type.
    #[error("unknown type {0:?}")]
    Type(String),
    /// The first bound is not below the second bound.
    #[error("no integer is between {0} and {1}")]
    Empty(i64, i64),
    /// Not a regular expression, or a regular expression that is too large.
    #[error("{0:?} is no regular expression that can be used")]
    Pattern(String),
}

impl Expression {
    /// Compiles an expression.
    ///
    /// # Errors
    ///
    /// When the expression is invalid for keys of this kind.
    pub fn new(keys: RuleKeys, written: WrittenExpression<'_>) -> Result<Self, InvalidExpression> {
        let WrittenExpression {
            operator, values, ..
        } = written;
        let is_nfd = keys == RuleKeys::Features;
        let with_values = |name| {
            let needed = is_nfd && values.is_empty();
            if needed {
                Err(InvalidExpression::Values(name, 0))
            } else {
                Ok(values.to_vec())
            }
        };
        let without_values = |name, test| written.expect_values(keys, name, 0).map(|()| test);
        let exclusive = (Bound::Excluded(()), Bound::Excluded(()));
        let inclusive = (Bound::Included(()), Bound::Included(()));
        let below = |bounds: (Bound<()>, Bound<()>)| (Bound::Unbounded, bounds.1);
        let above = |bounds: (Bound<()>, Bound<()>)| (bounds.0, Bound::Unbounded);
        Ok(Self(match operator {
            "" if is_nfd => without_values("no operator", Test::Always)?,
            "Exists" => without_values("Exists", Test::Exists)?,
            "DoesNotExist" => without_values("DoesNotExist", Test::DoesNotExist)?,
            "In" => Test::In(with_values("In")?),
            "NotIn" => Test::NotIn {
                values: with_values("NotIn")?,
                holds_if_missing: !is_nfd,
            },
            "InRegexp" => Test::InRegexp(patterns(&with_values("InRegexp")?, is_nfd)?),
            "Gt" => written.compare(keys, "Gt", above(exclusive))?,
            "Lt" => written.compare(keys, "Lt", below(exclusive))?,
            "Ge" if is_nfd => written.compare(keys, "Ge", above(inclusive))?,
            "Le" if is_nfd => written.compare(keys, "Le", below(inclusive))?,
            "Gte" if !is_nfd => written.compare(keys, "Gte", above(inclusive))?,
            "Lte" if !is_nfd => written.compare(keys, "Lte", below(inclusive))?,
            "GtLt" if is_nfd => written.compare(keys, "GtLt", exclusive)?,
            "GeLe" if is_nfd => written.compare(keys, "GeLe", inclusive)?,
            "IsTrue" if is_nfd => without_values("IsTrue", Test::Is("true"))?,
            "IsFalse" if is_nfd => without_values("IsFalse", Test::Is("false"))?,
            other => return Err(InvalidExpression::Operator(brief(other, MAX_TEXT))),
        }))
    }

    /// The operator and its values, for messages: `in (a, b)`.
    pub(super) fn describe(&self) -> String {
        let between = |from: Option<String>, to: Option<String>| {
            let bounds = [from, to].into_iter().flatten();
            bounds.collect::<Vec<_>>().join(" and ")
        };
        match &self.0 {
            Test::Always => "always holds".to_owned(),
            Test::Exists => "exists".to_owned(),
            Test::DoesNotExist => "does not exist".to_owned(),
            Test::In(values) => format!("in ({})", say_values(values)),
            Test::NotIn { values, .. } => format!("not in ({})", say_values(values)),
            Test::InRegexp(patterns) => {
                let patterns = patterns.iter().map(Regex::as_str);
                format!("matches one of ({})", say_values(patterns))
            }
            Test::Between(from, to) => between(
                from.map(|above| format!("> {above}")),
                to.map(|below| format!("< {below}")),
            ),
            Test::Versions(from, to) => between(
                match from {
                    Bound::Included(first) => Some(format!(">= {first}")),
                    Bound::Excluded(above) => Some(format!("> {above}")),
                    Bound::Unbounded => None,
                },
                match to {
                    Bound::Included(last) => Some(format!("<= {last}")),
                    Bound::Excluded(below) => Some(format!("< {below}")),
                    Bound::Unbounded => None,
                },
            ),
            Test::Is(text) => format!("is {text}"),
        }
    }

    /// The expression as requirements of node affinity on the label `key`, `ANDed`; `None` if no
    /// node can satisfy it. `seen`: values of the label on nodes that fit. They replace regular
    /// expressions and versions, for which node affinity has no operator.
    pub(super) fn requirements<'v>(
        &self,
        key: &str,
        seen: impl FnOnce() -> BTreeSet<&'v str>,
    ) -> Option<Vec<Requirement>> {
        // The API server accepts only valid label keys and values, so no node has this key.
        if !is_qualified_name(key) {
            return self.holds(Fact::Missing).then(Vec::new);
        }
        let usable = |values: &[String]| -> Vec<String> {
            let label_values = values.iter().filter(|value| is_label_value(value));
            label_values.cloned().collect()
        };
        // The API server accepts no `In` without values.
        let is_one_of = |values: Vec<String>| {
            let requirement = || vec![Requirement::new(key, Operator::In, values.clone())];
            (!values.is_empty()).then(requirement)
        };
        let single = |operator, values| Some(vec![Requirement::new(key, operator, values)]);
        match &self.0 {
            Test::Always => Some(Vec::new()),
            Test::Exists => single(Operator::Exists, Vec::new()),
            Test::DoesNotExist => single(Operator::DoesNotExist, Vec::new()),
            Test::In(values) => is_one_of(usable(values)),
            Test::NotIn {
                values,
                holds_if_missing,
            } => {
                let values = Some(usable(values)).filter(|values| !values.is_empty());
                let exclusion = values.map(|values| Requirement::new(key, Operator::NotIn, values));
                // In node affinity `NotIn` also holds for nodes without the label.
                let exists = (!holds_if_missing)
                    .then(|| Requirement::new(key, Operator::Exists, Vec::new()));
                Some(exclusion.into_iter().chain(exists).collect())
            }
            Test::InRegexp(_) | Test::Versions(..) => {
                let seen_values = seen().into_iter();
                let matching = seen_values.filter(|value| self.holds(Fact::Value(value)));
                is_one_of(matching.map(str::to_owned).collect())
            }
            // A value of a label does not begin with a minus, so no label has a negative integer.
            Test::Between(_, Some(below)) if *below <= 0 => None,
            Test::Between(above, below) => {
                let above = above.filter(|above| *above >= 0);
                // If no bound is left, `Lt` the highest integer still requires an integer.
                let highest = Some(i64::MAX).filter(|_| above.is_none());
                let bound = |operator, bound: Option<i64>| {
                    let bound = bound?.to_string();
                    Some(Requirement::new(key, operator, vec![bound]))
                };
                let bounds = [
                    bound(Operator::Gt, above),
                    bound(Operator::Lt, below.or(highest)),
                ];
                Some(bounds.into_iter().flatten().collect())
            }
            Test::Is(value) => is_one_of(vec![(*value).to_owned()]),
        }
    }

    /// How much work it is to compare a value, for limits: one for each comparison.
    pub(super) fn cost(&self) -> usize {
        match &self.0 {
            Test::In(values) | Test::NotIn { values, .. } => 1 + values.len(),
            Test::InRegexp(patterns) => 1 + patterns.len() * COST_OF_PATTERN,
            _ => 1,
        }
    }

    /// Whether the expression requires that a key is missing.
    pub(super) fn is_absence(&self) -> bool {
        matches!(self.0, Test::DoesNotExist)
    }

    /// Whether the expression holds for a fact.
    pub fn holds(&self, fact: Fact<'_>) -> bool {
        let value = match (&self.0, fact) {
            (Test::Always, _) => return true,
            (Test::Exists, fact) => return fact != Fact::Missing,
            (Test::DoesNotExist, fact) => return fact == Fact::Missing,
            (
                Test::NotIn {
                    holds_if_missing, ..
                },
                Fact::Missing,
            ) => return *holds_if_missing,
            // A flag has no value to compare.
            (_, Fact::Missing | Fact::Flag) => return false,
            (_, Fact::Value(value)) => value,
        };
        match &self.0 {
            Test::Always | Test::Exists => true,
            Test::DoesNotExist => false,
            Test::In(values) => values.iter().any(|listed| listed == value),
            Test::NotIn { values, .. } => !values.iter().any(|listed| listed == value),
            Test::InRegexp(patterns) => patterns
                .iter()
                .any(|pattern| pattern.is_match(value.as_bytes())),
            Test::Between(above, below) => value.parse::<i64>().is_ok_and(|value| {
                above.is_none_or(|above| value > above) && below.is_none_or(|below| value < below)
            }),
            Test::Versions(from, to) => value
                .parse::<Version>()
                .is_ok_and(|version| (*from, *to).contains(&version)),
            Test::Is(wanted) => value == *wanted,
        }
    }
}

impl WrittenExpression<'_> {
    /// ocifit-k8s ignores values that an operator does not need.
    fn expect_values(
        self,
        keys: RuleKeys,
        name: &'static str,
        count: usize,
    ) -> Result<(), InvalidExpression> {
        let is_nfd = keys == RuleKeys::Features;
        match self.values.len() {
            found if found == count || (!is_nfd && found > count) => Ok(()),
            found => Err(InvalidExpression::Values(name, found)),
        }
    }

    /// Compiles an operator that compares with one value for each of its bounds.
    fn compare(
        self,
        keys: RuleKeys,
        name: &'static str,
        (from, to): (Bound<()>, Bound<()>),
    ) -> Result<Test, InvalidExpression> {
        let is_bounded = |bound: &Bound<()>| *bound != Bound::Unbounded;
        let count = [from, to].iter().filter(|bound| is_bounded(bound)).count();
        self.expect_values(keys, name, count)?;
        let mut values = self.values.iter().map(String::as_str);
        let from = from.map(|()| values.next().unwrap_or_default());
        let to = to.map(|()| values.next().unwrap_or_default());
        match (keys, self.value_type) {
            (RuleKeys::Labels, _) | (RuleKeys::Features, "") => integers(from, to),
            (RuleKeys::Features, "version") => Ok(Test::Versions(
                parsed(from, InvalidExpression::NoVersion)?,
                parsed(to, InvalidExpression::NoVersion)?,
            )),
            (RuleKeys::Features, other) => Err(InvalidExpression::Type(brief(other, MAX_TEXT))),
        }
    }
}

fn parsed<T: FromStr>(
    bound: Bound<&str>,
    invalid: fn(String) -> InvalidExpression,
) -> Result<Bound<T>, InvalidExpression> {
    let parse = |text: &str| text.parse().map_err(|_| invalid(brief(text, MAX_TEXT)));
    Ok(match bound {
        Bound::Included(text) => Bound::Included(parse(text)?),
        Bound::Excluded(text) => Bound::Excluded(parse(text)?),
        Bound::Unbounded => Bound::Unbounded,
    })
}

/// For example `a, b and 3 more`.
fn say_values<T: AsRef<str>>(values: impl IntoIterator<Item = T>) -> String {
    let values = values
        .into_iter()
        .map(|value| brief(value.as_ref(), MAX_TEXT));
    brief_list(values, ", ", MAX_VALUES)
}

/// Converts the bounds to exclusive bounds, because node affinity has only `Gt` and `Lt`.
fn integers(from: Bound<&str>, to: Bound<&str>) -> Result<Test, InvalidExpression> {
    let from = parsed::<i64>(from, InvalidExpression::NoInteger)?;
    let to = parsed::<i64>(to, InvalidExpression::NoInteger)?;
    if let (
        Bound::Included(first) | Bound::Excluded(first),
        Bound::Included(last) | Bound::Excluded(last),
    ) = (from, to)
        && first >= last
    {
        return Err(InvalidExpression::Empty(first, last));
    }
    Ok(Test::Between(
        match from {
            Bound::Included(first) => first.checked_sub(1),
            Bound::Excluded(above) => Some(above),
            Bound::Unbounded => None,
        },
        match to {
            Bound::Included(last) => last.checked_add(1),
            Bound::Excluded(below) => Some(below),
            Bound::Unbounded => None,
        },
    ))
}

/// Compiles patterns, unanchored. As in Go, `\d`, `\s` and `\w` stand for ASCII characters. In
/// ocifit-k8s an invalid pattern matches nothing; in NFD it makes the expression invalid.
fn patterns(texts: &[String], is_nfd: bool) -> Result<Vec<Regex>, InvalidExpression> {
    let mut regexes = Vec::new();
    for text in texts {
        match RegexBuilder::new(text)
            .unicode(false)
            .size_limit(MAX_PATTERN)
            .dfa_size_limit(MAX_PATTERN)
            .build()
        {
            Ok(pattern) => regexes.push(pattern),
            Err(_) if is_nfd => return Err(InvalidExpression::Pattern(brief(text, MAX_TEXT))),
            Err(_) => {}
        }
    }
    Ok(regexes)
}

#[cfg(test)]
mod tests;
