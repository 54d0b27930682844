//! Why a rule does not hold for a node, in words.

use crate::text::brief;

use super::{Expression, Fact, FeatureMatch, NodeFacts, Rule, limits::MAX_TEXT, rule::satisfies};

impl Rule {
    /// The first condition that a node does not satisfy, and what the node has. `None` if the rule
    /// holds, or holds nowhere because it is invalid.
    pub(super) fn failure(&self, node: NodeFacts<'_>) -> Option<String> {
        if self.invalid.is_some() {
            return None;
        }
        let mut conditions = self.features.iter();
        let failure = conditions.find_map(|condition| condition.failure(node));
        failure.or_else(|| {
            // The last list stands for all.
            let last = self.any.last().filter(|_| !self.holds(node))?;
            last.iter().find_map(|condition| condition.failure(node))
        })
    }
}

impl FeatureMatch {
    fn failure(&self, node: NodeFacts<'_>) -> Option<String> {
        match self {
            Self::Labels(expressions) => expressions.iter().find_map(|(key, expression)| {
                let fact = node.label(key);
                (!expression.holds(fact)).then(|| say(key, expression, fact))
            }),
            Self::Feature {
                feature,
                elements,
                name,
            } => {
                let Some(found) = node.feature(feature) else {
                    return Some(format!("nothing is known of {}", brief(feature, MAX_TEXT)));
                };
                if satisfies(found, elements.as_deref(), name.as_ref()) {
                    return None;
                }
                let found = node.feature(feature)?;
                let failing = elements.iter().flatten().find_map(|(key, expression)| {
                    let element = [(key.clone(), expression.clone())];
                    let is_satisfied = satisfies(node.feature(feature)?, Some(&element), None);
                    let fact = found.attribute(key).or_else(|| found.flag(key));
                    let key = format!("{feature} {key}");
                    (!is_satisfied).then(|| say(&key, expression, fact.unwrap_or(Fact::Missing)))
                });
                Some(failing.unwrap_or_else(|| {
                    let feature = brief(feature, MAX_TEXT);
                    match name {
                        Some(name) => format!("no name of {feature} {}", name.describe()),
                        None => format!("no part of {feature} has all elements"),
                    }
                }))
            }
            Self::Never => Some("it reads a variable that no rule before it sets".to_owned()),
        }
    }
}

/// For example `memory >= 64, found 32`.
fn say(key: &str, expression: &Expression, fact: Fact<'_>) -> String {
    let found = match fact {
        Fact::Missing => "but it is missing".to_owned(),
        Fact::Flag => "but it is set".to_owned(),
        Fact::Value(value) => format!("found {}", brief(value, MAX_TEXT)),
    };
    format!(
        "{} {}, {found}",
        brief(key, MAX_TEXT),
        expression.describe()
    )
}
