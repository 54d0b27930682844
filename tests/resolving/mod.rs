//! Resolvers for tests and benches, with and without a real containerd. Not in testsupport: that
//! crate does without archaware, so that a change of archaware compiles it once for its unit tests.

use std::time::Duration;

use archaware::{
    image::{
        ImageError, PullPolicy, ResolveRequest, Resolved, Resolver, ResolverSettings,
        containerd::{Containerd as Client, LOOKUP_TIMEOUT},
        credentials::{self, Credential, Keyring, OperatorCredentials},
        metrics::Resolutions,
        registry as client,
    },
    metrics::Metrics,
};
use testsupport::servers::Containerd;

pub(crate) fn settings() -> ResolverSettings {
    // Shown for failed tests.
    let filter = tracing_subscriber::EnvFilter::new("archaware=debug");
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_test_writer()
        .try_init();
    let _ = rustls::crypto::ring::default_provider().install_default();
    ResolverSettings {
        registry: client::RegistryClient {
            timeout: Duration::from_secs(5),
            per_host: 8,
            ..Default::default()
        },
        rewrites: Vec::new(),
        images: 1000,
        tag_ttl: Duration::from_mins(10),
        latest_ttl: Duration::from_mins(10),
        per_credential: false,
    }
}

/// A resolver without containerd.
pub(crate) fn resolver(settings: ResolverSettings) -> Resolver {
    Resolver::new(
        settings,
        None,
        OperatorCredentials::default(),
        Resolutions::default(),
    )
}

/// Resolves an image with pull policy `IfNotPresent`.
pub(crate) async fn resolve(
    resolver: &Resolver,
    image: &str,
    keyring: &Keyring,
) -> Result<Resolved, ImageError> {
    let request = ResolveRequest {
        image,
        policy: PullPolicy::IfNotPresent,
        keyring: &credentials::ready_keyring(keyring.clone()),
        tenant: "",
    };
    resolver.resolve(request).await
}

pub(crate) fn keyring(registry: &str, user: &str, password: &str) -> Keyring {
    let credential = Credential::password(user.to_owned(), password.to_owned().into());
    Keyring::new([(registry.to_owned(), credential)])
}

pub(crate) fn platforms(resolved: &Resolved) -> Vec<String> {
    resolved
        .platforms
        .platforms()
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// Resolvers that persist documents in a containerd.
pub(crate) trait WithContainerd {
    /// One more resolver.
    fn resolver(&self, settings: ResolverSettings) -> Resolver {
        self.counting(settings, &Metrics::default())
    }

    /// The same with these metrics.
    fn counting(&self, settings: ResolverSettings, metrics: &Metrics) -> Resolver;
}

impl WithContainerd for Containerd {
    /// On a busy machine containerd needs longer than the usual limit, and then the registry would
    /// be asked.
    fn counting(&self, settings: ResolverSettings, metrics: &Metrics) -> Resolver {
        through(&self.socket(), settings, metrics, Duration::from_secs(10))
    }
}

/// A resolver whose containerd is behind this socket, with the usual limit of lookups.
pub(crate) fn resolver_at(socket: &str, settings: ResolverSettings) -> Resolver {
    through(socket, settings, &Metrics::default(), LOOKUP_TIMEOUT)
}

fn through(
    socket: &str,
    settings: ResolverSettings,
    metrics: &Metrics,
    lookup_timeout: Duration,
) -> Resolver {
    let namespaces = vec!["k8s.io".to_owned()];
    let (own, writes) = (Some("archaware"), Some(&metrics.content_writes));
    let containerd = Client::new(socket, namespaces, own, writes, lookup_timeout).unwrap();
    let (node, resolutions) = (OperatorCredentials::default(), metrics.resolutions.clone());
    Resolver::new(settings, Some(containerd), node, resolutions)
}
