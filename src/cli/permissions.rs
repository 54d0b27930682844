//! Missing permissions of the user: a read-only command lists them, and prints the rest of its
//! result.

use std::collections::BTreeSet;

use anyhow::Context;

use crate::cluster::api::ApiError;

/// Permissions without which something could not be read.
#[derive(Clone, Debug, Default)]
pub(super) struct MissingPermissions(BTreeSet<String>);

impl MissingPermissions {
    /// Adds a permission, for example `list nodes`.
    pub(super) fn add(&mut self, permission: String) {
        self.0.insert(permission);
    }

    /// The value that was read, or `None` if the permission for it is missing.
    pub(super) fn check<T>(
        &mut self,
        permission: impl FnOnce() -> String,
        read: Result<T, ApiError>,
    ) -> anyhow::Result<Option<T>> {
        match read {
            Ok(read) => Ok(Some(read)),
            Err(ApiError::Forbidden(_) | ApiError::Unauthorized(_)) => {
                self.add(permission());
                Ok(None)
            }
            Err(error) => Err(error).with_context(|| format!("cannot {}", permission())),
        }
    }

    /// All of them, in alphabetical order.
    pub(super) fn to_vec(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

impl Extend<String> for MissingPermissions {
    fn extend<I: IntoIterator<Item = String>>(&mut self, permissions: I) {
        self.0.extend(permissions);
    }
}
