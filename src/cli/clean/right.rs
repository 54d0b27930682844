//! The right to write while cleaning: the Lease, taken from a controller that has stopped.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease};
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        NAME,
        lease::{self, Elector, Leadership},
        objects::Namespace,
        writer,
    },
    metrics::Metrics,
};

use super::Clean;

/// How long a controller that was told to stop may take.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
/// A holder that does not renew is waited out: its Lease lasts 15 s.
const EXPIRY: Duration = Duration::from_secs(25);

/// The right to write: a running controller would put everything back. `None`: refused.
pub(super) async fn right_to_write(
    clean: &Clean,
    client: &Client,
    namespace: &str,
    metrics: &Metrics,
) -> anyhow::Result<Option<HeldLease>> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let installed = namespaces
        .get_opt(namespace)
        .await
        .context("cannot read namespaces")?;
    if clean.dry_run || installed.is_none() {
        return Ok(Some(HeldLease::not_needed()));
    }
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let was_there = leases
        .get_opt(NAME)
        .await
        .context("cannot read the Lease")?
        .is_some();
    let patience = if clean.stop_controller {
        stop_controller(client, namespace).await?;
        STOP_TIMEOUT
    } else {
        let holder = lease::fresh_holder(&leases)
            .await
            .context("cannot read the Lease")?;
        if let Some(holder) = holder {
            refuse(&holder, namespace);
            return Ok(None);
        }
        EXPIRY
    };
    let identity = lease::identity("clean");
    let (elector, leadership) = Elector::new(client.clone(), namespace, identity, metrics.clone());
    let stop = CancellationToken::new();
    let elector = tokio::spawn(elector.run(stop.clone()));
    let mut leading = leadership.leading.clone();
    let acquired = tokio::time::timeout(patience, leading.wait_for(|leads| *leads))
        .await
        .is_ok();
    let lease = HeldLease {
        leadership,
        held: Some((elector, stop)),
        was_there,
    };
    if acquired {
        return Ok(Some(lease));
    }
    lease.give_back().await;
    refuse("somebody", namespace);
    Ok(None)
}

fn refuse(holder: &str, namespace: &str) {
    eprintln!(
        "error: archaware is running: {holder} holds the Lease {namespace}/{NAME} and would put\n\
         everything back. Stop it first, or let clean do that:\n\
         \n    kubectl -n {namespace} scale deployment {NAME} --replicas=0\n\
         \n    archaware clean --stop-controller"
    );
}

/// The Lease, held while cleaning; or the knowledge that nobody competes for it.
pub(super) struct HeldLease {
    pub(super) leadership: Leadership,
    held: Option<(JoinHandle<()>, CancellationToken)>,
    /// Before it was taken: one that was only made for this is not worth a word.
    pub(super) was_there: bool,
}

impl HeldLease {
    fn not_needed() -> Self {
        Self {
            leadership: Leadership::unquestioned(),
            held: None,
            was_there: true,
        }
    }

    pub(super) async fn give_back(self) {
        if let Some((elector, stop)) = self.held {
            stop.cancel();
            let _ = elector.await;
        }
    }
}

async fn stop_controller(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let operations = json!([{ "op": "add", "path": "/spec/replicas", "value": 0 }]);
    let patch: Patch<()> = Patch::Json(serde_json::from_value(operations)?);
    match deployments.patch(NAME, &writer::parameters(), &patch).await {
        Ok(_) => {
            eprintln!("scaled Deployment {namespace}/{NAME} to 0");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => {
            eprintln!("there is no Deployment {namespace}/{NAME}");
            Ok(())
        }
        Err(error) => Err(error).context("cannot scale the Deployment"),
    }
}
