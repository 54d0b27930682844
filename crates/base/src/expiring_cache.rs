//! A bounded cache whose entries expire.

use std::{
    hash::Hash,
    time::{Duration, Instant},
};

use quick_cache::{Equivalent, sync::Cache};

/// Values by key, each with a lifetime of its own. A full cache evicts the entries that are least
/// likely to be used again.
#[derive(Debug)]
pub struct ExpiringCache<K, V>(Cache<K, (V, Instant)>);

impl<K: Hash + Eq, V: Clone> ExpiringCache<K, V> {
    /// An empty cache. `capacity`: maximum number of entries.
    pub fn new(capacity: usize) -> Self {
        Self(Cache::new(capacity))
    }

    /// The value of a key, if it has not expired.
    pub fn get<Q: Hash + Equivalent<K> + ?Sized>(&self, key: &Q) -> Option<V> {
        let (value, expires) = self.0.get(key)?;
        (Instant::now() < expires).then_some(value)
    }

    /// Keeps a value for this time. `life`: at most some years, because [`Instant`] cannot hold
    /// every [`Duration`].
    pub fn insert(&self, key: K, value: V, life: Duration) {
        self.0.insert(key, (value, Instant::now() + life));
    }

    /// Removes a value, unless another value has taken its place.
    pub fn remove<Q: Hash + Equivalent<K> + ?Sized>(&self, key: &Q, value: &V)
    where
        V: PartialEq,
    {
        self.0.remove_if(key, |(kept, _)| kept == value);
    }

    /// Removes expired entries, so that secrets do not stay in memory.
    pub fn remove_expired(&self) {
        let now = Instant::now();
        self.0.retain(|_, (_, expires)| now < *expires);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lives_for_its_time() {
        let cache = ExpiringCache::new(8);
        let hour = Duration::from_hours(1);
        cache.insert("short", 1, Duration::ZERO);
        cache.insert("long", 2, hour);
        assert_eq!((cache.get("short"), cache.get("long")), (None, Some(2)));
        assert_eq!(cache.0.len(), 2);
        cache.remove_expired();
        assert_eq!(cache.0.len(), 1);
        cache.remove("long", &1);
        assert_eq!(cache.get("long"), Some(2), "it is another value by now");
        cache.remove("long", &2);
        assert_eq!(cache.get("long"), None);
    }
}
