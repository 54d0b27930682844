//! `resolution`: how images are resolved.

use std::{num::NonZeroUsize, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{placement::failure::FailureAction, platform::Architecture};

use super::{duration, mistakes::Mistakes};

/// How images are resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResolutionConfig {
    /// Timeout of one registry request.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Timeout of one attempt to resolve all images of a pod.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// In-memory caches.
    pub cache: CacheConfig,
    /// Pods whose images cannot be resolved: see decisions.md.
    pub failure: FailureConfig,
}

impl Default for ResolutionConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            budget: Duration::from_secs(15),
            cache: CacheConfig::default(),
            failure: FailureConfig::default(),
        }
    }
}

impl ResolutionConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        let needs_architectures = self.failure.action == FailureAction::Tolerate;
        mistakes.unless(
            !needs_architectures || !self.failure.architectures.is_empty(),
            &[
                "resolution.failure.architectures",
                "resolution.failure.action",
            ],
            "resolution.failure.action: tolerate needs resolution.failure.architectures",
        );
        mistakes.unless(
            self.budget >= self.timeout,
            &["resolution.budget", "resolution.timeout"],
            "resolution.budget is shorter than resolution.timeout",
        );
    }
}

/// In-memory caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Maximum number of images.
    pub images: NonZeroUsize,
    /// How long a tag is used without asking again.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tag_ttl: Duration,
    /// How long the tag `latest`, and any tag with pull policy `Always`, is used without asking
    /// again.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub latest_ttl: Duration,
    /// Whether pods share answers only with pods of the same credentials. containerd is not used
    /// then: it does not know credentials.
    pub per_credential: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            images: NonZeroUsize::MIN.saturating_add(19_999),
            tag_ttl: Duration::from_mins(10),
            latest_ttl: Duration::from_mins(1),
            per_credential: false,
        }
    }
}

/// How to treat pods whose images cannot be resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FailureConfig {
    /// Time from the first failure until the action.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub after: Duration,
    /// The action after that.
    pub action: FailureAction,
    /// The architectures that pods tolerate with `tolerate`.
    pub architectures: Vec<Architecture>,
}

impl Default for FailureConfig {
    fn default() -> Self {
        Self {
            after: Duration::from_mins(1),
            action: FailureAction::default(),
            architectures: Vec::new(),
        }
    }
}
