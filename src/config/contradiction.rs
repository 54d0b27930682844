//! Values of a configuration that contradict each other.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use crate::{
    image::{Reference, Rewrite},
    names::is_dns_subdomain,
    placement::{PodRule, emulation::Emulator, runtime_class::RuntimeClass},
};

use super::{Config, FailureAction, UnknownVariants, admission::is_webhook_url};

/// Maximum number of rules: each is compared with each new pod.
const MAX_RULES: usize = 64;
/// Maximum number of emulators: each becomes a term of its pods, which have 16 at most.
const MAX_EMULATORS: usize = 8;
/// Maximum number of selectors for nodes of a rule: each becomes a term of its pods.
const MAX_NODES: usize = 16;

/// Values that contradict each other, or that no type excludes.
pub(super) struct Contradiction {
    /// The keys that it is about; the first one that the file has is named.
    pub(super) keys: &'static [&'static str],
    pub(super) problem: &'static str,
}

/// The first contradiction of a configuration.
pub(super) fn contradiction(config: &Config) -> Option<Contradiction> {
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
    let limits_by_variant = config.affinity.required || config.taint.variants;
    if config.variants == UnknownVariants::Require && !limits_by_variant {
        return found(
            &["variants"],
            "variants: require needs affinity.required or taint.variants",
        );
    }
    let predictor = &config.selection.predictor;
    let is_url = |url: &str| {
        let parsed = url.parse::<http::Uri>();
        parsed.is_ok_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
        })
    };
    if !predictor.url.is_empty() && !is_url(&predictor.url) {
        return found(
            &["selection.predictor.url"],
            "selection.predictor.url has to be an http or https URL",
        );
    }
    if predictor.timeout > MAX_PREDICTION {
        return found(
            &["selection.predictor.timeout"],
            "selection.predictor.timeout is longer than 10s, the most that a pod may wait",
        );
    }
    let is_class = |(name, class): (&String, &RuntimeClass)| {
        is_dns_subdomain(name) && !class.platforms.is_empty()
    };
    if !config.runtime_classes.iter().all(is_class) {
        return found(
            &["runtimeClasses"],
            "runtimeClasses takes names of RuntimeClass objects, each with platforms like wasi/wasm",
        );
    }
    let emulates = |one: &Emulator| {
        !one.has_empty_selector() && !one.runs.is_empty() && !one.runs.contains(&one.architecture)
    };
    if config.emulation.len() > MAX_EMULATORS || !config.emulation.iter().all(emulates) {
        return found(
            &["emulation"],
            "emulation takes at most 8 of {nodes: SELECTOR, architecture, runs}, with a selector that is not empty and other architectures in runs",
        );
    }
    if config.assign_runtime_class
        && (config.runtime_classes.is_empty() || !config.admission.enabled)
    {
        return found(
            &["assignRuntimeClass"],
            "assignRuntimeClass needs runtimeClasses, and admission.enabled: a class can be set only when a pod is created",
        );
    }
    registries_problem(config)
        .or_else(|| rules_problem(config))
        .or_else(|| containerd_problem(config))
        .or_else(|| admission_problem(config))
}

/// The first contradiction in `rules`.
fn rules_problem(config: &Config) -> Option<Contradiction> {
    let rules = &config.rules;
    let found = |problem| {
        Some(Contradiction {
            keys: &["rules"],
            problem,
        })
    };
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    if names.len() < rules.len() || names.iter().any(|name| !is_dns_subdomain(name)) {
        return found("each of rules needs a name of its own, like gpu-nodes");
    }
    if rules.len() > MAX_RULES || rules.iter().any(|rule| rule.nodes.len() > MAX_NODES) {
        return found("rules has more than 64 rules, or a rule with more than 16 nodes");
    }
    if rules.iter().any(PodRule::is_empty) {
        return found(
            "one of rules adds nothing: it needs nodes, matchNodeLabels, preferredNodes, tolerations or runtimeClass",
        );
    }
    let mut classes = rules.iter().filter_map(|rule| rule.runtime_class.as_ref());
    if !classes.clone().all(|name| is_dns_subdomain(name)) {
        return found("runtimeClass in rules takes the name of a RuntimeClass object");
    }
    if classes.next().is_some() && !config.admission.enabled {
        return found(
            "runtimeClass in rules needs admission.enabled: a class can be set only when a pod is created",
        );
    }
    if rules.iter().any(PodRule::has_empty_selector) {
        return found(
            "a selector in nodes or preferredNodes of rules is empty: it would select every node",
        );
    }
    let mut tolerations = rules.iter().flat_map(|rule| &rule.tolerations);
    if tolerations.any(|one| one.value.contains("{arch}")) {
        return found("{arch} in a toleration is for the key tolerations, not for rules");
    }
    None
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
    } else if config.affinity.recreate_pods && !(config.affinity.required && admission.enabled) {
        (
            &["affinity.recreatePods"],
            "affinity.recreatePods needs affinity.required and admission.enabled: otherwise new pods get no affinity either",
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

/// As long as the creation of a pod may wait.
const MAX_PREDICTION: Duration = Duration::from_secs(10);
/// A certificate must be published before it is used, and loaded by every replica.
const MIN_LIFETIME: Duration = Duration::from_mins(1);
/// A shorter budget is no wait at all, which `onMiss: pass` expresses.
const MIN_BUDGET: Duration = Duration::from_millis(10);
/// The API server's own limit for a webhook is 30 s, too long for the creation of a pod.
const MAX_BUDGET: Duration = Duration::from_secs(10);
