//! The admission webhook: completes pods, nodes and DaemonSets before they are stored. It resolves
//! images and decides in the same way as the controllers. Every failure admits the object
//! unchanged, and the controllers complete it. With `onMiss: gate` pods whose images are not known
//! in time get a scheduling gate.

mod ca_bundle;
mod certificate;
mod configuration;
mod http;
mod review;
mod reviewed_pod;
mod server;
mod webhook;

use std::{collections::BTreeMap, future::Future, sync::Arc, time::SystemTime};

use futures::FutureExt;
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cluster::{NAME, api::ApiClient, namespaces::Namespaces},
    evaluate::Evaluator,
    metrics::Metrics,
    tasks,
};

use ca_bundle::{CaBundle, Published};
use certificate::{CertResolver, FromFiles, SelfSigned};
use configuration::ConfigurationReconciler;
use http::Handler;
use server::Server;
use webhook::Webhook;

pub use configuration::{remove as remove_configuration, warn_if_registered};

/// What the webhook needs.
pub struct AdmissionParts {
    /// The API server.
    pub api: ApiClient,
    /// Evaluates pods and templates.
    pub evaluator: Evaluator,
    /// The namespaces; the controllers run their watch.
    pub namespaces: Namespaces,
    /// archaware's own namespace.
    pub namespace: String,
    /// Whether this process holds the Lease.
    pub leadership: watch::Receiver<bool>,
    /// Metrics to update.
    pub metrics: Metrics,
    /// Socket to serve on.
    pub listener: TcpListener,
}

/// Whether the webhook can serve: it has a certificate that has not expired.
pub type Readiness = Arc<dyn Fn() -> bool + Send + Sync>;

/// Labels of objects that archaware creates for the webhook.
fn labels() -> BTreeMap<String, String> {
    let labels = [
        ("app.kubernetes.io/name", NAME),
        ("app.kubernetes.io/component", "admission"),
        ("app.kubernetes.io/managed-by", NAME),
    ];
    labels
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

impl AdmissionParts {
    /// Returns the readiness check, and a future that serves until `stop` and shortly after. The
    /// future yields the name of the part that ended.
    pub fn run(
        self,
        stop: CancellationToken,
    ) -> (Readiness, impl Future<Output = &'static str> + Send) {
        let config = self.evaluator.config.clone();
        let served = Arc::new(CertResolver::default());
        let (authorities, authorities_receiver) = watch::channel(CaBundle::None);
        let (published, is_published) = watch::channel(Published::default());
        let admissions = self.metrics.admissions.clone();
        let resolver = served.clone();
        let help = "When the certificate of the webhook expires, in seconds since 1970";
        self.metrics.register_gauges(
            [("admission_certificate_expiry_seconds", help)],
            move || {
                let expires = resolver
                    .expires()
                    .and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
                let seconds = expires.and_then(|expires| i64::try_from(expires.as_secs()).ok());
                [seconds.map(|seconds| ([], seconds)).into_iter().collect()]
            },
        );

        let (connections, background) = (TaskTracker::new(), TaskTracker::new());
        let webhook = Webhook::new(
            self.evaluator,
            self.namespaces,
            background.clone(),
            stop.clone(),
            admissions.clone(),
            self.metrics.panics.clone(),
        );
        let server = Server {
            listener: self.listener,
            served: served.clone(),
            handler: Arc::new(Handler::new(
                webhook,
                admissions.clone(),
                self.metrics.panics.clone(),
            )),
            metrics: admissions,
            budget: config.admission.budget,
            tasks: connections,
        };
        let keeper = ConfigurationReconciler {
            api: self.api.clone(),
            config: config.clone(),
            namespace: self.namespace.clone(),
            leadership: self.leadership.clone(),
            authorities: authorities_receiver,
            published,
            served: served.clone(),
            metrics: self.metrics.admissions.clone(),
        };
        let resolver = served.clone();
        let ready: Readiness =
            Arc::new(move || resolver.expires().is_some_and(|at| at > SystemTime::now()));
        let files = &config.admission.certificates;
        let names = names(&config.admission.url, &self.namespace);
        let name = names.last().cloned().unwrap_or_default();
        let keeping = if files.certificate.as_os_str().is_empty() {
            let self_signed = SelfSigned {
                api: self.api,
                names,
                namespace: self.namespace,
                lifetime: files.lifetime,
                leadership: self.leadership,
                published: is_published,
                served,
                authorities,
            };
            self_signed.run(stop.clone()).left_future()
        } else {
            let files = FromFiles {
                config: files.clone(),
                name,
                published: is_published,
                served,
                authorities,
            };
            files.run(stop.clone()).right_future()
        };
        let running = async move {
            let mut running = JoinSet::new();
            let serving = server.serve(stop.clone()).map(|result| {
                if let Err(error) = result {
                    tracing::error!(%error, "cannot set up TLS for the admission server");
                }
                "admission server"
            });
            running.spawn(tasks::timed("admission server", serving));
            let keeping = keeping.map(|()| "admission certificate task");
            running.spawn(tasks::timed("admission certificate task", keeping));
            let registering = keeper.run(stop.clone());
            let registering = registering.map(|()| "webhook configuration task");
            running.spawn(tasks::timed("webhook configuration task", registering));
            let ended = running.join_next().await.and_then(Result::ok);
            stop.cancel();
            while running.join_next().await.is_some() {}
            background.close();
            background.wait().await;
            ended.unwrap_or("webhook")
        };
        (ready, running)
    }
}

/// The names under which the API server reaches the webhook, the current one last. The certificate
/// must be valid for all of them.
fn names(url: &str, namespace: &str) -> Vec<String> {
    let mut names = vec![format!("{NAME}.{namespace}.svc")];
    let uri = url.parse::<::http::Uri>().ok();
    let host = uri.as_ref().and_then(::http::Uri::host);
    // An IPv6 address has several spellings; a certificate contains only one of them.
    let host = host.map(|host| host.trim_matches(['[', ']']));
    names.extend(host.map(|host| match host.parse::<std::net::IpAddr>() {
        Ok(address) => address.to_string(),
        Err(_) => host.to_ascii_lowercase(),
    }));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_is_for_what_the_api_server_calls() {
        assert_eq!(names("", "ns"), ["archaware.ns.svc"]);
        assert_eq!(
            names("https://hook.example:8443/a", "ns")[1],
            "hook.example"
        );
        assert_eq!(names("https://127.0.0.1:8443", "ns")[1], "127.0.0.1");
        assert_eq!(names("https://[0:0::1]:8443", "ns")[1], "::1");
    }
}
