//! Acquires the Lease for `archaware clean`, so that no controller restores what is removed.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    cluster::{
        NAME,
        api::{ApiClient, ApiError},
        lease::{self, Elector, Leadership},
        name::NamespacedName,
        objects::Namespace,
        patch,
    },
    metrics::Metrics,
};

use super::CleanCommand;

/// How long a controller may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
/// How long to wait for a holder that does not renew; a Lease expires after 15 s.
const EXPIRY_TIMEOUT: Duration = Duration::from_secs(25);

/// Acquires the Lease. `None`: refused, because a running controller would restore everything.
pub(super) async fn acquire(
    clean: CleanCommand,
    api: &ApiClient,
    namespace: &str,
    metrics: &Metrics,
) -> anyhow::Result<Option<CleanLease>> {
    let installed = api
        .find::<Namespace>(&NamespacedName::cluster(namespace))
        .await
        .context("cannot read namespaces")?;
    if clean.dry_run || installed.is_none() {
        return Ok(Some(CleanLease::not_needed()));
    }
    let name = NamespacedName::new(namespace, NAME);
    let found = api.find::<Lease>(&name).await;
    let found = found.context("cannot read the Lease")?;
    let patience = if clean.stop_controller {
        stop_controller(api, &name).await?;
        STOP_TIMEOUT
    } else {
        let holder = found.as_ref().and_then(lease::fresh_holder);
        if let Some(holder) = holder {
            refuse(&holder, &name);
            return Ok(None);
        }
        EXPIRY_TIMEOUT
    };
    let identity = lease::identity("clean");
    let (elector, leadership) = Elector::new(api, namespace, identity, metrics.clone());
    let stop = CancellationToken::new();
    let elector = AbortOnDropHandle::new(tokio::spawn(elector.run(stop.clone())));
    let mut leading = leadership.leading.clone();
    let acquired = tokio::time::timeout(patience, leading.wait_for(|leads| *leads))
        .await
        .is_ok();
    let lease = CleanLease {
        leadership,
        held: Some((elector, stop)),
        was_there: found.is_some(),
    };
    if acquired {
        return Ok(Some(lease));
    }
    lease.release().await;
    refuse("another process", &name);
    Ok(None)
}

fn refuse(holder: &str, lease: &NamespacedName) {
    let namespace = lease.namespace.as_deref().unwrap_or_default();
    eprintln!(
        "error: archaware is running: {holder} holds the Lease {lease} and would put\n\
         everything back. Stop it first, or let clean do that:\n\
         \n    kubectl -n {namespace} scale deployment {NAME} --replicas=0\n\
         \n    archaware clean --stop-controller"
    );
}

/// The held Lease, or the result that nothing competes for it.
pub(super) struct CleanLease {
    pub(super) leadership: Leadership,
    held: Option<(AbortOnDropHandle<()>, CancellationToken)>,
    /// Whether it existed before. A Lease that was only created by this command is removed without a message.
    pub(super) was_there: bool,
}

impl CleanLease {
    fn not_needed() -> Self {
        Self {
            leadership: Leadership::always(),
            held: None,
            was_there: true,
        }
    }

    pub(super) async fn release(self) {
        if let Some((elector, stop)) = self.held {
            stop.cancel();
            let _ = elector.await;
        }
    }
}

async fn stop_controller(api: &ApiClient, name: &NamespacedName) -> anyhow::Result<()> {
    match api.patch::<Deployment>(name, patch::replicas(0)).await {
        Ok(()) => eprintln!("scaled Deployment {name} to 0"),
        Err(ApiError::NotFound(_)) => eprintln!("there is no Deployment {name}"),
        Err(error) => return Err(error).context("cannot scale the Deployment"),
    }
    Ok(())
}
