//! Expressions of compatibility rules: an operator and its values, compiled once.
//!
//! Two formats have them, with differences: ocifit-k8s' (`Labels` here), whose keys are node labels, and that of Node Feature Discovery
//! (`Features`; `evaluateMatchExpression` in its package `nodefeaturerule`), whose keys are elements of a feature.

use std::collections::BTreeSet;

use regex::bytes::{Regex, RegexBuilder};

use crate::{
    names::{is_label_value, is_qualified_name},
    placement::affinity::Requirement,
};

use super::{DocumentFormat, Fact};

/// Maximum size of a compiled pattern in bytes, because anybody who may push images can write a document.
const MAX_PATTERN: usize = 64 * 1024;

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
        missing: bool,
    },
    InRegexp(Vec<Regex>),
    /// An integer between these, without them.
    Between(Option<i64>, Option<i64>),
    Is(&'static str),
}

/// An expression that means nothing. A rule with one holds nowhere.
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
    /// The first bound is not below the second.
    #[error("no integer is between {0} and {1}")]
    Empty(i64, i64),
    /// Not a regular expression, or one that is too large.
    #[error("{0:?} is no regular expression that can be used")]
    Pattern(String),
}

impl Expression {
    /// Compiles an expression.
    ///
    /// # Errors
    ///
    /// When it means nothing in this format.
    pub fn new(
        format: DocumentFormat,
        operator: &str,
        values: &[String],
    ) -> Result<Self, InvalidExpression> {
        let is_nfd = format == DocumentFormat::Features;
        // ocifit-k8s ignores values that an operator does not need.
        let exactly = |name, count: usize| match values.len() {
            found if found == count || (!is_nfd && found > count) => Ok(()),
            found => Err(InvalidExpression::Values(name, found)),
        };
        let some = |name| {
            let needed = is_nfd && values.is_empty();
            if needed {
                Err(InvalidExpression::Values(name, 0))
            } else {
                Ok(values.to_vec())
            }
        };
        let number = |index: usize| {
            let text = values.get(index).map(String::as_str).unwrap_or_default();
            text.parse::<i64>()
                .map_err(|_| InvalidExpression::NoInteger(text.to_owned()))
        };
        Ok(Self(match operator {
            "Any" if is_nfd => exactly("Any", 0).map(|()| Test::Always)?,
            "Exists" => exactly("Exists", 0).map(|()| Test::Exists)?,
            "DoesNotExist" => exactly("DoesNotExist", 0).map(|()| Test::DoesNotExist)?,
            "In" => Test::In(some("In")?),
            "NotIn" => Test::NotIn {
                values: some("NotIn")?,
                missing: !is_nfd,
            },
            "InRegexp" => Test::InRegexp(patterns(&some("InRegexp")?, is_nfd)?),
            "Gt" => {
                exactly("Gt", 1)?;
                Test::Between(Some(number(0)?), None)
            }
            "Lt" => {
                exactly("Lt", 1)?;
                Test::Between(None, Some(number(0)?))
            }
            "Gte" if !is_nfd => {
                exactly("Gte", 1)?;
                Test::Between(number(0)?.checked_sub(1), None)
            }
            "Lte" if !is_nfd => {
                exactly("Lte", 1)?;
                Test::Between(None, number(0)?.checked_add(1))
            }
            "GtLt" if is_nfd => {
                exactly("GtLt", 2)?;
                let (above, below) = (number(0)?, number(1)?);
                if above >= below {
                    return Err(InvalidExpression::Empty(above, below));
                }
                Test::Between(Some(above), Some(below))
            }
            "IsTrue" if is_nfd => exactly("IsTrue", 0).map(|()| Test::Is("true"))?,
            "IsFalse" if is_nfd => exactly("IsFalse", 0).map(|()| Test::Is("false"))?,
            other => return Err(InvalidExpression::Operator(other.to_owned())),
        }))
    }

    /// The same as node affinity, all of these, for a label that some nodes satisfy; `None` if no node can. `seen`: the values of these
    /// nodes, which stand for a regular expression.
    pub(super) fn requirements(
        &self,
        key: &str,
        seen: &BTreeSet<&str>,
    ) -> Option<Vec<Requirement>> {
        // The API server takes keys and values of labels only. No node has others.
        if !is_qualified_name(key) {
            return self.holds(Fact::Missing).then(Vec::new);
        }
        let usable = |values: &[String]| -> Vec<String> {
            let usable = values.iter().filter(|value| is_label_value(value));
            usable.cloned().collect()
        };
        // It accepts no `In` without values.
        let is_one_of = |values: Vec<String>| {
            let requirement = || vec![Requirement::new(key, "In", values.clone())];
            (!values.is_empty()).then(requirement)
        };
        let single = |operator, values| Some(vec![Requirement::new(key, operator, values)]);
        match &self.0 {
            Test::Always => Some(Vec::new()),
            Test::Exists => single("Exists", Vec::new()),
            Test::DoesNotExist => single("DoesNotExist", Vec::new()),
            Test::In(values) => is_one_of(usable(values)),
            Test::NotIn { values, missing } => {
                let values = Some(usable(values)).filter(|all| !all.is_empty());
                let others = values.map(|values| Requirement::new(key, "NotIn", values));
                // In node affinity it also holds without the label.
                let exists = (!missing).then(|| Requirement::new(key, "Exists", Vec::new()));
                Some(others.into_iter().chain(exists).collect())
            }
            Test::InRegexp(_) => {
                let matching = seen.iter().filter(|value| self.holds(Fact::Value(value)));
                is_one_of(matching.map(|value| (*value).to_owned()).collect())
            }
            // A value of a label does not begin with a minus.
            Test::Between(_, Some(below)) if *below <= 0 => None,
            Test::Between(above, below) => {
                let above = above.filter(|above| *above >= 0);
                // Any integer is below the highest one.
                let highest = Some(i64::MAX).filter(|_| above.is_none());
                let bound = |operator, bound: Option<i64>| {
                    let bound = bound?.to_string();
                    Some(Requirement::new(key, operator, vec![bound]))
                };
                let both = [bound("Gt", above), bound("Lt", below.or(highest))];
                Some(both.into_iter().flatten().collect())
            }
            Test::Is(value) => is_one_of(vec![(*value).to_owned()]),
        }
    }

    /// Whether it asks that a key is missing.
    pub(super) fn is_absence(&self) -> bool {
        matches!(self.0, Test::DoesNotExist)
    }

    /// Whether it holds for a fact.
    pub fn holds(&self, fact: Fact<'_>) -> bool {
        let value = match (&self.0, fact) {
            (Test::Always, _) => return true,
            (Test::Exists, fact) => return fact != Fact::Missing,
            (Test::DoesNotExist, fact) => return fact == Fact::Missing,
            (Test::NotIn { missing, .. }, Fact::Missing) => return *missing,
            // A flag has no value to compare.
            (_, Fact::Missing | Fact::Flag) => return false,
            (_, Fact::Value(value)) => value,
        };
        match &self.0 {
            Test::Always | Test::Exists => true,
            Test::DoesNotExist => false,
            Test::In(values) => values.iter().any(|one| one == value),
            Test::NotIn { values, .. } => !values.iter().any(|one| one == value),
            Test::InRegexp(patterns) => patterns
                .iter()
                .any(|pattern| pattern.is_match(value.as_bytes())),
            Test::Between(above, below) => value.parse::<i64>().is_ok_and(|value| {
                above.is_none_or(|above| value > above) && below.is_none_or(|below| value < below)
            }),
            Test::Is(wanted) => value == *wanted,
        }
    }
}

/// The patterns, unanchored. As in Go, `\d`, `\s` and `\w` stand for ASCII characters. One that is invalid matches nothing, and with NFD makes the expression invalid.
fn patterns(texts: &[String], is_nfd: bool) -> Result<Vec<Regex>, InvalidExpression> {
    let mut all = Vec::new();
    for text in texts {
        match RegexBuilder::new(text)
            .unicode(false)
            .size_limit(MAX_PATTERN)
            .dfa_size_limit(MAX_PATTERN)
            .build()
        {
            Ok(pattern) => all.push(pattern),
            Err(_) if is_nfd => return Err(InvalidExpression::Pattern(text.clone())),
            Err(_) => {}
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    use DocumentFormat::{Features, Labels};

    fn expression(format: DocumentFormat, text: &str) -> Result<Expression, InvalidExpression> {
        let mut words = text.split(' ').map(str::to_owned);
        let operator = words.next().unwrap();
        Expression::new(format, &operator, &words.collect::<Vec<_>>())
    }

    /// Every operator of both formats, with a value, without the key, and for a flag; worked out from their published meaning.
    #[test]
    fn every_operator() {
        use Fact::{Flag, Missing, Value};
        for (text, fact, labels, features) in [
            ("Exists", Value("x"), Some(true), Some(true)),
            ("Exists", Flag, Some(true), Some(true)),
            ("Exists", Missing, Some(false), Some(false)),
            ("Exists a", Value("x"), Some(true), None),
            ("DoesNotExist", Value("x"), Some(false), Some(false)),
            ("DoesNotExist", Flag, Some(false), Some(false)),
            ("DoesNotExist", Missing, Some(true), Some(true)),
            ("In a b", Value("b"), Some(true), Some(true)),
            ("In a b", Value("c"), Some(false), Some(false)),
            ("In a b", Missing, Some(false), Some(false)),
            ("In a b", Flag, Some(false), Some(false)),
            ("In", Value("a"), Some(false), None),
            ("NotIn a b", Value("b"), Some(false), Some(false)),
            ("NotIn a b", Value("c"), Some(true), Some(true)),
            // The formats differ.
            ("NotIn a b", Missing, Some(true), Some(false)),
            ("NotIn a b", Flag, Some(false), Some(false)),
            ("InRegexp ^AVX 512$", Value("AVX2"), Some(true), Some(true)),
            (r"InRegexp ^\w+\d$", Value("AVX2"), Some(true), Some(true)),
            (r"InRegexp ^\w.\d+$", Value("Å5"), Some(false), Some(false)),
            ("InRegexp VX", Value("AVX2"), Some(true), Some(true)),
            ("InRegexp ^VX", Value("AVX2"), Some(false), Some(false)),
            ("InRegexp ^AVX", Missing, Some(false), Some(false)),
            ("InRegexp [ ^A", Value("AVX2"), Some(true), None),
            ("InRegexp [", Value("["), Some(false), None),
            ("InRegexp (a{500}){500}", Value("a"), Some(false), None),
            ("Gt 4", Value("5"), Some(true), Some(true)),
            ("Gt 4", Value("4"), Some(false), Some(false)),
            ("Gt 4", Value("-5"), Some(false), Some(false)),
            ("Gt 4", Value("five"), Some(false), Some(false)),
            ("Gt 4", Value(""), Some(false), Some(false)),
            ("Gt 4", Value("5.1"), Some(false), Some(false)),
            ("Gt 4", Missing, Some(false), Some(false)),
            ("Gt 4 9", Value("5"), Some(true), None),
            ("Gt four", Value("5"), None, None),
            ("Gt", Value("5"), None, None),
            ("Lt 4", Value("3"), Some(true), Some(true)),
            ("Lt 4", Value("4"), Some(false), Some(false)),
            ("Gte 4", Value("4"), Some(true), None),
            ("Gte 4", Value("3"), Some(false), None),
            (
                "Gte -9223372036854775808",
                Value("-9223372036854775808"),
                Some(true),
                None,
            ),
            ("Lte 4", Value("4"), Some(true), None),
            ("Lte 4", Value("5"), Some(false), None),
            (
                "Lte 9223372036854775807",
                Value("9223372036854775807"),
                Some(true),
                None,
            ),
            ("GtLt 2 5", Value("3"), None, Some(true)),
            ("GtLt 2 5", Value("2"), None, Some(false)),
            ("GtLt 2 5", Value("5"), None, Some(false)),
            ("GtLt 5 2", Value("3"), None, None),
            ("GtLt 2 2", Value("2"), None, None),
            ("GtLt 2", Value("3"), None, None),
            ("IsTrue", Value("true"), None, Some(true)),
            ("IsTrue", Value("True"), None, Some(false)),
            ("IsTrue", Missing, None, Some(false)),
            ("IsTrue", Flag, None, Some(false)),
            ("IsFalse", Value("false"), None, Some(true)),
            ("IsFalse", Value("true"), None, Some(false)),
            ("IsFalse", Missing, None, Some(false)),
            ("Any", Missing, None, Some(true)),
            ("exists", Value("x"), None, None),
        ] {
            for (format, expected) in [(Labels, labels), (Features, features)] {
                let found = expression(format, text).ok();
                let found = found.map(|expression| expression.holds(fact));
                assert_eq!(found, expected, "{format:?}: {text} for {fact:?}");
            }
        }
    }

    proptest! {
        /// Exactly one of an operator and its negation holds for a value.
        #[test]
        fn a_negation_is_one(
            values in prop::collection::vec("[a-c]{1,2}", 1..4), value in "[a-c]{1,2}",
            bound in any::<i64>(), number in any::<i64>(),
        ) {
            let holds = |format, operator: &str, values: &[String], value: &str| {
                Expression::new(format, operator, values).unwrap().holds(Fact::Value(value))
            };
            for format in [Labels, Features] {
                prop_assert_ne!(holds(format, "In", &values, &value), holds(format, "NotIn", &values, &value));
                prop_assert_ne!(holds(format, "Exists", &[], &value), holds(format, "DoesNotExist", &[], &value));
            }
            let (bound, number) = ([bound.to_string()], number.to_string());
            prop_assert_ne!(holds(Labels, "Gt", &bound, &number), holds(Labels, "Lte", &bound, &number));
            prop_assert_ne!(holds(Labels, "Lt", &bound, &number), holds(Labels, "Gte", &bound, &number));
        }
    }
}
