//! Rules of compatibility documents: which nodes an entry is for.

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
    /// Why the rule holds nowhere, if one of its expressions is invalid.
    pub invalid: Option<InvalidExpression>,
}

/// A condition. Its expressions are `ANDed`.
#[derive(Clone, Debug)]
pub enum FeatureMatch {
    /// A condition on node labels.
    Labels(Vec<(String, Expression)>),
    /// A condition on the elements of a feature of NFD.
    Feature {
        /// Name of the feature in lower case, e.g. `cpu.cpuid`.
        feature: String,
        /// Conditions on the elements of these names.
        elements: Option<Vec<(String, Expression)>>,
        /// A condition on the name of some element.
        name: Option<Expression>,
    },
    /// A condition on variables that never holds here: it is false, or it would depend on the node
    /// (see `Variables`).
    Never,
}

impl Rule {
    /// Whether the rule holds for a node.
    pub fn holds(&self, node: NodeFacts<'_>) -> bool {
        let all_hold = |list: &[FeatureMatch]| list.iter().all(|condition| condition.holds(node));
        let any_holds = self.any.is_empty() || self.any.iter().any(|list| all_hold(list));
        self.invalid.is_none() && any_holds && all_hold(&self.features)
    }
}

impl FeatureMatch {
    /// The number of its expressions, and one for itself.
    pub(super) fn size(&self) -> usize {
        let expressions = match self {
            Self::Labels(expressions) => expressions.len(),
            Self::Feature { elements, name, .. } => {
                elements.as_ref().map_or(0, Vec::len) + usize::from(name.is_some())
            }
            Self::Never => 0,
        };
        1 + expressions
    }

    fn holds(&self, node: NodeFacts<'_>) -> bool {
        match self {
            Self::Labels(expressions) => {
                let mut pairs = expressions.iter();
                pairs.all(|(key, expression)| expression.holds(node.label(key)))
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

/// Whether a feature satisfies the expressions on its elements, and the name of at least one
/// element satisfies `name`.
pub(super) fn satisfies(
    feature: Feature<'_>,
    elements: Option<&[(String, Expression)]>,
    name: Option<&Expression>,
) -> bool {
    let by_name =
        name.is_none_or(|expression| feature.has_name(|name| expression.holds(Fact::Value(name))));
    by_name && elements.is_none_or(|expressions| satisfies_elements(feature, expressions))
}

/// Evaluates flags and attributes together. Otherwise one instance has to satisfy all expressions
/// by itself (`MatchMulti` of NFD).
fn satisfies_elements(feature: Feature<'_>, expressions: &[(String, Expression)]) -> bool {
    let mut pairs = expressions.iter();
    let by_names = feature.has_names()
        && pairs.all(|(key, expression)| {
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
            let mut instance_pairs = expressions.iter();
            instance_pairs.all(|(key, expression)| expression.holds(instance.attribute(key)))
        })
}
