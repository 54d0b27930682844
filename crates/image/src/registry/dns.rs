//! Resolves the names of registries. Asynchronous, because names that never resolve would fill the
//! blocking threads of the system's resolver. Addresses are checked after the name is resolved.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use archaware_base::expiring_cache::ExpiringCache;
use futures::future::{Either, select};
use hickory_resolver::{
    Hosts, TokioResolver,
    config::{NameServerConfig, ResolverConfig, ResolverOpts},
    lookup::Lookup,
    net::{DnsError as ProtocolError, NetError, runtime::TokioRuntimeProvider},
    proto::{
        op::{Query, ResponseCode},
        rr::{Name, RecordType},
    },
    system_conf::read_system_conf,
};
use quick_cache::sync::Cache;
use reqwest::dns::{Addrs, Name as ClientName, Resolve, Resolving};
use tokio::sync::Semaphore;

use super::address::{bare, is_local, is_loopback, registrable_domain};

/// Maximum number of names of one domain that are resolved at the same time. The owner of a domain
/// decides whether its names are ever answered.
const MAX_PER_DOMAIN: usize = 8;
/// Users choose the names, so the state of the least used domains is dropped.
const MAX_DOMAINS: usize = 1024;
/// Timeout of one query. Shorter than a request's, so that a lost packet is sent again.
const QUERY_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a lookup with addresses of one family waits for those of the other family. Longer than
/// the 50 ms of RFC 8305, because the network may support only the other family, and a lost packet
/// is sent again after a third of a second.
const OTHER_FAMILY: Duration = Duration::from_secs(1);
/// Maximum number of cached answers; each has some hundred bytes.
const MAX_CACHED: u64 = 2048;
/// Maximum number of names in the cache `DnsInner::known`.
const MAX_KNOWN: usize = 1024;
/// Maximum lifetime of a cached answer, even if its TTL is longer, so that archaware soon finds a
/// registry that moved.
const MAX_TTL: Duration = Duration::from_mins(5);
/// Maximum lifetime of a cached negative answer, even if the zone's negative TTL is longer.
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
    /// The name server answered that the host does not exist.
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
    /// The names of `/etc/hosts`, for which no name server is queried.
    hosts: Hosts,
    /// Domains that are appended to names (`search` in `/etc/resolv.conf`).
    search: Vec<Name>,
    /// Names with fewer dots are tried with the search domains first.
    ndots: usize,
    /// Cached answers by the name as given. They bypass the queue of their domain.
    known: ExpiringCache<String, Vec<IpAddr>>,
    domains: Cache<String, Arc<Semaphore>>,
    /// Hosts whose names may resolve to local addresses.
    allowed: Vec<String>,
}

/// Whether local addresses are refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum AddressCheck {
    /// Refused, unless the host is in `registries.allowLocalAddresses`.
    RefuseLocal,
    /// Allowed, because the operator wrote the name into `hosts.toml`.
    AllowAll,
}

impl Dns {
    /// A resolver with the settings of `/etc/resolv.conf` and the names of `/etc/hosts`.
    pub(super) fn new(allowed: Vec<String>) -> Self {
        let (config, options) = read_system_conf().unwrap_or_else(|error| {
            // As in the C library: without a configuration the name server is on this machine.
            tracing::warn!(%error, "cannot read /etc/resolv.conf; asking the name server on loopback");
            let local = NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into());
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![local]);
            (config, ResolverOpts::default())
        });
        let hosts = Hosts::from_system().unwrap_or_default();
        Self::build(config, options, hosts, allowed)
    }

    fn build(
        config: ResolverConfig,
        mut options: ResolverOpts,
        hosts: Hosts,
        allowed: Vec<String>,
    ) -> Self {
        options.timeout = options.timeout.min(QUERY_TIMEOUT);
        options.cache_size = MAX_CACHED;
        options.positive_max_ttl = Some(MAX_TTL);
        options.negative_max_ttl = Some(MAX_NEGATIVE_TTL);
        let ndots = options.ndots;
        let (domain, mut search, servers) = config.into_parts();
        if search.is_empty() {
            search.extend(domain);
        }
        // The resolver gets no search domains, because `candidates` appends them, once for both
        // address families.
        let config = ResolverConfig::from_parts(None, Vec::new(), servers);
        let builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let resolver = builder.with_options(options).build();
        Self(Arc::new(DnsInner {
            resolver: resolver.map_err(Arc::new),
            hosts,
            search,
            ndots,
            known: ExpiringCache::new(MAX_KNOWN),
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
        let named = |allowed: &String| bare(allowed).eq_ignore_ascii_case(host);
        self.0.allowed.iter().any(named)
    }

    /// The addresses of a name in `/etc/hosts`. If there are none, those of a cached answer.
    fn known(&self, name: &str) -> Option<Vec<IpAddr>> {
        let absolute = Name::from_str_relaxed(name).ok()?;
        let of_family = |family| {
            let query = Query::query(absolute.clone(), family);
            self.0.hosts.lookup_static_host(&query)
        };
        let written = [RecordType::A, RecordType::AAAA]
            .into_iter()
            .filter_map(of_family);
        let written: Vec<IpAddr> = written.flat_map(|found| addresses_in(&found)).collect();
        if !written.is_empty() {
            return Some(written);
        }
        self.0.known.get(name)
    }

    /// Queries the name server after a wait for one of the [`MAX_PER_DOMAIN`] slots of the domain.
    async fn query_name_server(&self, name: &str) -> Result<Vec<IpAddr>, DnsError> {
        let failed = |error: Arc<NetError>| DnsError::new(name, error);
        let new = || Ok::<_, Infallible>(Arc::new(Semaphore::new(MAX_PER_DOMAIN)));
        let domain = queue_key(name.trim_end_matches('.'));
        let Ok(slots) = self.0.domains.get_or_insert_with(domain, new);
        // The request's timeout bounds the wait. The semaphore is never closed.
        let _slot = slots.acquire().await.ok();
        let resolver = self
            .0
            .resolver
            .as_ref()
            .map_err(|error| failed(error.clone()))?;
        for candidate in self.candidates(name) {
            match lookup(resolver, candidate).await {
                Ok((addresses, _)) if addresses.is_empty() => {}
                Ok((addresses, expires)) => {
                    let life = expires.saturating_duration_since(Instant::now());
                    self.0
                        .known
                        .insert(name.to_owned(), addresses.clone(), life);
                    return Ok(addresses);
                }
                Err(error) if error.is_no_records_found() => {}
                Err(error) => return Err(failed(Arc::new(error))),
            }
        }
        Err(DnsError::NoSuchHost(name.to_owned()))
    }

    /// The absolute names that a name may mean, in the order of the C library (resolv.conf(5)).
    fn candidates(&self, name: &str) -> Vec<Name> {
        let Ok(mut parsed) = Name::from_str_relaxed(name) else {
            return Vec::new();
        };
        if parsed.is_fqdn() {
            return vec![parsed];
        }
        let search = self.0.search.iter();
        let mut found: Vec<Name> = search
            .filter_map(|domain| parsed.clone().append_domain(domain).ok())
            .collect();
        parsed.set_fqdn(true);
        if name.matches('.').count() >= self.0.ndots {
            found.insert(0, parsed);
        } else {
            found.push(parsed);
        }
        found
    }

    async fn addresses(&self, name: &str, check: AddressCheck) -> Result<Vec<IpAddr>, DnsError> {
        // Loopback names are not sent to a name server (RFC 6761, 6.3).
        if is_loopback(name) {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let mut addresses = match self.known(name) {
            Some(known) => known,
            None => self.query_name_server(name).await?,
        };
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

/// Queries A and AAAA records at the same time. Returns the addresses and when they expire. If the
/// first answer has addresses, waits at most [`OTHER_FAMILY`] for the second.
async fn lookup(resolver: &TokioResolver, name: Name) -> Result<(Vec<IpAddr>, Instant), NetError> {
    let v4 = pin!(resolver.lookup(name.clone(), RecordType::A));
    let v6 = pin!(resolver.lookup(name, RecordType::AAAA));
    let (first, pending) = match select(v4, v6).await {
        Either::Left(answered) | Either::Right(answered) => answered,
    };
    let is_answer = |found: &Result<Lookup, NetError>| {
        found
            .as_ref()
            .is_ok_and(|found| addresses_in(found).next().is_some())
    };
    let second = if is_answer(&first) {
        tokio::time::timeout(OTHER_FAMILY, pending).await.ok()
    } else {
        Some(pending.await)
    };
    let answers = || first.iter().chain(second.iter().flatten());
    let addresses: Vec<IpAddr> = answers().flat_map(addresses_in).collect();
    let expires = answers().map(Lookup::valid_until).min();
    match (expires, first) {
        (Some(expires), _) => Ok((addresses, expires)),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Ok((addresses, Instant::now())),
    }
}

/// The part of a name that identifies who controls its answers: the registered domain, or for a
/// Service (`NAME.NAMESPACE.svc.…`) the part from the namespace on, because users of the namespace
/// can make a Service an alias of any name (`ExternalName`).
fn queue_key(name: &str) -> &str {
    match name.find(".svc.") {
        Some(svc) => name
            .get(..svc)
            .and_then(|service| service.rfind('.'))
            .map_or(name, |dot| name.get(dot + 1..).unwrap_or(name)),
        None => registrable_domain(name),
    }
}

fn addresses_in(lookup: &Lookup) -> impl Iterator<Item = IpAddr> + use<> {
    let records = lookup.answers().to_vec();
    records
        .into_iter()
        .filter_map(|record| record.data.ip_addr())
}

struct ClientDns {
    dns: Dns,
    check: AddressCheck,
}

impl Resolve for ClientDns {
    fn resolve(&self, name: ClientName) -> Resolving {
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
