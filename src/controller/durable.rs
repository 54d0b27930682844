//! Data that survives a restart: the keys of earlier configurations, and the objects that other
//! controllers rewrite.

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

/// The data that is stored with the Lease. Cheap to clone.
#[derive(Clone)]
pub struct Durable(Arc<Mutex<Inner>>);

struct Inner {
    keys: KnownKeys,
    /// The latest write to each object, by controller and uid.
    written: HashMap<(&'static str, String), Written>,
    /// The annotation that was read last.
    seen: Option<String>,
    /// Whether a newer version of archaware wrote the annotation. Then it is not overwritten.
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

/// The name under which evictions of misplaced pods are stored.
pub(super) const EVICTIONS: &str = "evictions";

/// The stored kinds of writes, and how long each is kept.
const CONTROLLERS: [(&str, repairs::RepairPolicy); 3] = [
    ("nodes", repairs::OF_NODES),
    ("daemonsets", repairs::OF_TEMPLATES),
    // Keyed by the uid of the pods' controller: at most one entry for each controller whose pods
    // were evicted within a day.
    (EVICTIONS, repairs::OF_EVICTIONS),
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

    /// The latest write to the object with this uid.
    pub(super) fn written(&self, controller: &'static str, uid: Option<&str>) -> Option<Written> {
        let key = (controller, uid?.to_owned());
        self.0.lock().written.get(&key).copied()
    }

    /// Records a write to the object with this uid.
    pub(super) fn record(&self, controller: &'static str, uid: Option<&str>, written: Written) {
        if let Some(uid) = uid {
            let key = (controller, uid.to_owned());
            self.0.lock().written.insert(key, written);
        }
    }

    /// Restores the previous record `last`, because a recorded write was not made.
    pub(super) fn restore(
        &self,
        controller: &'static str,
        uid: Option<&str>,
        last: Option<Written>,
    ) {
        let Some(uid) = uid else {
            return;
        };
        let (key, written) = ((controller, uid.to_owned()), &mut self.0.lock().written);
        match last {
            Some(last) => written.insert(key, last),
            None => written.remove(&key),
        };
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

/// Times are stored in whole seconds, and converted twice. Differences below this are rounding.
const RESOLUTION: Duration = Duration::from_secs(2);

impl LeaseMemory for Durable {
    fn read(&self, text: &str) {
        self.read_at(text, now(), jiff::Timestamp::now().as_second());
    }

    fn text(&self) -> Option<String> {
        self.text_at(now(), jiff::Timestamp::now().as_second())
    }
}

impl Durable {
    /// `wall`: the time in seconds since 1970.
    fn read_at(&self, text: &str, now: Instant, wall: i64) {
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
                let entry = inner.written.entry((controller, repair.uid));
                // A write of this process may be newer than the stored record, and a record read
                // earlier may be older.
                let known = entry.or_insert(written);
                let is_newer = known.at + RESOLUTION < at;
                let is_same_time = at + RESOLUTION >= known.at && !is_newer;
                let is_further = is_same_time
                    && written.wanted == known.wanted
                    && written.repairs > known.repairs;
                if is_newer || is_further {
                    *known = written;
                }
            }
        }
        inner.forget(now);
    }

    fn text_at(&self, now: Instant, wall: i64) -> Option<String> {
        let mut inner = self.0.lock();
        if inner.is_newer {
            return None;
        }
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
    use proptest::prelude::*;

    use super::*;
    use crate::{cluster::objects::Node, config::Config};

    fn durable() -> Durable {
        Durable::new(KnownKeys::new(&Config::default()))
    }

    proptest! {
        /// A client that may write the Lease may write any state, with any times.
        #[test]
        fn any_state_is_read_or_ignored(
            keys in prop::collection::vec("[ -~]{0,12}", 0..4),
            number in any::<i64>(),
            cut in 0..400_usize,
        ) {
            let before = durable();
            let written = Written { wanted: 7, repairs: 6, at: now() };
            before.record("nodes", Some("u"), written);
            let text = before.text().unwrap();
            let mut state: serde_json::Value = serde_json::from_str(&text).unwrap();
            for key in keys {
                state[&key] = serde_json::json!(number);
            }
            let changed = state.to_string().replace(":6", &format!(":{number}"));
            let end = changed.floor_char_boundary(cut);
            for text in [changed.as_str(), &changed[..end]] {
                let after = durable();
                after.read_at(text, now(), number);
                prop_assert!(after.text_at(now(), number).is_some());
            }
        }
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
        before.record("nodes", Some("u"), written(0));
        let quiet = before.text().unwrap();
        assert!(!quiet.contains("\"u\""), "no repair: {quiet}");
        before.record("nodes", Some("u"), written(6));
        let text = before.text().unwrap();
        assert!(text.contains("kubernetes.io/arch"), "{text}");

        let after = durable();
        after.read(&text.replace("kubernetes.io/arch", "old/key"));
        assert_eq!(after.written("nodes", Some("u")).unwrap().repairs, 6);
        assert_eq!(after.written("daemonsets", Some("u")), None);
        let keys = after.text().unwrap();
        assert!(keys.contains("old/key") && keys.contains("kubernetes.io/arch"));
        after.record("nodes", Some("u"), written(7));
        after.read(&text);
        assert_eq!(after.written("nodes", Some("u")).unwrap().repairs, 7);
        // Another replica repairs it meanwhile.
        tokio::time::advance(Duration::from_mins(30)).await;
        let other_replica = durable();
        other_replica.record("nodes", Some("u"), written(9));
        after.read(&other_replica.text().unwrap());
        assert_eq!(after.written("nodes", Some("u")).unwrap().repairs, 9);
        let newer = other_replica
            .text()
            .unwrap()
            .replace(r#""version":1"#, r#""version":2"#);
        after.read(&newer);
        assert_eq!(after.text(), None, "left to the newer version");
        after.removed("daemonsets", &Removed::<Node>::Relisted(&[].into()));
        assert!(after.written("nodes", Some("u")).is_some());
        after.removed("nodes", &Removed::One(&node));
        assert_eq!(after.written("nodes", Some("u")), None);
    }

    /// The leader reads its own record every few seconds, so rounding must not add up.
    #[test]
    fn times_do_not_creep() {
        let (durable, start, wall) = (durable(), Instant::now(), 1_700_000_000.6);
        let written = Written {
            wanted: 7,
            repairs: 1,
            at: start,
        };
        durable.record(EVICTIONS, Some("u"), written);
        for round in 1..200 {
            let passed = f64::from(round) * 0.37;
            let now = start + Duration::from_secs_f64(passed);
            #[allow(clippy::cast_possible_truncation, reason = "whole seconds are meant")]
            let wall = (wall + passed) as i64;
            let text = durable.text_at(now, wall).unwrap();
            durable.read_at(&text, now, wall);
            assert_eq!(
                durable.written(EVICTIONS, Some("u")),
                Some(written),
                "{round}"
            );
        }
        // Another replica gave up, at the same time.
        let other_replica = Durable::new(KnownKeys::new(&Config::default()));
        let given_up = Written {
            repairs: 9,
            ..written
        };
        other_replica.record(EVICTIONS, Some("u"), given_up);
        durable.read_at(
            &other_replica.text_at(start, 1_700_000_000).unwrap(),
            start,
            1_700_000_000,
        );
        assert_eq!(durable.written(EVICTIONS, Some("u")).unwrap().repairs, 9);
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
        durable.record("nodes", Some("u"), written);
        tokio::time::advance(Duration::from_hours(2)).await;
        let _ = durable.text();
        assert_eq!(durable.written("nodes", Some("u")), None);
    }
}
