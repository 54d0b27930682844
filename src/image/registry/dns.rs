//! Resolves the names of registries. Asynchronous, because names that never resolve would fill the threads on which the
//! system's resolver blocks. Addresses are checked after the name is resolved.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::future::{Either, select};
use hickory_resolver::{
    ResolverBuilder, TokioResolver,
    config::{NameServerConfig, ResolverConfig},
    lookup::Lookup,
    net::{DnsError as ProtocolError, NetError, runtime::TokioRuntimeProvider},
    proto::{op::ResponseCode, rr::RecordType},
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
/// How long the answer of one address family waits for the other's (RFC 8305, section 3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// Maximum number of cached answers; each has some hundred bytes.
const MAX_CACHED: u64 = 2048;
/// How long an answer is used if its TTL is longer. A registry that moves is found again soon.
const MAX_TTL: Duration = Duration::from_mins(5);
/// How long a name counts as absent if its zone says longer.
const MAX_NEGATIVE_TTL: Duration = Duration::from_secs(30);

/// Why a name gives no address.
#[derive(Debug, thiserror::Error)]
pub(super) enum DnsError {
    /// It leads to archaware's own machine or to a metadata service.
    #[error(
        "{name} resolves to {address}, which is an address of this machine or of a metadata service; \
         if that is a registry, add {name} to registries.allowLocalAddresses"
    )]
    LocalAddress { name: String, address: IpAddr },
    /// The name server says so.
    #[error("no such host: {0}")]
    NoSuchHost(String),
    /// The name server gave no usable answer.
    #[error("the name {name} cannot be resolved")]
    Failed {
        name: String,
        #[source]
        source: Arc<NetError>,
    },
}

impl DnsError {
    fn new(name: &str, error: Arc<NetError>) -> Self {
        let name = name.to_owned();
        let NetError::Dns(ProtocolError::NoRecordsFound(found)) = &*error else {
            let source = error;
            return Self::Failed { name, source };
        };
        // The name does not exist, or has no address.
        if matches!(
            found.response_code,
            ResponseCode::NXDomain | ResponseCode::NoError
        ) {
            Self::NoSuchHost(name)
        } else {
            let source = error;
            Self::Failed { name, source }
        }
    }
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

    async fn addresses(&self, name: &str, check: AddressCheck) -> Result<Vec<IpAddr>, DnsError> {
        // A name that is sent nowhere (RFC 6761, 6.3).
        if is_loopback(name) {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let new = || Ok::<_, Infallible>(Arc::new(Semaphore::new(MAX_PER_DOMAIN)));
        let domain = registrable_domain(name.trim_end_matches('.'));
        let Ok(slots) = self.0.domains.get_or_insert_with(domain, new);
        // The request's timeout bounds the wait. The semaphore is never closed.
        let _slot = slots.acquire().await.ok();
        let resolver = self.0.resolver.as_ref();
        let resolver = resolver.map_err(|error| DnsError::new(name, error.clone()))?;
        let found = lookup(resolver, name).await;
        let mut addresses = found.map_err(|error| DnsError::new(name, Arc::new(error)))?;
        if check == AddressCheck::RefuseLocal && !self.allows_local(name) {
            let first = addresses.first().copied();
            addresses.retain(|address| !is_local(*address));
            if let (true, Some(address)) = (addresses.is_empty(), first) {
                let name = name.to_owned();
                return Err(DnsError::LocalAddress { name, address });
            }
        }
        Ok(addresses)
    }
}

/// The addresses of both families, asked for at the same time. A name server that leaves one of the questions
/// unanswered does not hold up the other's answer for long.
async fn lookup(resolver: &TokioResolver, name: &str) -> Result<Vec<IpAddr>, NetError> {
    let v4 = pin!(resolver.lookup(name, RecordType::A));
    let v6 = pin!(resolver.lookup(name, RecordType::AAAA));
    let (first, other) = match select(v4, v6).await {
        Either::Left(one) | Either::Right(one) => one,
    };
    let mut addresses: Vec<IpAddr> = first.iter().flat_map(addresses_in).collect();
    let second = if addresses.is_empty() {
        Some(other.await)
    } else {
        tokio::time::timeout(RESOLUTION_DELAY, other).await.ok()
    };
    addresses.extend(second.iter().flatten().flat_map(addresses_in));
    match (addresses.is_empty(), first) {
        (true, Err(error)) => Err(error),
        _ => Ok(addresses),
    }
}

fn addresses_in(lookup: &Lookup) -> impl Iterator<Item = IpAddr> {
    let records = lookup.answers().iter();
    records.filter_map(|record| record.data.ip_addr())
}

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
