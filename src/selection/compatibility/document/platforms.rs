//! Merges the documents that are attached to the images of an index, one for each platform, into
//! one document.

use crate::{placement::affinity::LABEL as ARCHITECTURE, platform::Platform};

use super::super::{
    Compatibility, CompatibilityDocument, Expression, FeatureMatch, InvalidDocument, LabelKeys,
    Rule, RuleKeys, WrittenExpression,
    limits::{MAX_ENTRIES, MAX_EXPRESSIONS, MAX_MEMORY},
    work::Work,
};

/// The label of nodes for their OS.
const OS: &str = "kubernetes.io/os";

impl CompatibilityDocument {
    /// The document of an image, made from the documents of its platforms. A platform without a
    /// document puts no requirement on its nodes.
    ///
    /// # Errors
    ///
    /// When the documents are too large together.
    pub fn of_platforms<'a>(
        documents: impl IntoIterator<Item = (&'a Platform, Option<&'a Self>)>,
    ) -> Result<Self, InvalidDocument> {
        let mut whole = Self::without_rules();
        whole.keys = RuleKeys::Features;
        let documents: Vec<_> = documents.into_iter().collect();
        // The runtime decides which of several variants a node pulls, so the variants with a
        // document also limit the variants without a document.
        let is_same = |platform: &Platform, other: &Platform| {
            (platform.os(), platform.architecture()) == (other.os(), other.architecture())
        };
        let is_limited = |platform: &Platform| {
            let mut documented = documents.iter().filter(|(_, document)| document.is_some());
            documented.any(|(other, _)| is_same(platform, other))
        };
        for (platform, document) in documents.iter().copied() {
            let rule = on_platform(platform)?;
            whole
                .labels
                .add(&LabelKeys::from_conditions(rule.features.iter()));
            let Some(document) = document else {
                if is_limited(platform) {
                    continue;
                }
                whole.entries.push(Compatibility {
                    index: 0,
                    tag: platform.to_string(),
                    description: String::new(),
                    weight: 0,
                    rules: vec![rule],
                });
                continue;
            };
            whole.labels.add(&document.labels);
            whole.features.add(&document.features);
            whole.cost = whole.cost.saturating_add(document.cost);
            whole.memory = whole.memory.saturating_add(document.memory);
            let entries = whole.entries.len() + document.entries.len();
            if whole.cost > MAX_EXPRESSIONS || whole.memory > MAX_MEMORY || entries > MAX_ENTRIES {
                return Err(InvalidDocument::TooManyEntries);
            }
            whole
                .entries
                .extend(document.entries.iter().cloned().map(|mut entry| {
                    if entry.tag.is_empty() {
                        entry.tag = platform.to_string();
                    }
                    // The last rule, so that the other rules keep their numbers.
                    entry.rules.push(rule.clone());
                    entry
                }));
        }
        for (index, entry) in whole.entries.iter_mut().enumerate() {
            entry.index = index;
        }
        whole.work = Work::of_rules(whole.entries.iter().flat_map(|entry| &entry.rules));
        Ok(whole)
    }
}

/// A rule for the nodes of a platform. It ignores variants, because container runtimes choose among
/// variants themselves.
fn on_platform(platform: &Platform) -> Result<Rule, InvalidDocument> {
    let expression_for = |value: &str| {
        let written = WrittenExpression {
            operator: "In",
            values: &[value.to_owned()],
            value_type: "",
        };
        Expression::new(RuleKeys::Labels, written).map_err(InvalidDocument::malformed)
    };
    let architecture = expression_for(platform.architecture().as_str())?;
    let mut expressions = vec![(ARCHITECTURE.to_owned(), architecture)];
    if let Some(os) = platform.os() {
        expressions.push((OS.to_owned(), expression_for(os.as_str())?));
    }
    Ok(Rule {
        name: platform.to_string(),
        features: vec![FeatureMatch::Labels(expressions)],
        any: Vec::new(),
        invalid: None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::selection::compatibility::NodeFacts;

    use super::*;

    fn platform(text: &str) -> Platform {
        let mut parts = text.split('/');
        let mut next = || parts.next().unwrap_or_default();
        Platform::new(next(), next(), next()).unwrap()
    }

    fn document(text: &str) -> CompatibilityDocument {
        CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes()).unwrap()
    }

    #[test]
    fn each_platform_has_its_own_rules() {
        let [amd64, arm64, windows] = ["linux/amd64", "linux/arm64", "windows/amd64"].map(platform);
        let avx = document(
            "compatibilities: [{weight: 5, rules: [{matchFeatures: [{feature: cpu.cpuid, matchExpressions: {AVX2: {op: Exists}}}]}]}]",
        );
        let whole = CompatibilityDocument::of_platforms([
            (&amd64, Some(&avx)),
            (&arm64, None),
            (&windows, Some(&document("compatibilities: []"))),
        ])
        .unwrap();
        assert_eq!(whole.features, avx.features);
        assert!(whole.labels.contains("kubernetes.io/os"));
        let avx2 = "feature.node.kubernetes.io/cpu-cpuid.AVX2";
        for (os, architecture, feature, expected) in [
            ("linux", "amd64", Some(avx2), vec![5]),
            ("linux", "amd64", None, vec![]),
            ("linux", "arm64", None, vec![0]),
            ("linux", "s390x", None, vec![]),
            // Its document has no entry.
            ("windows", "amd64", Some(avx2), vec![]),
        ] {
            let mut labels = BTreeMap::from([
                (OS.to_owned(), os.to_owned()),
                (ARCHITECTURE.to_owned(), architecture.to_owned()),
            ]);
            labels.extend(feature.map(|name| (name.to_owned(), "true".to_owned())));
            let facts = NodeFacts {
                labels: &labels,
                features: None,
            };
            let fitting = whole.entries.iter().filter(|entry| entry.fits(facts));
            let weights: Vec<_> = fitting.map(|entry| entry.weight).collect();
            assert_eq!(weights, expected, "{os} {architecture} {feature:?}");
        }
        let tags: Vec<_> = whole.entries.iter().map(|entry| &*entry.tag).collect();
        assert_eq!(tags, ["linux/amd64", "linux/arm64"]);
    }

    /// A node of v7 runs the image for v7, which has a document. The image for v6 has none.
    #[test]
    fn variants_without_a_document_do_not_open_those_that_have_one() {
        let [v6, v7] = ["linux/arm/v6", "linux/arm/v7"].map(platform);
        let v7_document = document("compatibilities: [{weight: 5}]");
        let documents = [(&v6, None), (&v7, Some(&v7_document))];
        let whole = CompatibilityDocument::of_platforms(documents).unwrap();
        let weights: Vec<_> = whole.entries.iter().map(|entry| entry.weight).collect();
        assert_eq!(weights, [5]);
    }

    #[test]
    fn their_size_is_limited_together() {
        let amd64 = platform("linux/amd64");
        let error_of = |count: usize, document: &CompatibilityDocument| {
            let documents = vec![(&amd64, Some(document)); count];
            CompatibilityDocument::of_platforms(documents).err()
        };
        let patterns = vec!["a"; 60].join(",");
        let patterns = document(&format!(
            "compatibilities: [{{rules: [{{matchFeatures: [{{feature: a.b, matchExpressions: {{c: {{op: InRegexp, value: [{patterns}]}}}}}}]}}]}}]"
        ));
        assert_eq!(
            (error_of(2, &patterns), error_of(3, &patterns)),
            (None, Some(InvalidDocument::TooManyEntries))
        );
        let entries = document(&format!("compatibilities: [{}]", vec!["{}"; 100].join(",")));
        assert_eq!(
            (error_of(2, &entries), error_of(3, &entries)),
            (None, Some(InvalidDocument::TooManyEntries))
        );
    }
}
