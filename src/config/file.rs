//! Loads and validates the configuration file.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    files::{self, FileError},
    image::{Reference, Rewrite},
};

use super::{Config, FailureAction, admission::is_webhook_url, location::locate};

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// Not YAML, of another structure, or with values that contradict each other.
    #[error("{path}:{line}:{column}: {problem}")]
    Malformed {
        /// The file.
        path: String,
        /// One-based; 0 when unknown.
        line: u64,
        /// One-based; 0 when unknown.
        column: u64,
        /// The problem.
        problem: String,
    },
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
        let location = error.location();
        let message = error.to_string();
        ConfigError::Malformed {
            path: path.to_owned(),
            line: location.as_ref().map_or(0, serde_saphyr::Location::line),
            column: location.as_ref().map_or(0, serde_saphyr::Location::column),
            problem: strip_location(&message).to_owned(),
        }
    })?;
    if let Some(Contradiction { keys, problem }) = contradiction(&config) {
        let place = locate(text, keys);
        return Err(ConfigError::Malformed {
            path: path.to_owned(),
            line: place.as_ref().map_or(0, serde_saphyr::Location::line),
            column: place.as_ref().map_or(0, serde_saphyr::Location::column),
            problem: problem.to_owned(),
        });
    }
    Ok(config)
}

/// Values that contradict each other, or that no type excludes.
struct Contradiction {
    /// The keys that it is about; the first one that the file has is named.
    keys: &'static [&'static str],
    problem: &'static str,
}

/// The first contradiction of a configuration.
fn contradiction(config: &Config) -> Option<Contradiction> {
    let found = |keys, problem| Some(Contradiction { keys, problem });
    let failure = &config.resolution.failure;
    if failure.action == FailureAction::Tolerate && failure.architectures.is_empty() {
        return found(
            &[
                "resolution.failure.architectures",
                "resolution.failure.action",
            ],
            "resolution.failure.action: tolerate needs resolution.failure.architectures",
        );
    }
    if config.resolution.budget < config.resolution.timeout {
        return found(
            &["resolution.budget", "resolution.timeout"],
            "resolution.budget is shorter than resolution.timeout",
        );
    }
    registries_problem(config)
        .or_else(|| containerd_problem(config))
        .or_else(|| admission_problem(config))
}

/// The first contradiction in `registries` and `credentialProviders`.
fn registries_problem(config: &Config) -> Option<Contradiction> {
    let found = |keys, problem| Some(Contradiction { keys, problem });
    let is_url = |name: &String| name.contains('/');
    if config.registries.plain_http.iter().any(is_url) {
        return found(
            &["registries.plainHttp"],
            "registries.plainHttp takes host[:port], no URL",
        );
    }
    let endpoints = &config.registries.token_endpoints;
    let is_host = |name: &String| !name.is_empty() && !name.contains(['/', '@', ' ']);
    if !endpoints
        .iter()
        .all(|one| is_host(&one.registry) && is_host(&one.host) && !one.host.contains(':'))
    {
        return found(
            &["registries.tokenEndpoints"],
            "registries.tokenEndpoints takes a registry (host[:port]) and the host of its token server, no URL",
        );
    }
    let has_port = |name: &String| name.contains(':') && !name.contains("::");
    let local = &config.registries.allow_local_addresses;
    if !local.iter().all(|name| is_host(name) && !has_port(name)) {
        return found(
            &["registries.allowLocalAddresses"],
            "registries.allowLocalAddresses takes hosts without port, no URL",
        );
    }
    // Names must begin with a registry: `mirror` alone would be a user of Docker Hub.
    let names_registry = |text: &str| {
        let first = text.split('/').next().unwrap_or_default();
        Reference::parse(&format!("{text}/x")).is_ok_and(|name| name.registry() == first)
    };
    let usable = |rule: &Rewrite| names_registry(&rule.prefix) && names_registry(&rule.replacement);
    if !config.registries.rewrites.iter().all(usable) {
        return found(
            &["registries.rewrites"],
            "registries.rewrites takes a prefix and a replacement that begin with a registry's host, like docker.io/library",
        );
    }
    let providers = &config.credential_providers;
    if providers.config.as_os_str().is_empty() != providers.bin_directory.as_os_str().is_empty() {
        return found(
            &["credentialProviders"],
            "credentialProviders needs both config and binDirectory, or neither",
        );
    }
    None
}

/// The first contradiction in `containerd`.
fn containerd_problem(config: &Config) -> Option<Contradiction> {
    let found = |keys, problem| Some(Contradiction { keys, problem });
    let (reads, own) = (
        &config.containerd.read_namespaces,
        &config.containerd.cache_namespace,
    );
    if !config.containerd.socket.as_os_str().is_empty() && reads.is_empty() && own.is_empty() {
        return found(
            &["containerd.socket"],
            "containerd.socket without any namespace reads nothing",
        );
    }
    // archaware must not write into the kubelet's namespace or expire its content.
    if reads.contains(own) {
        return found(
            &["containerd.cacheNamespace", "containerd.readNamespaces"],
            "containerd.cacheNamespace must not be one of containerd.readNamespaces",
        );
    }
    let is_namespace = |name: &String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !name.is_empty() && name.len() <= 76 && name.chars().all(plain)
    };
    let mut all = reads.iter().chain(Some(own).filter(|own| !own.is_empty()));
    if !all.all(is_namespace) {
        return found(
            &["containerd.readNamespaces", "containerd.cacheNamespace"],
            "containerd.readNamespaces and containerd.cacheNamespace may contain only letters, digits, '-', '_' and '.'",
        );
    }
    None
}

/// The first contradiction in `affinity` and `admission`.
fn admission_problem(config: &Config) -> Option<Contradiction> {
    let preferred = &config.affinity.preferred;
    let mut names: Vec<_> = preferred.iter().map(|one| &one.architecture).collect();
    names.sort();
    names.dedup();
    let admission = &config.admission;
    let files = &admission.certificates;
    let empty = |path: &PathBuf| path.as_os_str().is_empty();
    let (keys, problem): (&[_], _) = if names.len() < preferred.len() {
        (
            &["affinity.preferred"],
            "affinity.preferred names an architecture twice",
        )
    } else if empty(&files.certificate) != empty(&files.key) {
        (
            &["admission.certificates"],
            "admission.certificates needs both certificate and key, or neither",
        )
    } else if empty(&files.certificate) && !empty(&files.authority) {
        (
            &["admission.certificates.authority"],
            "admission.certificates.authority is of no use without certificate and key",
        )
    } else if files.lifetime < MIN_LIFETIME {
        (
            &["admission.certificates.lifetime"],
            "admission.certificates.lifetime is shorter than a minute",
        )
    } else if admission.budget < MIN_BUDGET {
        (
            &["admission.budget"],
            "admission.budget is shorter than 10ms: no image could ever be looked up",
        )
    } else if admission.budget > MAX_BUDGET {
        (
            &["admission.budget"],
            "admission.budget is longer than 10s, the most that a pod may wait",
        )
    } else if !admission.url.is_empty() && !is_webhook_url(&admission.url) {
        (
            &["admission.url"],
            "admission.url has to be an https URL without user, query or fragment",
        )
    } else {
        return None;
    };
    Some(Contradiction { keys, problem })
}

/// A certificate must be published before it is used, and loaded by every replica.
const MIN_LIFETIME: Duration = Duration::from_mins(1);
/// A shorter budget is no wait at all, which `onMiss: pass` expresses.
const MIN_BUDGET: Duration = Duration::from_millis(10);
/// The API server's own limit for a webhook is 30 s, too long for the creation of a pod.
const MAX_BUDGET: Duration = Duration::from_secs(10);

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

    /// The reference page lists all defaults, with their real values.
    #[test]
    fn the_documented_defaults_are_the_defaults() {
        let page = include_str!("../../docs/configuration.md");
        let text = page
            .split("```yaml\n")
            .nth(1)
            .unwrap()
            .split("```")
            .next()
            .unwrap();
        assert_eq!(
            parse("docs/configuration.md", text).unwrap(),
            Config::default()
        );
        let keys = |text: &str| -> std::collections::BTreeSet<String> {
            let key = |line: &str| line.trim().split_once(':').map(|(key, _)| key.to_owned());
            text.lines().filter_map(key).collect()
        };
        let printed = serde_saphyr::to_string(&Config::default()).unwrap();
        assert_eq!(keys(text), keys(&printed));
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, line, part) in [
            ("taint: {effect: Never}\n", 3, "Never"),
            (
                "taint:\n  key: \"a b\"\n",
                4,
                "cannot be the key of a taint",
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
                Err(ConfigError::Malformed {
                    line: at,
                    column,
                    problem,
                    ..
                }) => {
                    assert_eq!((at, column > 0), (line, true), "{text}: {problem}");
                    assert!(problem.contains(part), "{text}: {problem}");
                }
                other => panic!("{text}: {other:?}"),
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
            // The line after the two of the head, and not the first column.
            let place = error.strip_prefix("c:3:").unwrap_or_default();
            let column: String = place.chars().take_while(char::is_ascii_digit).collect();
            assert!(column.parse::<u32>().unwrap_or_default() > 1, "{error}");
        }
    }
}
