//! State that must survive a restart of archaware, as an annotation of its Lease: only archaware
//! and administrators can write it, unlike annotations of nodes and workloads.

use serde::{Deserialize, Serialize};

use crate::placement::ConfiguredKeys;

/// Version of the structure. One of another version is ignored.
const VERSION: u32 = 1;
/// Maximum number of stored repairs, about 100 bytes each; the latest repairs are kept. Annotations
/// of an object may have 256 KiB (`TotalAnnotationSizeLimitB` of `k8s.io/apimachinery`).
const MAX_REPAIRS: usize = 256;

/// The content of the annotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredState {
    version: u32,
    /// The keys that archaware is or was configured with.
    pub(crate) keys: ConfiguredKeys,
    /// Objects whose values other writers revert.
    #[serde(default)]
    pub(crate) repairs: Vec<StoredRepair>,
}

/// The latest repair of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredRepair {
    /// archaware's controller that wrote the object (`nodes`, `daemonsets`), or `evictions`.
    pub(crate) controller: String,
    pub(crate) uid: String,
    /// A hash of the value that archaware wants. Another build may compute another hash, which
    /// costs one more repair.
    pub(crate) wanted: u64,
    /// Number of repairs.
    pub(crate) repairs: u32,
    /// Time of the latest one, in seconds since 1970.
    pub(crate) at: i64,
}

impl StoredState {
    pub(crate) fn new(keys: ConfiguredKeys, mut repairs: Vec<StoredRepair>) -> Self {
        repairs.sort_by(|a, b| (b.at, &b.uid).cmp(&(a.at, &a.uid)));
        repairs.truncate(MAX_REPAIRS);
        Self {
            version: VERSION,
            keys,
            repairs,
        }
    }

    /// Whether a later version of archaware wrote the annotation.
    pub(crate) fn is_newer(text: &str) -> bool {
        let state: Option<serde_json::Value> = serde_json::from_str(text).ok();
        let version = state.and_then(|state| state.get("version")?.as_u64());
        version.is_some_and(|version| version > VERSION.into())
    }

    /// Parses the annotation; `None` if it is unreadable or has another version.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let state: Self = serde_json::from_str(text).ok()?;
        (state.version == VERSION).then_some(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_repairs_survive_the_annotation() {
        let repair = |at: i64| StoredRepair {
            controller: "nodes".to_owned(),
            uid: at.to_string(),
            wanted: u64::MAX,
            repairs: 3,
            at,
        };
        let state = StoredState::new(ConfiguredKeys::default(), (0..300).map(repair).collect());
        assert_eq!(
            (state.repairs.len(), state.repairs[0].at),
            (MAX_REPAIRS, 299)
        );
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(StoredState::parse(&text), Some(state));
        assert!(text.len() < 64 << 10);
        let newer = text.replace(r#""version":1"#, r#""version":2"#);
        assert_eq!(StoredState::parse(&newer), None);
        assert!(StoredState::is_newer(&newer) && !StoredState::is_newer(&text));
        assert_eq!(StoredState::parse("nonsense"), None);
    }
}
