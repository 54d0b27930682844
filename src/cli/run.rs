//! `archaware run`: the controllers, the webhook and the HTTP server.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use clap::Args;
use futures::{FutureExt, future::BoxFuture};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    admission::{self, AdmissionParts, Readiness},
    cluster::{
        cluster_nodes::ClusterNodes,
        lease::{self, Elector},
        namespaces::Namespaces,
    },
    config::{ListenAddress, without_effect},
    controller::{self, Durable, RunError},
    evaluate::{Evaluator, KnownKeys, pull_secrets::PullSecrets},
    image::{Resolver, metrics::MAX_HOSTS},
    metrics::Metrics,
    server::{self, ApiCheck, Health},
    sources::sources,
    tasks,
    telemetry::LogLevel,
};

use super::{CommandStatus, Global, Persist, resolver};

#[derive(Debug, Args)]
pub(super) struct RunCommand {
    /// Address for /metrics, /healthz and /readyz
    #[arg(
        long,
        env = "ARCHAWARE_LISTEN",
        default_value = ":8080",
        value_name = "ADDRESS"
    )]
    listen: ListenAddress,
}

impl RunCommand {
    pub(super) async fn execute(
        self,
        global: Global,
        log_level: LogLevel,
    ) -> anyhow::Result<CommandStatus> {
        let config = Arc::new(global.load_config()?);
        for sentence in without_effect(&config) {
            tracing::warn!("{sentence}");
        }
        let metrics = Metrics::default();
        let api = global.api(&metrics).await?;
        let resolver = resolver(&global, &config, &metrics, Persist::Yes)?;
        register_resolver_gauges(&metrics, &resolver);
        let finishing = resolver.clone();
        let probe = probe_containerd(resolver.clone());
        let mut side_tasks = JoinSet::new();
        let listener = listen(self.listen, "--listen").await?;
        let address = listener.local_addr()?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), %address, "archaware started");

        // A signal cancels `stop_requested`, and with it `stop`. Any other reason cancels only
        // `stop`, and is an error.
        let stop_requested = CancellationToken::new();
        let stop = stop_requested.child_token();
        let probe = stop.clone().run_until_cancelled_owned(probe);
        side_tasks.spawn(tasks::timed("probe", probe));
        let signals = stop_on_signal(stop_requested.clone())?;
        let signals = stop.clone().run_until_cancelled_owned(signals);
        side_tasks.spawn(tasks::timed("signals", signals));
        let namespace = global.namespace();
        let identity = lease::identity("archaware");
        let keys = KnownKeys::new(&*config);
        let durable = Durable::new(keys.clone());
        let memory = Arc::new(durable.clone());
        let election = Elector::new(&api, &namespace, identity, memory, metrics.clone());
        let nodes = ClusterNodes::default();
        let evaluator = Evaluator {
            resolver,
            pull_secrets: PullSecrets::new(api.clone()),
            policy: Arc::new((&*config).into()),
            config: config.clone(),
            keys,
            sources: sources(&config.selection, &nodes)?,
            nodes,
            explains: false,
        };
        let (pending, is_pending) = watch::channel(controller::WATCHES.to_vec());
        let run = controller::ControllerParts {
            api: api.clone(),
            config,
            evaluator,
            namespaces: Namespaces::default(),
            namespace,
            election,
            durable,
            metrics: metrics.clone(),
            pending,
        };
        let (ready, webhook) = webhook(&run, &stop, &mut side_tasks).await?;
        let mut webhook = tasks::spawn("webhook", webhook);
        let health = Health {
            metrics,
            pending: is_pending,
            admission: ready.clone(),
            api: Arc::new(ApiCheck::new(api)),
            log_level,
        };
        let serving = server::serve(listener, health, stop.clone());
        let mut server = tasks::spawn("HTTP server", serving);
        let running = controller::run(run, stop.clone());
        tokio::pin!(running);
        // Without probes and metrics the process would be unobservable, so it ends and is
        // restarted.
        let ended = tokio::select! {
            result = &mut running => ExitReason::Controller(result),
            _ = &mut server => ExitReason::Other("HTTP server"),
            name = &mut webhook => ExitReason::Other(name.unwrap_or("webhook")),
        };
        stop.cancel();
        let mut ended_task = None;
        let mut result = match ended {
            ExitReason::Controller(result) => result,
            ExitReason::Other(name) => {
                ended_task = Some(name);
                running.await
            }
        };
        // A scrape in progress may finish, within a limit.
        if !server.is_finished() {
            let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
        }
        if ready.is_some() && !webhook.is_finished() {
            ended_task = ended_task.or(webhook.await.ok());
        }
        while side_tasks.join_next().await.is_some() {}
        // Wait for writes to containerd: otherwise the next process would fetch the last images
        // again.
        finishing.finish_writes().await;
        if !stop_requested.is_cancelled() && result.is_ok() {
            result = Err(RunError::Ended(ended_task.unwrap_or("controller")));
        }
        result?;
        tracing::info!("archaware stopped");
        Ok(CommandStatus::Done)
    }
}

/// Starts the webhook if it is enabled. Returns its readiness check and its task. The webhook
/// serves a little longer than the other tasks: API servers need time to notice that this replica
/// stops.
async fn webhook(
    run: &controller::ControllerParts,
    stop: &CancellationToken,
    side_tasks: &mut JoinSet<Option<()>>,
) -> anyhow::Result<(Option<Readiness>, BoxFuture<'static, &'static str>)> {
    let (config, leadership) = (&run.config, run.election.1.leading.clone());
    if !config.admission.enabled {
        let warning = admission::warn_if_registered(run.api.clone());
        let warning = stop.clone().run_until_cancelled_owned(warning);
        side_tasks.spawn(tasks::timed("warning about the registration", warning));
        return Ok((None, std::future::pending().boxed()));
    }
    let admission = AdmissionParts {
        api: run.api.clone(),
        evaluator: run.evaluator.clone(),
        namespaces: run.namespaces.clone(),
        namespace: run.namespace.clone(),
        leadership,
        metrics: run.metrics.clone(),
        listener: listen(config.admission.listen, "admission.listen").await?,
    };
    let address = admission.listener.local_addr()?;
    tracing::info!(%address, "admission webhook listening");
    let (ready, running) = admission.run(stop.clone());
    Ok((Some(ready), running.boxed()))
}

/// The part that ended first.
enum ExitReason {
    Controller(Result<(), RunError>),
    Other(&'static str),
}

async fn listen(address: ListenAddress, setting: &str) -> anyhow::Result<TcpListener> {
    let listener = server::bind(address.0).await;
    listener.with_context(|| format!("cannot listen on {address} ({setting})"))
}

/// Interval of the probes of containerd; equal to the time that its circuit breaker stays open.
const PROBE_INTERVAL: Duration = Duration::from_secs(30);

/// Probes containerd periodically: otherwise its gauge would be as old as the last new image.
async fn probe_containerd(resolver: Resolver) {
    loop {
        resolver.probe_containerd().await;
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

/// Registers gauges of the resolver's state.
fn register_resolver_gauges(metrics: &Metrics, resolver: &Resolver) {
    let shared_resolver = resolver.clone();
    let gauge = [("containerd_up", "1 while containerd answers")];
    metrics.register_gauges(gauge, move || {
        let up = shared_resolver
            .containerd_is_up()
            .map(|up| ([], i64::from(up)));
        [up.into_iter().collect()]
    });
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let shared_resolver = resolver.clone();
    let help =
        "Registry hosts that get no requests at the moment, because of rate limits or timeouts";
    metrics.register_gauges([("registries_gated", help)], move || {
        [vec![([], number(shared_resolver.paused_hosts() as u64))]]
    });
    let shared_resolver = resolver.clone();
    let limits = [
        (
            "registry_rate_limit",
            "Pulls per window that a registry allows, as it reports them, for the first 32 registries",
        ),
        (
            "registry_rate_limit_remaining",
            "Remaining pulls that a registry reports, for the first 32 registries",
        ),
    ];
    metrics.register_gauges(limits, move || {
        let (mut allowed, mut left) = (Vec::new(), Vec::new());
        for (host, quota) in shared_resolver.quotas().into_iter().take(MAX_HOSTS) {
            let labels = [("registry", host)];
            let limit = quota.limit.map(|limit| (labels.clone(), number(limit)));
            allowed.extend(limit);
            left.push((labels, number(quota.remaining)));
        }
        [allowed, left]
    });
}

/// Installs the signal handlers at once; the returned future cancels `stop` at the first signal.
pub(super) fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    Ok(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!("{name}: shutting down");
        stop.cancel();
    })
}
