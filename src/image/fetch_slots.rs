//! Bounds how many images are being fetched: for each tenant, so that one of them cannot hold up the others, and in
//! total.

use std::{convert::Infallible, sync::Arc};

use quick_cache::sync::Cache;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of images that are being fetched for one tenant: with `concurrency.perRegistry` enough for four busy
/// registries.
const MAX_PER_TENANT: usize = 32;
/// Maximum number of images that are being fetched, and so of requests to registries and token servers, as each image
/// has one at a time. A request has a connection with buffers of up to 400 KiB, and an image holds documents of up to half
/// a MiB between its requests.
const MAX_TOTAL: usize = 128;
/// Tenants whose state is kept; that of the least used ones is made anew.
const MAX_TENANTS: usize = 4096;

/// The slots of all tenants.
pub(crate) struct FetchSlots {
    total: Semaphore,
    tenants: Cache<String, Arc<Semaphore>>,
}

/// Permission to fetch one image.
pub(crate) struct FetchSlot<'a> {
    _total: Option<tokio::sync::SemaphorePermit<'a>>,
    _tenant: Option<OwnedSemaphorePermit>,
}

impl FetchSlots {
    pub(crate) fn new() -> Self {
        Self {
            total: Semaphore::new(MAX_TOTAL),
            tenants: Cache::new(MAX_TENANTS),
        }
    }

    /// Waits in the line of a tenant, then in the line of all. The caller bounds the time.
    pub(crate) async fn enter(&self, tenant: &str) -> FetchSlot<'_> {
        let new = || Ok::<_, Infallible>(Arc::new(Semaphore::new(MAX_PER_TENANT)));
        let Ok(slots) = self.tenants.get_or_insert_with(tenant, new);
        // Neither semaphore is ever closed.
        let tenant = slots.acquire_owned().await.ok();
        FetchSlot {
            _tenant: tenant,
            _total: self.total.acquire().await.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_tenant_that_waits_holds_up_nobody_else() {
        let slots = FetchSlots::new();
        let mut held = Vec::new();
        for _ in 0..MAX_PER_TENANT {
            held.push(slots.enter("greedy").now_or_never().unwrap());
        }
        assert!(slots.enter("greedy").now_or_never().is_none());
        assert!(slots.enter("other").now_or_never().is_some());
        held.pop();
        assert!(slots.enter("greedy").now_or_never().is_some());
    }
}
