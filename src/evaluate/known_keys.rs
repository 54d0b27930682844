//! The taint and toleration keys that archaware is or was configured with. The keys of earlier
//! configurations become known when the Lease is read.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::placement::ConfiguredKeys;

/// The known keys. Cheap to clone; clones share them.
#[derive(Clone, Debug)]
pub struct KnownKeys(Arc<Mutex<Arc<ConfiguredKeys>>>);

impl KnownKeys {
    /// Starts with the keys of this configuration.
    pub fn new(configured: impl Into<ConfiguredKeys>) -> Self {
        Self(Arc::new(Mutex::new(Arc::new(configured.into()))))
    }

    /// All keys that are known now.
    pub fn get(&self) -> Arc<ConfiguredKeys> {
        self.0.lock().clone()
    }

    /// Adds the keys of an earlier configuration.
    pub fn extend(&self, earlier: &ConfiguredKeys) {
        Arc::make_mut(&mut self.0.lock()).extend(earlier);
    }
}
