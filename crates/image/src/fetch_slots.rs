//! Bounds the number of images that are fetched at the same time: for each tenant at each registry,
//! so that a hanging registry does not delay the tenant's other images; for each tenant, so that no
//! tenant delays other tenants; and in total.

use archaware_base::lines::Lines;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Maximum number of images that are being fetched for one tenant.
const MAX_PER_TENANT: usize = 64;
/// Maximum number of images that are being fetched, to bound memory. Each image holds up to half a
/// MiB of documents, and buffers of up to 400 KiB for the connection of its request. An image has
/// one request at a time to a registry or token server; only artifacts of an index are read four at
/// a time.
const MAX_TOTAL: usize = 128;

/// The slots of all tenants.
pub(crate) struct FetchSlots {
    total: Semaphore,
    tenants: Lines,
    registries: Lines,
}

/// Permission to fetch one image.
pub(crate) struct FetchSlot<'a> {
    _registry: Option<OwnedSemaphorePermit>,
    _tenant: Option<OwnedSemaphorePermit>,
    _total: Option<SemaphorePermit<'a>>,
}

impl FetchSlots {
    /// `per_host` is the number of requests that a registry gets at once. Each tenant may fetch
    /// twice as many images from it, to keep it busy.
    pub(crate) fn new(per_host: usize) -> Self {
        Self {
            total: Semaphore::new(MAX_TOTAL),
            tenants: Lines::new(MAX_PER_TENANT),
            registries: Lines::new(per_host.saturating_mul(2).min(MAX_TOTAL)),
        }
    }

    /// Waits for three permits: of the tenant at this registry, of the tenant, and of the total.
    /// The caller sets a timeout.
    pub(crate) async fn enter(&self, tenant: &str, registry: &str) -> FetchSlot<'_> {
        // Unambiguous, because neither a namespace nor a registry contains a space.
        let pair = format!("{tenant} {registry}");
        FetchSlot {
            _registry: self.registries.enter(&pair).await,
            _tenant: self.tenants.enter(tenant).await,
            _total: self.total.acquire().await.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_tenant_or_registry_that_waits_holds_up_nobody_else() {
        let slots = FetchSlots::new(8);
        let enter = |tenant, registry| slots.enter(tenant, registry).now_or_never();
        let hanging: Vec<_> = (0..16).map(|_| enter("greedy", "hangs")).collect();
        assert!(hanging.iter().all(Option::is_some));
        assert!(enter("greedy", "hangs").is_none());
        assert!(enter("other", "hangs").is_some());
        let names: Vec<String> = (0..48).map(|number| format!("r{number}")).collect();
        let many: Vec<_> = names.iter().map(|name| enter("greedy", name)).collect();
        assert!(many.iter().all(Option::is_some));
        assert!(enter("greedy", "one-more").is_none(), "64 of a tenant");
        assert!(enter("other", "one-more").is_some());
        drop(hanging);
        assert!(enter("greedy", "hangs").is_some());
    }
}
