use proptest::prelude::*;

use super::*;

use Fact::{Flag, Missing, Value};
use RuleKeys::{Features, Labels};

/// Parses `operator:type value value`; the type and the values may be missing.
fn expression(keys: RuleKeys, text: &str) -> Result<Expression, InvalidExpression> {
    let mut words = text.split(' ');
    let operator = words.next().unwrap();
    let (operator, value_type) = operator.split_once(':').unwrap_or((operator, ""));
    let written = WrittenExpression {
        operator,
        values: &words.map(str::to_owned).collect::<Vec<_>>(),
        value_type,
    };
    Expression::new(keys, written)
}

/// An expression, a fact, and whether the expression holds for it in documents of ocifit-k8s and of
/// NFD; `None` if the expression is invalid there.
type Row = (&'static str, Fact<'static>, Option<bool>, Option<bool>);

fn check(rows: &[Row]) {
    for (text, fact, labels, features) in rows {
        for (format, expected) in [(Labels, labels), (Features, features)] {
            let found = expression(format, text).ok();
            let found = found.map(|expression| expression.holds(*fact));
            assert_eq!(found, *expected, "{format:?}: {text} for {fact:?}");
        }
    }
}

/// Every operator on texts, in both formats. Expected results follow the formats' documentation.
#[test]
fn every_operator() {
    check(&[
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
        ("IsTrue", Value("true"), None, Some(true)),
        ("IsTrue", Value("True"), None, Some(false)),
        ("IsTrue", Missing, None, Some(false)),
        ("IsTrue", Flag, None, Some(false)),
        ("IsFalse", Value("false"), None, Some(true)),
        ("IsFalse", Value("true"), None, Some(false)),
        ("IsFalse", Missing, None, Some(false)),
        ("In:version 6.1", Value("6.1"), Some(true), Some(true)),
        ("", Missing, None, Some(true)),
        ("", Flag, None, Some(true)),
        (" a", Value("a"), None, None),
        ("Any", Value("x"), None, None),
        ("exists", Value("x"), None, None),
    ]);
}

/// Every operator that compares numbers or versions.
#[test]
fn every_comparison() {
    check(&[
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
        ("Ge 4", Value("4"), None, Some(true)),
        ("Ge 4", Value("3"), None, Some(false)),
        ("Ge 4", Missing, None, Some(false)),
        ("Le 4", Value("4"), None, Some(true)),
        ("Le 4", Value("5"), None, Some(false)),
        ("Le", Value("5"), None, None),
        ("GeLe 2 5", Value("2"), None, Some(true)),
        ("GeLe 2 5", Value("5"), None, Some(true)),
        ("GeLe 2 5", Value("6"), None, Some(false)),
        ("GeLe 2 5", Value("two"), None, Some(false)),
        ("GeLe 5 2", Value("3"), None, None),
        ("GeLe 2", Value("2"), None, None),
        // ocifit-k8s has no types.
        ("Gt:version 6.1", Value("6.2"), None, Some(true)),
        ("Gt:version 4", Value("5"), Some(true), Some(true)),
        ("Gt:version 6.9", Value("6.10"), None, Some(true)),
        ("Gt:version 6.1", Value("6.1.0"), None, Some(false)),
        ("Gt:version 6.1", Value("six"), None, Some(false)),
        ("Gt:version 6.1", Flag, None, Some(false)),
        ("Gt:version six", Value("6.1"), None, None),
        ("Gt:version 6.1 6.2", Value("6.3"), None, None),
        ("Ge:version 6.1", Value("6.1.0-18-amd64"), None, Some(true)),
        ("Lt:version 6.1", Value("6.0.9"), None, Some(true)),
        ("Lt:version 6.1", Value("6.1"), None, Some(false)),
        ("Le:version 6.1", Value("6.1"), None, Some(true)),
        ("GtLt:version 5.4 6.1", Value("5.15"), None, Some(true)),
        ("GtLt:version 5.4 6.1", Value("6.1"), None, Some(false)),
        ("GeLe:version 5.4 6.1", Value("6.1"), None, Some(true)),
        ("GeLe:version 5.4", Value("6.1"), None, None),
        ("GeLe:version 6.1 5.4", Value("5.5"), None, Some(false)),
        ("Gt:semver 5.4", Value("6.1"), None, None),
    ]);
}

proptest! {
    /// Exactly one of an operator and its negation holds for a value.
    #[test]
    fn a_negation_is_one(
        values in prop::collection::vec("[a-c]{1,2}", 1..4), value in "[a-c]{1,2}",
        bound in any::<i64>(), number in any::<i64>(),
    ) {
        let holds = |format, operator: &str, values: &[String], value: &str| {
            let written = WrittenExpression { operator, values, value_type: "" };
            Expression::new(format, written).unwrap().holds(Fact::Value(value))
        };
        for format in [Labels, Features] {
            prop_assert_ne!(holds(format, "In", &values, &value), holds(format, "NotIn", &values, &value));
            prop_assert_ne!(holds(format, "Exists", &[], &value), holds(format, "DoesNotExist", &[], &value));
        }
        let (bound, number) = ([bound.to_string()], number.to_string());
        prop_assert_ne!(holds(Labels, "Gt", &bound, &number), holds(Labels, "Lte", &bound, &number));
        prop_assert_ne!(holds(Labels, "Lt", &bound, &number), holds(Labels, "Gte", &bound, &number));
        prop_assert_ne!(holds(Features, "Gt", &bound, &number), holds(Features, "Le", &bound, &number));
        prop_assert_ne!(holds(Features, "Lt", &bound, &number), holds(Features, "Ge", &bound, &number));
    }
}
