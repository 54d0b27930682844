//! A cache of shared values that never drops a value in use.

use std::sync::Arc;

use quick_cache::{DefaultHashBuilder, Lifecycle, UnitWeighter, sync::Cache};

/// Values by name. A full cache drops the least used value that nothing else holds. It grows
/// beyond its capacity while more values are held.
pub type InUseCache<V> = Cache<String, Arc<V>, UnitWeighter, DefaultHashBuilder, PinInUse>;

/// Pins values that something besides the cache holds.
#[derive(Clone, Debug, Default)]
pub struct PinInUse;

impl<V> Lifecycle<String, Arc<V>> for PinInUse {
    type RequestState = ();

    fn is_pinned(&self, _: &String, value: &Arc<V>) -> bool {
        Arc::strong_count(value) > 1
    }
}

/// A cache of about this many values.
pub fn in_use_cache<V>(capacity: usize) -> InUseCache<V> {
    let weight = u64::try_from(capacity).unwrap_or(u64::MAX);
    Cache::with(
        capacity,
        weight,
        UnitWeighter,
        DefaultHashBuilder::default(),
        PinInUse,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_values_stay() {
        let cache = in_use_cache(64);
        let held: Vec<_> = (0..32).map(Arc::new).collect();
        for value in &held {
            cache.insert(format!("held-{value}"), value.clone());
        }
        for round in 0..3 {
            for value in 0..1000 {
                cache.insert(format!("other-{value}"), Arc::new(value));
                cache.get(&format!("other-{}", value / 2));
            }
            for value in &held {
                let kept = cache.get(&format!("held-{value}"));
                assert!(
                    kept.is_some_and(|kept| Arc::ptr_eq(&kept, value)),
                    "{round}"
                );
            }
        }
        assert!(cache.len() <= 96, "{}", cache.len());
        drop(held);
        for value in 0..1000 {
            cache.insert(format!("new-{value}"), Arc::new(value));
        }
        assert!(cache.len() <= 96, "{}", cache.len());
    }
}
