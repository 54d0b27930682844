//! Acquires the Lease for `archaware clean`, so that no controller restores removed objects.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use k8s_openapi::api::coordination::v1::Lease;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    cluster::{
        NAME,
        api::{ApiClient, ApiError},
        lease::{self, Elector, LEASE_DURATION, Leadership},
        name::NamespacedName,
        objects::{Deployment, Namespace},
    },
    controller::Durable,
    metrics::Metrics,
    tasks,
};

use super::{CleanCommand, Installation};

/// How long a `clean` in one of archaware's pods keeps the Lease after its end, so that all
/// controllers can stop.
const END_TIMEOUT: Duration = Duration::from_mins(1);
/// How long to wait for a controller to stop; longer than [`END_TIMEOUT`].
const STOP_TIMEOUT: Duration = Duration::from_secs(90);
/// How long to wait for a holder that does not renew; a Lease expires after 15 s.
const EXPIRY_TIMEOUT: Duration = Duration::from_secs(25);

/// Acquires the Lease; `None` if a running controller holds it, because that controller would
/// restore the removed objects.
pub(super) async fn acquire(
    clean: CleanCommand,
    api: &ApiClient,
    installation: &Installation,
    metrics: &Metrics,
) -> anyhow::Result<Option<CleanLease>> {
    let namespace = installation.namespace.as_str();
    let memory = Durable::new(installation.keys.clone());
    let read = lease::read_memory(api, namespace, &memory).await;
    read.with_context(|| format!("cannot read Lease {namespace}/{NAME}"))?;
    let own_namespace = NamespacedName::cluster(namespace);
    let is_installed = match api.find_metadata::<Namespace>(&own_namespace).await {
        Ok(found) => found.is_some(),
        // archaware's service account may not read namespaces, but its own namespace exists.
        Err(ApiError::Forbidden(_)) => true,
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read Namespace {namespace}"));
        }
    };
    if clean.dry_run || !is_installed {
        return Ok(Some(CleanLease::not_needed()));
    }
    let name = NamespacedName::new(namespace, NAME);
    let found = api.find::<Lease>(&name).await;
    let found = found.with_context(|| format!("cannot read Lease {name}"))?;
    let identity = lease::identity("clean");
    // In a pod of the Deployment, clean always stops the Deployment: otherwise its replicas would
    // restore everything.
    let stops_own_pod = installation.is_inside && can_stop(api, &name).await?;
    let patience = if stops_own_pod {
        let taken = lease::take(api, namespace, &identity, LEASE_DURATION).await;
        taken.with_context(|| {
            format!("cannot take Lease {name} over from the running controllers")
        })?;
        EXPIRY_TIMEOUT
    } else if clean.stop_controller {
        stop_controller(api, &name).await?;
        STOP_TIMEOUT
    } else {
        let holder = found.as_ref().and_then(lease::fresh_holder);
        if let Some(holder) = holder {
            refuse(&holder, &name, installation.is_inside);
            return Ok(None);
        }
        EXPIRY_TIMEOUT
    };
    let memory = Arc::new(memory);
    let (elector, leadership) =
        Elector::new(api, namespace, identity.clone(), memory, metrics.clone());
    let stop = CancellationToken::new();
    let elector = elector.silent().run(stop.clone());
    let elector = AbortOnDropHandle::new(tasks::spawn("elector", elector));
    let mut leading = leadership.leading.clone();
    let acquired = tokio::time::timeout(patience, leading.wait_for(|leads| *leads))
        .await
        .is_ok();
    let lease = CleanLease {
        leadership,
        held: Some((elector, stop)),
        was_there: found.is_some(),
        stops_own_pod,
        identity,
    };
    if acquired {
        if stops_own_pod {
            let seconds = LEASE_DURATION.as_secs();
            eprintln!(
                "took the Lease {name} over; waiting {seconds} s until its former holder has noticed"
            );
            tokio::time::sleep(LEASE_DURATION).await;
        }
        return Ok(Some(lease));
    }
    lease.release().await;
    let holder = api.find::<Lease>(&name).await.ok().flatten();
    if let Some(holder) = holder.as_ref().and_then(lease::fresh_holder) {
        refuse(&holder, &name, installation.is_inside);
        return Ok(None);
    }
    bail!("cannot acquire the Lease {name}; the warnings above say why")
}

/// Whether there is a Deployment to stop. Fails without the permission to scale the Deployment: a
/// server-side dry run checks the permission before anything is removed.
async fn can_stop(api: &ApiClient, name: &NamespacedName) -> anyhow::Result<bool> {
    let allowed = match api.find::<Deployment>(name).await {
        Ok(None) => return Ok(false),
        Ok(Some(found)) => {
            let replicas = found.spec.replicas.unwrap_or(1);
            api.scale(name, u32::try_from(replicas).unwrap_or_default(), true)
                .await
        }
        Err(error) => Err(error),
    };
    allowed.with_context(|| {
        format!(
            "cannot scale Deployment {name} to 0 to stop archaware: apply the manifests of this version, or run clean as an administrator"
        )
    })?;
    Ok(true)
}

fn refuse(holder: &str, lease: &NamespacedName, is_inside: bool) {
    let namespace = lease.namespace.as_deref().unwrap_or_default();
    // In archaware's own namespace, the kubectl command is left out: it would also end this pod.
    let scale = if is_inside {
        String::new()
    } else {
        format!("    kubectl -n {namespace} scale deployment {NAME} --replicas=0\n\n")
    };
    eprintln!(
        "error: archaware is running: {holder} holds the Lease {lease} and would put\n\
         everything back. Stop it first, or let clean do that:\n\
         \n{scale}    archaware clean --stop-controller"
    );
}

/// The Lease of `clean`. It is not held in a dry run, or if archaware is not installed.
pub(super) struct CleanLease {
    pub(super) leadership: Leadership,
    held: Option<(AbortOnDropHandle<()>, CancellationToken)>,
    /// Whether the Lease existed before this command. If not, it is removed without a message.
    pub(super) was_there: bool,
    /// Whether this process ends with the controllers.
    pub(super) stops_own_pod: bool,
    identity: String,
}

impl CleanLease {
    fn not_needed() -> Self {
        Self {
            leadership: Leadership::always(),
            held: None,
            was_there: true,
            stops_own_pod: false,
            identity: String::new(),
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Returns when this process has lost the Lease; never if it did not acquire one.
    pub(super) async fn lost(&self) {
        let mut leading = self.leadership.leading.clone();
        if leading.wait_for(|leading| !*leading).await.is_err() || self.held.is_none() {
            std::future::pending::<()>().await;
        }
    }

    pub(super) async fn release(self) {
        if let Some((elector, stop)) = self.held {
            stop.cancel();
            let _ = elector.await;
        }
    }

    /// Keeps the Lease beyond the end of this process, until the other replicas have ended too.
    pub(super) async fn keep(self, api: &ApiClient, namespace: &str) -> Result<(), ApiError> {
        if let Some((elector, _)) = self.held {
            elector.abort();
            let _ = elector.await;
        }
        lease::take(api, namespace, &self.identity, END_TIMEOUT).await
    }
}

async fn stop_controller(api: &ApiClient, name: &NamespacedName) -> anyhow::Result<()> {
    match api.scale(name, 0, false).await {
        Ok(()) => eprintln!("scaled Deployment {name} to 0"),
        Err(ApiError::NotFound(_)) => eprintln!(
            "there is no Deployment {name} to stop; if archaware runs in another namespace, name that with --namespace"
        ),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot scale Deployment {name} to 0"));
        }
    }
    Ok(())
}
