//! Compatibility documents: rules in the formats of ocifit-k8s and of Node Feature Discovery.

mod platforms;
mod raw;

use crate::text::brief;

use raw::{RawDocument, RawExpression, RawExpressions, RawMatch, RawRule};

use super::{
    Expression, FeatureKeys, FeatureMatch, InvalidDocument, InvalidExpression, LabelKeys, Model,
    NodeFacts, Rule, RuleKeys, WrittenExpression,
    limits::{self, COST_OF_PATTERN, MAX_ENTRIES, MAX_EXPRESSIONS, MAX_TEXT, MEMORY_OF_PATTERN},
    variables::Variables,
    work::Work,
};

/// Maximum characters of a description.
const MAX_DESCRIPTION: usize = 256;

#[derive(Clone, Debug)]
pub struct CompatibilityDocument {
    /// The kind of keys in its rules.
    pub keys: RuleKeys,
    /// The entries, in their written order.
    pub entries: Vec<Compatibility>,
    /// The node labels that the rules read.
    pub labels: LabelKeys,
    /// The features of NFD that the rules read.
    pub features: FeatureKeys,
    /// The models that choose; the rules decide if no model can.
    pub models: Vec<Model>,
    /// The digest of the image that the document is for, if its artifact names one.
    pub subject: Option<String>,
    /// The cost of the expressions, limited by `MAX_EXPRESSIONS`. Each value costs one, and so
    /// does an expression without values. With `InRegexp`, each costs `COST_OF_PATTERN`.
    pub(crate) cost: usize,
    /// The bytes that it takes in memory, at most.
    pub(crate) memory: usize,
    /// The work of evaluating it for a node.
    pub(super) work: Work,
}

/// One entry: its image or group, with rules for nodes.
#[derive(Clone, Debug)]
pub struct Compatibility {
    /// Its position among the entries.
    pub index: usize,
    /// The image reference in documents of ocifit-k8s; the name of a group of entries in documents
    /// of NFD.
    pub tag: String,
    /// A text for people; it decides nothing.
    pub description: String,
    /// The fitting entry with the highest weight is chosen.
    pub weight: i64,
    /// Rules, `ANDed`. Without rules the entry fits everywhere.
    pub rules: Vec<Rule>,
}

impl CompatibilityDocument {
    /// Replaces the rules by those of another document; the models stay.
    pub(super) fn add_rules(&mut self, rules: Self) {
        let models = std::mem::take(&mut self.models);
        let memory = self.memory + rules.memory;
        *self = Self {
            models,
            memory,
            ..rules
        };
    }

    pub fn without_rules() -> Self {
        Self {
            keys: RuleKeys::Labels,
            entries: Vec::new(),
            labels: LabelKeys::default(),
            features: FeatureKeys::default(),
            models: Vec::new(),
            subject: None,
            cost: 0,
            memory: 0,
            work: Work::default(),
        }
    }

    /// Parses a document.
    ///
    /// # Errors
    ///
    /// When the bytes are not a document of this format, or too large. An invalid expression is no
    /// error: its rule holds nowhere.
    pub fn parse(keys: RuleKeys, bytes: &[u8]) -> Result<Self, InvalidDocument> {
        let (raw, memory) = limits::parse::<RawDocument>(bytes)?;
        let mut count = Count::default();
        let mut variables = Variables::default();
        let entries = raw.compatibilities.into_iter().enumerate();
        let entries = entries.map(|(index, raw)| {
            variables.begin_entry();
            Compatibility {
                index,
                tag: raw.tag,
                description: brief(&raw.description, MAX_DESCRIPTION),
                weight: raw.weight,
                rules: raw
                    .rules
                    .into_iter()
                    .map(|raw| rule(keys, raw, &mut variables, &mut count))
                    .collect(),
            }
        });
        let entries: Vec<_> = entries.take(MAX_ENTRIES + 1).collect();
        if entries.len() > MAX_ENTRIES || count.is_exceeded() {
            return Err(InvalidDocument::TooManyEntries);
        }
        let rules = entries.iter().flat_map(|entry| &entry.rules);
        let conditions =
            rules.flat_map(|rule| rule.features.iter().chain(rule.any.iter().flatten()));
        Ok(Self {
            keys,
            features: FeatureKeys::from_conditions(conditions.clone()),
            labels: LabelKeys::from_conditions(conditions),
            models: Vec::new(),
            subject: None,
            cost: count.cost,
            memory: memory + count.patterns * MEMORY_OF_PATTERN,
            work: Work::of_rules(entries.iter().flat_map(|entry| &entry.rules)),
            entries,
        })
    }
}

/// The cost of a document's expressions, and the number of their patterns.
#[derive(Default)]
struct Count {
    cost: usize,
    patterns: usize,
}

impl Count {
    fn add(&mut self, raw: &RawExpression) {
        let values = raw.value.len();
        let mut cost = values.max(1);
        if raw.op == "InRegexp" {
            self.patterns = self.patterns.saturating_add(values);
            cost = cost.saturating_mul(COST_OF_PATTERN);
        }
        self.cost = self.cost.saturating_add(cost);
    }

    fn is_exceeded(&self) -> bool {
        self.cost > MAX_EXPRESSIONS
    }
}

fn rule(keys: RuleKeys, raw: RawRule, variables: &mut Variables, count: &mut Count) -> Rule {
    let mut invalid = None;
    let mut compile = |raw: &RawExpression| {
        count.add(raw);
        if count.is_exceeded() {
            // The document exceeds a limit and will be refused, so no more patterns are compiled.
            return None;
        }
        let written = WrittenExpression {
            operator: &raw.op,
            values: &raw.value,
            value_type: &raw.value_type,
        };
        let compiled = Expression::new(keys, written);
        compiled
            .map_err(|error: InvalidExpression| invalid = Some(error))
            .ok()
    };
    let mut conditions = |raw: Vec<RawMatch>| -> Vec<FeatureMatch> {
        let compiled = raw
            .into_iter()
            .map(|raw| condition(keys, raw, &mut compile));
        compiled
            .filter_map(|condition| variables.simplify(condition))
            .collect()
    };
    let features = conditions(raw.match_features);
    let any = raw.match_any.into_iter();
    let any = any.map(|raw| conditions(raw.match_features)).collect();
    variables.add(raw.vars, &raw.vars_template);
    Rule {
        name: brief(&raw.name, MAX_TEXT),
        features,
        any,
        invalid,
    }
}

fn condition(
    keys: RuleKeys,
    raw: RawMatch,
    compile: &mut impl FnMut(&RawExpression) -> Option<Expression>,
) -> FeatureMatch {
    let expressions = raw.match_expressions.map(|raw| {
        let raw_expressions: Vec<_> = match raw {
            RawExpressions::Labels(list) => list
                .into_iter()
                .map(|raw| (raw.key, raw.expression))
                .collect(),
            RawExpressions::Elements(map) => map.into_iter().collect(),
        };
        let compiled = raw_expressions
            .into_iter()
            .filter_map(|(key, raw)| Some((key, compile(&raw)?)));
        compiled.collect::<Vec<_>>()
    });
    match keys {
        RuleKeys::Labels => FeatureMatch::Labels(expressions.unwrap_or_default()),
        RuleKeys::Features => FeatureMatch::Feature {
            feature: raw.feature.to_lowercase(),
            elements: expressions,
            name: raw.match_name.as_ref().and_then(compile),
        },
    }
}

impl CompatibilityDocument {
    /// The entries that can be chosen, the best first: by weight, then in their written order.
    /// Entries with a negative weight are left out, and so are entries that name no image.
    pub fn candidates(&self) -> Vec<&Compatibility> {
        let mut candidates: Vec<_> = self
            .entries
            .iter()
            .filter(|entry| entry.weight >= 0 && !self.lacks_image(entry))
            .collect();
        candidates.sort_by_key(|entry| std::cmp::Reverse(entry.weight));
        candidates
    }

    /// Whether an entry of a list of images names none.
    pub fn lacks_image(&self, entry: &Compatibility) -> bool {
        self.keys == RuleKeys::Labels && entry.tag.is_empty()
    }

    /// Whether two entries are about the same image.
    pub(super) fn same_image(&self, entry: &Compatibility, other: &Compatibility) -> bool {
        self.keys == RuleKeys::Features || entry.tag == other.tag
    }
}

impl Compatibility {
    /// Whether a node satisfies its rules.
    pub fn fits(&self, node: NodeFacts<'_>) -> bool {
        self.rules.iter().all(|rule| rule.holds(node))
    }
}

#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;
