//! `archaware run`: the controller.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context;
use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::lease,
    controller::{self, RunError},
    metrics::Metrics,
    server::{self, Health},
};

use super::{Global, Status, resolver};

#[derive(Debug, Args)]
pub(super) struct Run {
    /// Address for /metrics, /healthz and /readyz
    #[arg(long, env = "ARCHAWARE_LISTEN", default_value = ":8080", value_name = "ADDRESS", value_parser = address)]
    listen: SocketAddr,
}

/// `:8080` means every address, as in Go's servers.
fn address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') {
        format!("[::]{text}")
    } else {
        text.to_owned()
    };
    full.parse()
        .map_err(|_| "not an address like 127.0.0.1:8080 or :8080".to_owned())
}

impl Run {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<Status> {
        let config = Arc::new(global.load_config()?);
        let keyring = Arc::new(global.keyring(&config)?);
        let metrics = Metrics::default();
        let client = global.client(&metrics).await?;
        let resolver = resolver(&config, &metrics)?;
        let listener = server::bind(self.listen)
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
        let run = controller::Run {
            client,
            config,
            resolver,
            keyring,
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

/// Installed before anything is started, so no signal is lost.
fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
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
