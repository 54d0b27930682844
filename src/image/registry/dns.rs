//! Resolves the names of registries. Asynchronous, because names that never resolve would fill the threads on which the
//! system's resolver blocks. Addresses are checked after the name is resolved.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hickory_resolver::{
    ResolverBuilder, TokioResolver,
    config::{LookupIpStrategy, NameServerConfig, ResolverConfig},
    net::{NetError, runtime::TokioRuntimeProvider},
};
use quick_cache::sync::Cache;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

use super::address::{is_local, is_loopback, registrable_domain};

/// Maximum number of names of one domain that are being resolved. Whoever owns a domain decides whether its names are
/// ever answered.
const MAX_PER_DOMAIN: usize = 8;
/// Users choose the names, so the state of the least used domains is dropped.
const MAX_DOMAINS: usize = 1024;
/// Timeout of one query. Shorter than a request's, so that a lost packet is sent again.
const QUERY_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum number of cached answers; each has some hundred bytes.
const MAX_CACHED: u64 = 2048;
/// How long an answer is used if its TTL is longer. A registry that moves is found again soon.
const MAX_TTL: Duration = Duration::from_mins(5);
/// How long a name counts as absent if its zone says longer.
const MAX_NEGATIVE_TTL: Duration = Duration::from_secs(30);

/// A name that leads to archaware's own machine or to a metadata service.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name} resolves to {address}, which is an address of this machine or of a metadata service; \
     if that is a registry, add {name} to registries.allowLocalAddresses"
)]
pub(super) struct LocalAddress {
    name: String,
    address: IpAddr,
}

/// Resolves names. Cheap to clone.
#[derive(Clone)]
pub(super) struct Dns(Arc<DnsInner>);

struct DnsInner {
    resolver: Result<TokioResolver, Arc<NetError>>,
    domains: Cache<String, Arc<Semaphore>>,
    /// Hosts whose names may resolve to local addresses.
    allowed: Vec<String>,
}

/// Whether local addresses are refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum AddressCheck {
    /// Unless the host is in `registries.allowLocalAddresses`.
    RefuseLocal,
    /// The operator wrote the name into `hosts.toml`.
    AllowAll,
}

impl Dns {
    /// A resolver with the settings of `/etc/resolv.conf` and the names of `/etc/hosts`.
    pub(super) fn new(allowed: Vec<String>) -> Self {
        let builder = TokioResolver::builder_tokio().unwrap_or_else(|error| {
            // As in the C library: without a configuration the name server is on this machine.
            tracing::debug!(%error, "cannot read /etc/resolv.conf; asking the name server on loopback");
            let local = NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into());
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![local]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        });
        Self::build(builder, allowed)
    }

    fn build(mut builder: ResolverBuilder<TokioRuntimeProvider>, allowed: Vec<String>) -> Self {
        let options = builder.options_mut();
        options.timeout = options.timeout.min(QUERY_TIMEOUT);
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        options.cache_size = MAX_CACHED;
        options.positive_max_ttl = Some(MAX_TTL);
        options.negative_max_ttl = Some(MAX_NEGATIVE_TTL);
        Self(Arc::new(DnsInner {
            resolver: builder.build().map_err(Arc::new),
            domains: Cache::new(MAX_DOMAINS),
            allowed,
        }))
    }

    /// A resolver for an HTTP client.
    pub(super) fn for_client(&self, check: AddressCheck) -> impl Resolve + 'static {
        ClientDns {
            dns: self.clone(),
            check,
        }
    }

    /// Whether local addresses are allowed for a host.
    pub(super) fn allows_local(&self, host: &str) -> bool {
        let named = |allowed: &String| allowed.eq_ignore_ascii_case(host);
        self.0.allowed.iter().any(named)
    }

    async fn addresses(&self, name: &str, check: AddressCheck) -> Result<Vec<IpAddr>, BoxError> {
        // A name that is sent nowhere (RFC 6761, 6.3).
        if is_loopback(name) {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let new = || Ok::<_, Infallible>(Arc::new(Semaphore::new(MAX_PER_DOMAIN)));
        let domain = registrable_domain(name.trim_end_matches('.'));
        let Ok(slots) = self.0.domains.get_or_insert_with(domain, new);
        // The request's timeout bounds the wait.
        let _slot = slots.acquire().await?;
        let resolver = self.0.resolver.as_ref().map_err(Arc::clone)?;
        let found = resolver.lookup_ip(name).await?;
        let mut addresses: Vec<IpAddr> = found.iter().collect();
        if check == AddressCheck::RefuseLocal && !self.allows_local(name) {
            let first = addresses.first().copied();
            addresses.retain(|address| !is_local(*address));
            if let (true, Some(address)) = (addresses.is_empty(), first) {
                let name = name.to_owned();
                return Err(LocalAddress { name, address }.into());
            }
        }
        Ok(addresses)
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

struct ClientDns {
    dns: Dns,
    check: AddressCheck,
}

impl Resolve for ClientDns {
    fn resolve(&self, name: Name) -> Resolving {
        let (dns, check) = (self.dns.clone(), self.check);
        Box::pin(async move {
            let addresses = dns.addresses(name.as_str(), check).await?;
            // Port 0 is replaced by the URL's.
            let sockets = addresses.into_iter().map(|ip| SocketAddr::new(ip, 0));
            Ok(Box::new(sockets) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests;
