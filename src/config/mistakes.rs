//! Finds values of a configuration that contradict each other, or that are invalid although their
//! types accept them.

use super::Config;

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
