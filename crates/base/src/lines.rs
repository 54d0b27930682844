//! Shares of a resource: a line for each tenant, so that one tenant does not delay other tenants.

use std::{convert::Infallible, sync::Arc};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::in_use::{InUseCache, in_use_cache};

/// Maximum number of lines that are kept. The least used lines are dropped, except those in which a
/// caller waits or is served.
const MAX_LINES: usize = 4096;

/// A semaphore (line) for each name, all with the same number of permits (places).
pub struct Lines {
    by_name: InUseCache<Semaphore>,
    places: usize,
}

/// A limited resource, and the largest share of it that one tenant gets.
pub struct SharedPlaces {
    total: Arc<Semaphore>,
    tenants: Lines,
}

/// A place of a tenant, freed on drop. The permits are owned, so that they can move to the thread
/// that does the work.
pub struct Place {
    _tenant: Option<OwnedSemaphorePermit>,
    _total: Option<OwnedSemaphorePermit>,
}

impl Lines {
    /// `places`: how many callers with the same name are served at once.
    pub fn new(places: usize) -> Self {
        Self {
            by_name: in_use_cache(MAX_LINES),
            places,
        }
    }

    /// Waits in the line of this name. The caller bounds the time.
    pub async fn enter(&self, name: &str) -> Option<OwnedSemaphorePermit> {
        let new = || Ok::<_, Infallible>(Arc::new(Semaphore::new(self.places)));
        let Ok(line) = self.by_name.get_or_insert_with(name, new);
        // No semaphore is ever closed.
        line.acquire_owned().await.ok()
    }
}

impl SharedPlaces {
    /// `total` places, of which each tenant gets at most `per_tenant`.
    pub fn new(total: usize, per_tenant: usize) -> Self {
        Self {
            total: Arc::new(Semaphore::new(total)),
            tenants: Lines::new(per_tenant),
        }
    }

    /// Waits for a place of the tenant, then for one of the total. The caller bounds the time.
    pub async fn enter(&self, tenant: &str) -> Place {
        Place {
            _tenant: self.tenants.enter(tenant).await,
            _total: self.total.clone().acquire_owned().await.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_tenant_gets_no_more_than_its_share() {
        let places = SharedPlaces::new(4, 2);
        let enter = |tenant| places.enter(tenant).now_or_never();
        let greedy = [enter("greedy"), enter("greedy")];
        assert!(greedy.iter().all(Option::is_some) && enter("greedy").is_none());
        let other = enter("other");
        assert!(other.is_some());
        let names: Vec<_> = (0..4 * MAX_LINES).map(|name| name.to_string()).collect();
        for name in &names {
            drop(enter(name));
        }
        assert!(enter("greedy").is_none(), "its line is not forgotten");
        drop(greedy);
        assert!(enter("greedy").is_some());
    }
}
