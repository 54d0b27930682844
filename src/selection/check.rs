//! Checks a compatibility document for given nodes, without a cluster.

use std::collections::BTreeMap;

use super::{
    alternatives::alternative,
    compatibility::{
        Candidate, Choice, CompatibilityDocument, Fits, FitsWork, ImageFit, InvalidDocument,
        NodeFacts, NodeGroup, RuleKeys, TooMuchWork,
    },
};

/// A node by its labels.
#[derive(Clone, Debug)]
pub struct CheckedNode {
    /// Its name in the result.
    pub name: String,
    /// The labels, also those of Node Feature Discovery.
    pub labels: BTreeMap<String, String>,
}

/// The result for a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The format, and the number of entries and rules.
    pub summary: String,
    /// Rules that hold nowhere, and why.
    pub invalid: Vec<String>,
    /// The result for each node.
    pub nodes: Vec<NodeResult>,
}

/// The result for a node, if a pod could run there only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeResult {
    /// The name of the node.
    pub name: String,
    /// The entries in their order.
    pub entries: Vec<EntryResult>,
}

/// The result for an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryResult {
    /// Its image or group.
    pub tag: String,
    /// The weight in the document.
    pub weight: i64,
    /// Whether it is chosen for the node.
    pub chosen: bool,
    /// Why it is chosen, or not.
    pub outcome: String,
}

/// Why a document cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// It is not a document.
    #[error(transparent)]
    Document(#[from] InvalidDocument),
    /// Its rules need too much work for a node.
    #[error(transparent)]
    Work(#[from] TooMuchWork),
}

/// The kind of keys in the rules of a document: features if a rule names one.
pub fn guess_keys(bytes: &[u8]) -> RuleKeys {
    let as_features = CompatibilityDocument::parse(RuleKeys::Features, bytes);
    let names_feature = as_features.is_ok_and(|document| document.features.names_any());
    if names_feature {
        RuleKeys::Features
    } else {
        RuleKeys::Labels
    }
}

/// Checks a document. The images themselves are not read: each is taken to run on every node.
///
/// # Errors
///
/// When the bytes are not a document, or its rules need too much work.
pub fn check(keys: RuleKeys, bytes: &[u8], nodes: &[CheckedNode]) -> Result<Checked, CheckError> {
    let document = CompatibilityDocument::parse(keys, bytes)?;
    let rules = document.entries.iter().map(|entry| entry.rules.len());
    let what = match keys {
        RuleKeys::Labels => "a list of images, with rules on node labels",
        RuleKeys::Features => "rules of Node Feature Discovery",
    };
    let count = |count: usize, one: &str, many: &str| {
        let noun = if count == 1 { one } else { many };
        format!("{count} {noun}")
    };
    let summary = format!(
        "{what}: {}, {}",
        count(document.entries.len(), "entry", "entries"),
        count(rules.sum(), "rule", "rules")
    );
    let mut invalid = Vec::new();
    for entry in &document.entries {
        for (index, rule) in entry.rules.iter().enumerate() {
            let why = rule.invalid.as_ref();
            invalid.extend(why.map(|why| format!("{}, rule {}: {why}", entry.tag, index + 1)));
        }
        if document.lacks_image(entry) {
            invalid.push(format!("entry {} names no image (tag)", entry.index + 1));
        }
    }
    let results = nodes.iter().map(|node| {
        let entries = entries(&document, node)?;
        Ok(NodeResult {
            name: node.name.clone(),
            entries,
        })
    });
    Ok(Checked {
        summary,
        invalid,
        nodes: results.collect::<Result<_, TooMuchWork>>()?,
    })
}

/// The result for each entry, for a pod that can run on this node only.
fn entries(
    document: &CompatibilityDocument,
    node: &CheckedNode,
) -> Result<Vec<EntryResult>, TooMuchWork> {
    let group = NodeGroup {
        index: 0,
        facts: NodeFacts {
            labels: &node.labels,
            features: None,
        },
        architecture: "",
        variant: None,
        hosts: &[],
        count: 1,
    };
    let groups = [group];
    FitsWork::new(document, &groups)?;
    let fits = Fits::new(document, groups.into_iter());
    let runs = |_: &_, _: &NodeGroup<'_>| ImageFit::Runs;
    // The list of candidates explains why nothing is chosen.
    let choice = Choice::choose(document, &groups, &fits, &runs).ok();
    let candidates = Candidate::list(document, choice.as_ref(), &groups, &fits, &runs);
    let results = candidates.iter().map(|candidate| {
        let alternative = alternative(candidate);
        EntryResult {
            tag: alternative.tag,
            weight: candidate.weight,
            chosen: alternative.chosen,
            outcome: alternative.outcome,
        }
    });
    Ok(results.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> CheckedNode {
        let labels = labels.iter();
        CheckedNode {
            name: name.to_owned(),
            labels: labels
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn the_chosen_entry_and_the_reasons_against_the_others() {
        let images = br#"{"compatibilities": [
            {"tag": "app:generic"},
            {"tag": "app:large", "weight": 9, "rules": [{"matchFeatures": [{"matchExpressions": [
                {"key": "memory", "op": "Gte", "value": ["64"]}]}]}]},
            {"tag": "app:odd", "rules": [{"matchFeatures": [{"matchExpressions": [
                {"key": "memory", "op": "Near", "value": ["64"]}]}]}]}
        ]}"#;
        assert_eq!(guess_keys(images), RuleKeys::Labels);
        let nodes = [
            node("small", &[("memory", "32")]),
            node("large", &[("memory", "64")]),
        ];
        let checked = check(RuleKeys::Labels, images, &nodes).unwrap();
        assert_eq!(
            checked.invalid,
            ["app:odd, rule 1: unknown operator \"Near\""]
        );
        let chosen = |node: &NodeResult| {
            let mut chosen = node.entries.iter().filter(|entry| entry.chosen);
            chosen.next().map(|entry| entry.tag.clone())
        };
        assert_eq!(chosen(&checked.nodes[0]).as_deref(), Some("app:generic"));
        assert_eq!(chosen(&checked.nodes[1]).as_deref(), Some("app:large"));
        assert_eq!(
            checked.nodes[0].entries[1].outcome,
            "rule 1 fails on 1 node (memory > 63, found 32)"
        );
        let features = b"compatibilities: [{rules: [{matchFeatures: [
            {feature: cpu.cpuid, matchExpressions: {AVX2: {op: Exists}}}]}]}]";
        assert_eq!(guess_keys(features), RuleKeys::Features);
        let avx = "feature.node.kubernetes.io/cpu-cpuid.AVX2";
        let nodes = [node("new", &[(avx, "true")]), node("old", &[])];
        let checked = check(RuleKeys::Features, features, &nodes).unwrap();
        assert!(chosen(&checked.nodes[0]).is_some() && chosen(&checked.nodes[1]).is_none());
        let why = &checked.nodes[1].entries[0].outcome;
        assert!(why.contains("nothing is known of cpu.cpuid"), "{why}");
        assert!(check(RuleKeys::Labels, b"kind: Pod", &[]).is_err());
    }
}
