//! What survives a restart: the keys of earlier configurations, and which objects others rewrite.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kube::Resource;
use parking_lot::Mutex;

use crate::{
    cluster::{lease::LeaseMemory, watch::Removed},
    evaluate::KnownKeys,
    placement::ConfiguredKeys,
    plan::{
        Written, repairs,
        stored_state::{StoredRepair, StoredState},
    },
};

/// What is stored with the Lease. Cheap to clone.
#[derive(Clone)]
pub struct Durable(Arc<Mutex<Inner>>);

struct Inner {
    keys: KnownKeys,
    /// The latest write to each object, by controller and uid.
    written: HashMap<(&'static str, String), Written>,
    /// The annotation that was read last.
    seen: Option<String>,
    /// Whether a newer version of archaware wrote it, which is then left alone.
    is_newer: bool,
}

impl Inner {
    /// Drops writes that no longer matter.
    fn forget(&mut self, now: Instant) {
        let policy = |name: &str| CONTROLLERS.into_iter().find(|(other, _)| *other == name);
        self.written.retain(|(controller, _), written| {
            policy(controller).is_some_and(|(_, policy)| !policy.is_forgotten(written, now))
        });
    }
}

/// The controllers whose repairs are stored.
const CONTROLLERS: [(&str, repairs::RepairPolicy); 2] = [
    ("nodes", repairs::OF_NODES),
    ("daemonsets", repairs::OF_TEMPLATES),
];

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Durable {
    /// Nothing but the keys of this configuration.
    pub fn new(keys: KnownKeys) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            keys,
            written: HashMap::new(),
            seen: None,
            is_newer: false,
        })))
    }

    /// The latest write to an object.
    pub(super) fn written<K: Resource>(
        &self,
        controller: &'static str,
        object: &K,
    ) -> Option<Written> {
        let uid = object.meta().uid.clone()?;
        self.0.lock().written.get(&(controller, uid)).copied()
    }

    /// Records a write.
    pub(super) fn record<K: Resource>(
        &self,
        controller: &'static str,
        object: &K,
        written: Written,
    ) {
        if let Some(uid) = object.meta().uid.clone() {
            self.0.lock().written.insert((controller, uid), written);
        }
    }

    /// Forgets deleted objects.
    pub(super) fn removed<K: Resource>(&self, controller: &'static str, removed: &Removed<'_, K>) {
        let written = &mut self.0.lock().written;
        match removed {
            Removed::One(object) => {
                let uid = object.meta().uid.clone().unwrap_or_default();
                written.remove(&(controller, uid));
            }
            Removed::Relisted(uids) => {
                written.retain(|(other, uid), _| *other != controller || uids.contains(uid));
            }
        }
    }
}

impl LeaseMemory for Durable {
    fn read(&self, text: &str) {
        let mut inner = self.0.lock();
        if inner.seen.as_deref() == Some(text) {
            return;
        }
        inner.seen = Some(text.to_owned());
        inner.is_newer = StoredState::is_newer(text);
        let Some(state) = StoredState::parse(text) else {
            return;
        };
        inner.keys.extend(&state.keys);
        let (now, wall) = (now(), jiff::Timestamp::now().as_second());
        for repair in state.repairs {
            let known = CONTROLLERS
                .into_iter()
                .find(|(name, _)| *name == repair.controller);
            let age = Duration::from_secs(u64::try_from(wall - repair.at).unwrap_or_default());
            if let (Some((controller, _)), Some(at)) = (known, now.checked_sub(age)) {
                let written = Written {
                    wanted: repair.wanted,
                    repairs: repair.repairs,
                    at,
                };
                let known = inner.written.entry((controller, repair.uid));
                // What this process did itself may be newer, and what it read earlier older.
                let known = known.or_insert(written);
                if known.at < at {
                    *known = written;
                }
            }
        }
        inner.forget(now);
    }

    fn text(&self) -> Option<String> {
        let mut inner = self.0.lock();
        if inner.is_newer {
            return None;
        }
        let (now, wall) = (now(), jiff::Timestamp::now().as_second());
        inner.forget(now);
        let repairs = inner
            .written
            .iter()
            .filter(|(_, written)| written.is_repair());
        let repairs = repairs.map(|((controller, uid), written)| {
            let age = now.saturating_duration_since(written.at).as_secs();
            StoredRepair {
                controller: (*controller).to_owned(),
                uid: uid.clone(),
                wanted: written.wanted,
                repairs: written.repairs,
                at: wall.saturating_sub_unsigned(age),
            }
        });
        let keys: ConfiguredKeys = (*inner.keys.get()).clone();
        let state = StoredState::new(keys, repairs.collect());
        serde_json::to_string(&state).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster::objects::Node, config::Config};

    fn durable() -> Durable {
        Durable::new(KnownKeys::new(&Config::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn repairs_and_keys_survive_a_restart() {
        let mut node = Node::default();
        node.metadata.uid = Some("u".to_owned());
        let written = |repairs| Written {
            wanted: 7,
            repairs,
            at: now(),
        };
        let before = durable();
        before.record("nodes", &node, written(0));
        let quiet = before.text().unwrap();
        assert!(!quiet.contains("\"u\""), "no repair: {quiet}");
        before.record("nodes", &node, written(6));
        let text = before.text().unwrap();
        assert!(text.contains("kubernetes.io/arch"), "{text}");

        let after = durable();
        after.read(&text.replace("kubernetes.io/arch", "old/key"));
        assert_eq!(after.written("nodes", &node).unwrap().repairs, 6);
        assert_eq!(after.written("daemonsets", &node), None);
        let keys = after.text().unwrap();
        assert!(keys.contains("old/key") && keys.contains("kubernetes.io/arch"));
        after.record("nodes", &node, written(7));
        after.read(&text);
        assert_eq!(after.written("nodes", &node).unwrap().repairs, 7);
        // Another replica repairs it meanwhile.
        tokio::time::advance(Duration::from_mins(30)).await;
        let other = durable();
        other.record("nodes", &node, written(9));
        after.read(&other.text().unwrap());
        assert_eq!(after.written("nodes", &node).unwrap().repairs, 9);
        let newer = other
            .text()
            .unwrap()
            .replace(r#""version":1"#, r#""version":2"#);
        after.read(&newer);
        assert_eq!(after.text(), None, "left to the newer version");
        after.removed("daemonsets", &Removed::<Node>::Relisted(&[].into()));
        assert!(after.written("nodes", &node).is_some());
        after.removed("nodes", &Removed::One(&node));
        assert_eq!(after.written("nodes", &node), None);
    }

    #[tokio::test(start_paused = true)]
    async fn quiet_objects_are_forgotten() {
        let mut node = Node::default();
        node.metadata.uid = Some("u".to_owned());
        let durable = durable();
        let written = Written {
            wanted: 7,
            repairs: 1,
            at: now(),
        };
        durable.record("nodes", &node, written);
        tokio::time::advance(Duration::from_hours(2)).await;
        let _ = durable.text();
        assert_eq!(durable.written("nodes", &node), None);
    }
}
