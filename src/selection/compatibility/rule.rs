//! Rules: which nodes an entry of a compatibility document is for.

use super::{Expression, Fact, InvalidExpression, NodeFacts, facts::Feature};

/// A rule. All of its conditions have to hold.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its name, which may be empty.
    pub name: String,
    /// Conditions, `ANDed`.
    pub features: Vec<FeatureMatch>,
    /// Lists of conditions, of which one list has to hold; ignored if there is no list.
    pub any: Vec<Vec<FeatureMatch>>,
    /// Why it holds nowhere, if one of its expressions means nothing.
    pub invalid: Option<InvalidExpression>,
}

/// A condition. Its expressions are `ANDed`.
#[derive(Clone, Debug)]
pub enum FeatureMatch {
    /// On node labels.
    Labels(Vec<(String, Expression)>),
    /// On the elements of a feature of NFD.
    Feature {
        /// Its name in lower case, e.g. `cpu.cpuid`.
        feature: String,
        /// On the elements of these names.
        elements: Option<Vec<(String, Expression)>>,
        /// On the name of some element.
        name: Option<Expression>,
    },
    /// On variables of rules that are not so, or depend on the node (`Variables`).
    Never,
}

impl Rule {
    /// Whether it holds for a node.
    pub fn holds(&self, node: NodeFacts<'_>) -> bool {
        let all = |list: &[FeatureMatch]| list.iter().all(|condition| condition.holds(node));
        let any = self.any.is_empty() || self.any.iter().any(|list| all(list));
        self.invalid.is_none() && any && all(&self.features)
    }
}

impl FeatureMatch {
    fn holds(&self, node: NodeFacts<'_>) -> bool {
        match self {
            Self::Labels(expressions) => {
                let mut all = expressions.iter();
                all.all(|(key, expression)| expression.holds(node.label(key)))
            }
            Self::Feature {
                feature,
                elements,
                name,
            } => node
                .feature(feature)
                .is_some_and(|feature| satisfies(feature, elements.as_deref(), name.as_ref())),
            Self::Never => false,
        }
    }
}

/// Whether the elements of a feature, and the name of some element, are as they have to be.
pub(super) fn satisfies(
    feature: Feature<'_>,
    elements: Option<&[(String, Expression)]>,
    name: Option<&Expression>,
) -> bool {
    let by_name =
        name.is_none_or(|expression| feature.has_name(|name| expression.holds(Fact::Value(name))));
    by_name && elements.is_none_or(|all| has(feature, all))
}

/// Flags and attributes are taken together; an instance has to satisfy all expressions by itself
/// (`MatchMulti` of NFD).
fn has(feature: Feature<'_>, expressions: &[(String, Expression)]) -> bool {
    let mut all = expressions.iter();
    let by_names = feature.has_names()
        && all.all(|(key, expression)| {
            let by_flag = feature.flag(key).map(|fact| expression.holds(fact));
            let by_attribute = feature.attribute(key).map(|fact| expression.holds(fact));
            if expression.is_absence() {
                by_flag != Some(false) && by_attribute != Some(false)
            } else {
                by_flag == Some(true) || by_attribute == Some(true)
            }
        });
    by_names
        || feature.instances().iter().any(|instance| {
            let mut all = expressions.iter();
            all.all(|(key, expression)| expression.holds(instance.attribute(key)))
        })
}
