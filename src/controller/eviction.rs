//! Evicts pods, so that their controllers make them anew.

use crate::{
    cluster::{
        api::{ApiClient, ApiError},
        name::NamespacedName,
        objects::Pod,
    },
    metrics::Metrics,
};

/// Why pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionReason {
    /// It was created without node affinity.
    NoAffinity,
    /// It cannot run on its node.
    WrongArchitecture,
}

/// What became of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionResult {
    /// It was evicted.
    Evicted,
    /// A disruption budget does not allow it now.
    Budget,
    /// It was deleted or replaced meanwhile.
    Gone,
    /// The API server did not do it.
    Failed,
}

impl EvictionReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::NoAffinity => "no_affinity",
            Self::WrongArchitecture => "wrong_architecture",
        }
    }
}

impl EvictionResult {
    fn as_str(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Budget => "budget",
            Self::Gone => "gone",
            Self::Failed => "failed",
        }
    }
}

/// Evicts a pod through the Eviction API, which respects disruption budgets.
pub(super) async fn evict(
    api: &ApiClient,
    metrics: &Metrics,
    pod: &Pod,
    reason: EvictionReason,
) -> EvictionResult {
    let (name, why) = (NamespacedName::of_object(pod), reason.as_str());
    let result = match api.evict(pod).await {
        Ok(()) => {
            tracing::info!(pod = %name, why, "pod evicted, so that it is created anew");
            EvictionResult::Evicted
        }
        Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => EvictionResult::Gone,
        Err(error) => {
            tracing::warn!(pod = %name, why, %error, "cannot evict the pod");
            match error {
                ApiError::DisruptionBudget(_) => EvictionResult::Budget,
                _ => EvictionResult::Failed,
            }
        }
    };
    metrics.evictions.count(why, result.as_str());
    result
}
