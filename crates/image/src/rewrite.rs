//! `registries.rewrites`: resolves images under another name than the pod uses.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::reference::{Reference, ReferenceError};

/// One rule of `registries.rewrites`. A slash at the end has no meaning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rewrite {
    /// Whole components of a normalised name: `docker.io`, `docker.io/library`.
    #[serde(deserialize_with = "without_slash")]
    pub prefix: String,
    /// The components that replace the prefix.
    #[serde(deserialize_with = "without_slash")]
    pub replacement: String,
}

fn without_slash<'de, D: Deserializer<'de>>(text: D) -> Result<String, D::Error> {
    let text = String::deserialize(text)?;
    Ok(text.trim_end_matches('/').to_owned())
}

/// Applies each rule once, in order, to the result of the previous rule. The result replaces the
/// original name everywhere.
pub(crate) fn rewrite(
    reference: Reference,
    rules: &[Rewrite],
) -> Result<Reference, ReferenceError> {
    let original = reference.to_string();
    let mut name = Cow::Borrowed(original.as_str());
    for Rewrite {
        prefix,
        replacement,
    } in rules
    {
        let Some(rest) = name.strip_prefix(prefix.as_str()) else {
            continue;
        };
        // Whole components only: `docker.io` matches neither `docker.io.example.com` nor
        // `docker.io:5000`.
        let tagged = prefix.contains('/') && rest.starts_with([':', '@']);
        if rest.starts_with('/') || tagged {
            name = Cow::Owned(format!("{replacement}{rest}"));
        }
    }
    match name {
        Cow::Borrowed(_) => Ok(reference),
        Cow::Owned(name) => Reference::parse(&name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(image: &str, rules: &[(&str, &str)]) -> Result<String, ReferenceError> {
        let rule = |(prefix, replacement): &(&str, &str)| Rewrite {
            prefix: (*prefix).to_owned(),
            replacement: (*replacement).to_owned(),
        };
        let rules: Vec<_> = rules.iter().map(rule).collect();
        rewrite(Reference::parse(image).unwrap(), &rules).map(|reference| reference.to_string())
    }

    #[test]
    fn whole_components_are_replaced_rule_by_rule() {
        let hub = ("docker.io", "mirror.local/hub");
        for (image, rules, expected) in [
            ("nginx", &[hub][..], "mirror.local/hub/library/nginx:latest"),
            (
                "docker.io.example.com/x",
                &[hub],
                "docker.io.example.com/x:latest",
            ),
            ("a.io/team/app:v1", &[("a.io/team", "b.io")], "b.io/app:v1"),
            (
                "a.io/teams/app:v1",
                &[("a.io/team", "b.io")],
                "a.io/teams/app:v1",
            ),
            (
                "a.io/app:v1",
                &[("a.io/app", "b.io/other")],
                "b.io/other:v1",
            ),
            ("a.io:5000/app", &[("a.io", "b.io")], "a.io:5000/app:latest"),
            (
                "nginx",
                &[hub, ("mirror.local", "far.example:5000")],
                "far.example:5000/hub/library/nginx:latest",
            ),
            (
                "a.io/x",
                &[("a.io", "b.io"), ("a.io", "c.io")],
                "b.io/x:latest",
            ),
            ("a.io/x", &[("b.io", "c.io")], "a.io/x:latest"),
        ] {
            assert_eq!(
                rewritten(image, rules).unwrap(),
                expected,
                "{image} {rules:?}"
            );
        }
        assert!(rewritten("nginx", &[("docker.io", "Not A Name")]).is_err());
    }
}
