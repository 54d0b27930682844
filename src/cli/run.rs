//! `archaware run`: the controller.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{lease, namespaces::Namespaces, pull_secrets::PullSecrets},
    config::ListenAddress,
    controller::{self, RunError},
    image::Resolver,
    inspect::Inspector,
    metrics::Metrics,
    server::{self, Health},
};

use super::{Global, Keep, Status, resolver};

#[derive(Debug, Args)]
pub(super) struct Run {
    /// Address for /metrics, /healthz and /readyz
    #[arg(
        long,
        env = "ARCHAWARE_LISTEN",
        default_value = ":8080",
        value_name = "ADDRESS"
    )]
    listen: ListenAddress,
}

impl Run {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<Status> {
        let config = Arc::new(global.load_config()?);
        let metrics = Metrics::default();
        let client = global.client(&metrics).await?;
        let resolver = resolver(&global, &config, &metrics, Keep::Yes)?;
        watch_resolver(&metrics, &resolver);
        let listener = server::bind(self.listen.0)
            .await
            .with_context(|| format!("cannot listen on {} (--listen)", self.listen))?;
        let address = listener.local_addr()?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), %address, "archaware starts");

        let stop = CancellationToken::new();
        let signals = tokio::spawn(stop_on_signal(stop.clone())?);
        let (synced, is_synced) = watch::channel(false);
        let health = Health {
            metrics: metrics.clone(),
            synced: is_synced,
            client: client.clone(),
        };
        let mut server = tokio::spawn(server::serve(
            listener,
            health,
            stop.clone().cancelled_owned(),
        ));
        let inspector = Inspector {
            resolver,
            pull_secrets: PullSecrets::new(client.clone()),
            policy: Arc::new((&*config).into()),
            config: config.clone(),
        };
        let namespaces = Namespaces::default();
        let run = controller::Run {
            client,
            config,
            inspector,
            namespaces,
            namespace: global.namespace(),
            identity: lease::identity("archaware"),
            metrics,
            synced,
        };
        let running = controller::run(run, stop.clone());
        tokio::pin!(running);
        // Without probes and metrics nobody could tell how it is: it ends, and is started anew.
        let result = tokio::select! {
            result = &mut running => result,
            _ = &mut server => {
                let stopping = stop.is_cancelled();
                stop.cancel();
                let result = running.await;
                if stopping { result } else { Err(RunError::Ended("the HTTP server")) }
            }
        };
        stop.cancel();
        signals.abort();
        // A scrape that is under way may finish; one that hangs may not.
        if !server.is_finished() {
            let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
        }
        result?;
        tracing::info!("archaware ends");
        Ok(Status::Done)
    }
}

/// Registry hosts that are shown with their own limits. They are named by whoever creates pods.
const MAX_QUOTAS: usize = 32;

/// What the resolver knows of itself, read at scrape time.
fn watch_resolver(metrics: &Metrics, resolver: &Resolver) {
    let own = resolver.clone();
    metrics.register_gauges("containerd_up", "1 while containerd answers", move || {
        let up = own.containerd_is_up().map(|up| ([], i64::from(up)));
        up.into_iter().collect()
    });
    let own = resolver.clone();
    let help = "Registry hosts that are left alone at the moment";
    metrics.register_gauges("registries_gated", help, move || {
        vec![([], i64::try_from(own.gated_hosts()).unwrap_or(i64::MAX))]
    });
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let own = resolver.clone();
    let help = "Pulls that a registry says are left, for the first 32 that say so";
    metrics.register_gauges("registry_rate_limit_remaining", help, move || {
        let quotas = own.quotas().into_iter().take(MAX_QUOTAS);
        quotas
            .map(|(host, quota)| ([("registry", host)], number(quota.remaining)))
            .collect()
    });
    let own = resolver.clone();
    let help = "Pulls that a registry says are allowed in its window, for the first 32 that say so";
    metrics.register_gauges("registry_rate_limit", help, move || {
        let quotas = own.quotas().into_iter().take(MAX_QUOTAS);
        let limited =
            quotas.filter_map(|(host, quota)| Some(([("registry", host)], number(quota.limit?))));
        limited.collect()
    });
}

/// Installed before anything is started, so no signal is lost.
pub(super) fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    Ok(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!("{name}: finishing what is under way");
        stop.cancel();
    })
}
