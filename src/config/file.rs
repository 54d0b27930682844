//! Loads and validates the configuration file.

use std::path::Path;

use crate::files::{self, FileError};

use super::{
    Config,
    location::locate,
    mistakes::{Mistake, mistakes},
};

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// The file is not YAML, has a wrong structure, or has values that contradict each other.
    #[error("{}", lines(.0))]
    Malformed(Vec<ConfigProblem>),
}

/// A problem at a place of the file.
#[derive(Debug, thiserror::Error)]
#[error("{path}:{line}:{column}: {problem}")]
pub struct ConfigProblem {
    path: String,
    /// One-based; 0 when unknown.
    line: u64,
    /// One-based; 0 when unknown.
    column: u64,
    problem: String,
}

impl ConfigProblem {
    fn new(path: &str, place: Option<&serde_saphyr::Location>, problem: &str) -> Self {
        Self {
            path: path.to_owned(),
            line: place.map_or(0, serde_saphyr::Location::line),
            column: place.map_or(0, serde_saphyr::Location::column),
            problem: problem.to_owned(),
        }
    }
}

fn lines(problems: &[ConfigProblem]) -> String {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// Loads and validates the file; returns the defaults if there is none.
///
/// # Errors
///
/// When the file is unreadable, malformed or contradictory.
pub fn load(path: Option<&Path>) -> Result<Config, ConfigError> {
    let Some(path) = path else {
        return Ok(Config::default());
    };
    let text = files::read_text("the configuration ", path)?;
    parse(&path.display().to_string(), &text)
}

/// Parses and validates the text of a file called `path`.
///
/// # Errors
///
/// When the text is malformed or contradictory.
pub fn parse(path: &str, text: &str) -> Result<Config, ConfigError> {
    let options = serde_saphyr::options! { with_snippet: false };
    let config: Config = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let (location, message) = (error.location(), error.to_string());
        let problem = ConfigProblem::new(path, location.as_ref(), strip_location(&message));
        ConfigError::Malformed(vec![problem])
    })?;
    let problems = mistakes(&config).into_iter().map(|mistake| {
        let Mistake { keys, problem } = mistake;
        ConfigProblem::new(path, locate(text, keys).as_ref(), problem)
    });
    let problems: Vec<_> = problems.collect();
    if problems.is_empty() {
        Ok(config)
    } else {
        Err(ConfigError::Malformed(problems))
    }
}

/// The JSON schema of the file, for editors and CI.
pub fn schema() -> schemars::Schema {
    schemars::schema_for!(Config)
}

/// Removes the position from the parser's message, because the error begins with it.
fn strip_location(message: &str) -> &str {
    message
        .split(" at line ")
        .next()
        .unwrap_or(message)
        .trim_end_matches([':', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::without_effect;

    const HEAD: &str = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";

    #[test]
    fn an_empty_configuration_has_the_defaults_and_survives_printing() {
        let config = parse("c.yaml", HEAD).unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.concurrency.pods.get(), 4096);
        assert_eq!(config.resolution.cache.images.get(), 20_000);
        let printed = serde_saphyr::to_string(&config).unwrap();
        assert_eq!(parse("printed", &printed).unwrap(), config, "{printed}");
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, line, part) in [
            ("taint: {effect: Never}\n", 3, "Never"),
            (
                "taint:\n  key: \"a b\"\n",
                4,
                "cannot be the key of a taint or label",
            ),
            ("taint:\n  keys: a\n", 4, "unknown field"),
            ("resolution:\n  timeout: 5\n", 4, "duration"),
            ("resolution:\n  timeout: never\n", 4, "duration"),
            ("concurrency:\n  pods: 0\n", 4, "nonzero"),
            ("pods: []\n", 3, ""),
            ("pods: {mode: often}\n", 3, "often"),
            (
                "affinity: {preferred: [{architecture: arm64, weight: 0}]}\n",
                3,
                "1 to 100",
            ),
            (
                "tolerations: [{platforms: [arm64], toleration: {key: k}}]\n",
                3,
                "platform",
            ),
            (
                "tolerations: [{toleration: {key: k, operator: Exists, value: v}}]\n",
                3,
                "no value",
            ),
            (
                "tolerations: [{toleration: {key: k, value: \"a b\"}}]\n",
                3,
                "letters",
            ),
            (
                "tolerations: [{toleration: {key: \"\"}}]\n",
                3,
                "key of a taint",
            ),
            (
                "tolerations: [{toleration: {key: k, value: \"{arch}{arch}\"}}]\n",
                3,
                "once",
            ),
            ("admission: {listen: here}\n", 3, "address"),
            ("admission: {onMiss: never}\n", 3, "never"),
            ("compatibility: {\"a b\": []}\n", 3, "architecture"),
            ("pods: {}\npods: {}\n", 4, "uplicate"),
        ] {
            match parse("c.yaml", &format!("{HEAD}{text}")) {
                Err(ConfigError::Malformed(problems)) => {
                    let [found] = problems.as_slice() else {
                        panic!("{text}: {problems:?}")
                    };
                    assert_eq!(
                        (found.line, found.column > 0),
                        (line, true),
                        "{text}: {found}"
                    );
                    assert!(found.problem.contains(part), "{text}: {found}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn all_contradictions_are_told_together() {
        let text = "admission: {budget: 11s}\nvariants: require\naffinity: {required: false}\n";
        let error = parse("c", &format!("{HEAD}{text}"))
            .unwrap_err()
            .to_string();
        let mut lines: Vec<&str> = error.lines().collect();
        lines.sort_unstable();
        assert!(
            lines.len() == 2 && lines[0].starts_with("c:3:") && lines[1].starts_with("c:4:"),
            "{error}"
        );
    }

    #[test]
    fn settings_without_effect_are_told() {
        for (text, expected) in [
            (
                "affinity: {preferred: [{architecture: arm64, weight: 5}]}\n",
                1,
            ),
            ("rules: [{name: a, nodes: [x]}]\n", 1),
            ("rules: [{name: a, tolerations: [{key: k}]}]\n", 0),
            ("misplaced: evict\n", 0),
            ("misplaced: evict\ntaint: {manage: false}\n", 1),
        ] {
            for (admission, expected) in [("", expected), ("admission: {enabled: true}\n", 0)] {
                let config = parse("c", &format!("{HEAD}{text}{admission}")).unwrap();
                let found = without_effect(&config);
                assert_eq!(found.len(), expected, "{text}{admission}: {found:?}");
            }
        }
    }

    #[test]
    fn both_header_lines_are_needed() {
        for text in [
            "",
            "kind: Configuration",
            "apiVersion: archaware.dev/v2\nkind: Configuration",
        ] {
            assert!(
                matches!(parse("c", text), Err(ConfigError::Malformed { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn rewrites_name_registries() {
        for (prefix, replacement, good) in [
            ("docker.io", "mirror.local/hub", true),
            ("docker.io/", "mirror.local:5000/hub/", true),
            ("docker.io/library", "localhost:5000", true),
            ("docker.io", "mirror", false),
            ("nginx", "mirror.local", false),
            ("docker.io", "HTTP://X y", false),
            ("", "mirror.local", false),
            ("docker.io", "", false),
        ] {
            let rule = format!("{{prefix: {prefix:?}, replacement: {replacement:?}}}");
            let text = format!("{HEAD}registries: {{rewrites: [{rule}]}}\n");
            let read = parse("c", &text);
            assert_eq!(read.is_ok(), good, "{rule}");
            let rewrites = read.map(|config| config.registries.rewrites);
            for rule in rewrites.unwrap_or_default() {
                assert!(!rule.prefix.ends_with('/') && !rule.replacement.ends_with('/'));
            }
        }
    }

    #[test]
    fn contradictions_are_named() {
        for (text, part) in [
            ("resolution: {failure: {action: tolerate}}", "architectures"),
            (
                "variants: require\naffinity: {required: false}",
                "taint.variants",
            ),
            (
                "affinity: {preferred: [{architecture: arm64, weight: 1}, {architecture: aarch64, weight: 2}]}",
                "twice",
            ),
            ("schedulableArchitectures: [arm32]", "c:3:28"),
            (
                "taint: {architectures: [wrong]}",
                "\"wrong\" is no architecture",
            ),
            ("compatibility: {amd46: [\"386\"]}", "\"amd46\""),
            (
                "tolerations: [{platforms: [linux/arm32], toleration: {key: a}}]",
                "\"linux/arm32\" has no architecture",
            ),
            (
                "runtimeClasses: {a: {platforms: [linux/wrong]}}",
                "\"linux/wrong\" has no architecture",
            ),
            (
                "registries: {tokenEndpoints: [{registry: a.io, host: \"https://b.io/x\"}]}",
                "tokenEndpoints",
            ),
            (
                "registries: {allowLocalAddresses: [\"a.io:5000\"]}",
                "allowLocalAddresses",
            ),
            ("admission: {certificates: {key: /k}}", "both"),
            ("admission: {certificates: {authority: /a}}", "of no use"),
            ("admission: {certificates: {lifetime: 30s}}", "minute"),
            ("admission: {budget: 11s}", "10s"),
            ("admission: {budget: 9ms}", "10ms"),
            ("admission: {url: \"http://a/b\"}", "https"),
            ("admission: {url: \"https://u@a/b\"}", "https"),
            ("admission: {url: \"https://a/b?c\"}", "https"),
        ] {
            let error = parse("c", &format!("{HEAD}{text}\n"))
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{text}: {error}");
            // The error is on line 3, after the two header lines, and not in the first column.
            let place = error.strip_prefix("c:3:").unwrap_or_default();
            let column: String = place.chars().take_while(char::is_ascii_digit).collect();
            assert!(column.parse::<u32>().unwrap_or_default() > 1, "{error}");
        }
    }

    #[test]
    fn impossible_rules_are_errors() {
        for (yaml, problem) in [
            (
                "- {name: a, nodes: [x]}\n- {name: a, nodes: [y]}\n",
                "a unique name",
            ),
            ("- {name: 'a b', nodes: [x]}\n", "a unique name"),
            ("- {name: a}\n", "adds nothing"),
            ("- {name: a, nodes: ['']}\n", "is empty"),
            ("- {name: a, nodes: ['x in (']}\n", "not a label selector"),
            (
                "- {name: a, tolerations: [{key: k, value: 'x-{arch}'}]}\n",
                "{arch}",
            ),
            (
                "- {name: a, preferredNodes: [{nodes: x, weight: 101}]}\n",
                "1 to 100",
            ),
            ("- {nodes: [x]}\n", "name"),
            (
                "- {name: a, runtimeClass: gvisor}\n",
                "needs admission.enabled",
            ),
            (
                "- {name: a, runtimeClass: 'g v'}\n",
                "name of a RuntimeClass",
            ),
        ] {
            let error = parse("c", &format!("{HEAD}rules:\n{yaml}")).unwrap_err();
            assert!(error.to_string().contains(problem), "{yaml}: {error}");
        }
    }

    #[test]
    fn impossible_emulation_is_an_error() {
        for yaml in [
            "emulation: [{nodes: '', architecture: amd64, runs: [arm64]}]",
            "emulation: [{nodes: qemu, architecture: amd64, runs: []}]",
            "emulation: [{nodes: qemu, architecture: amd64, runs: [amd64]}]",
        ] {
            let error = parse("c", &format!("{HEAD}{yaml}\n")).unwrap_err();
            assert!(error.to_string().contains("emulation"), "{error}");
        }
    }
}
