//! Finds values of a configuration that contradict each other, or that are invalid although their
//! types accept them.

use super::{Config, Misplaced};

/// A mistake in the values of keys.
pub(super) struct Mistake {
    /// The keys with the mistake. The error points to the first key that the file contains.
    pub(super) keys: &'static [&'static str],
    pub(super) problem: &'static str,
}

/// Collects mistakes. Each section checks its own keys.
#[derive(Default)]
pub(super) struct Mistakes(Vec<Mistake>);

impl Mistakes {
    /// Adds a mistake unless the values are good.
    pub(super) fn unless(
        &mut self,
        is_good: bool,
        keys: &'static [&'static str],
        problem: &'static str,
    ) {
        if !is_good {
            self.0.push(Mistake { keys, problem });
        }
    }
}

/// Settings that are valid, but have no effect, or less effect than their names promise: one
/// sentence for each.
pub fn without_effect(config: &Config) -> Vec<&'static str> {
    let has_webhook = config.admission.enabled;
    let mut rules = config.rules.iter();
    let affects_nodes = rules.any(|rule| {
        let is_required = !rule.nodes.is_empty() || !rule.match_node_labels.is_empty();
        is_required || !rule.preferred_nodes.is_empty()
    });
    let cases = [
        (
            !has_webhook && !config.affinity.preferred.is_empty(),
            "affinity.preferred is set, but admission.enabled is false: only pods that wait behind a scheduling gate get affinity",
        ),
        (
            !has_webhook && affects_nodes,
            "rules select nodes, but admission.enabled is false: only pods that wait behind a scheduling gate get affinity",
        ),
        (
            config.misplaced == Misplaced::Evict && !has_webhook && !config.taint.manage,
            "misplaced is evict, but taint.manage and admission.enabled are false: archaware evicts no pod, because nothing keeps the new pod away from such nodes",
        ),
    ];
    let effectless = cases.into_iter().filter(|(applies, _)| *applies);
    effectless.map(|(_, sentence)| sentence).collect()
}

/// The mistakes of a configuration.
pub(super) fn mistakes(config: &Config) -> Vec<Mistake> {
    let mut mistakes = Mistakes::default();
    config.resolution.check(&mut mistakes);
    config.check(&mut mistakes);
    config.selection.check(&mut mistakes);
    config.registries.check(&mut mistakes);
    config.credential_providers.check(&mut mistakes);
    config.check_rules(&mut mistakes);
    config.containerd.check(&mut mistakes);
    config.affinity.check(config, &mut mistakes);
    config.admission.check(&mut mistakes);
    mistakes.0
}
