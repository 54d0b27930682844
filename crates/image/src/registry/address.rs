//! The addresses that are archaware's own machine or a cloud's metadata service. Users choose the
//! names of registries, and must not make archaware send requests there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use reqwest::Url;

use crate::reference::host_and_port;

/// Metadata services outside the link-local ranges: Alibaba Cloud, Azure's wire server, Oracle
/// Cloud (classic).
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];
/// Metadata services of AWS and Google Cloud.
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];
/// Well-known prefix of NAT64 (RFC 6052, 2.1): the last 32 bits are an IPv4 address.
const NAT64: [u16; 6] = [0x64, 0xff9b, 0, 0, 0, 0];

/// Whether an address is loopback, link-local, unspecified, or a cloud's metadata service.
pub(super) fn is_local(ip: IpAddr) -> bool {
    ip_is_loopback(ip) || is_link_local(ip)
}

/// Whether an address is link-local, unspecified, or a cloud's metadata service. No registry is
/// there.
pub(super) fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_unspecified() || METADATA_V4.contains(&ip),
        IpAddr::V6(ip) => {
            ip.is_unicast_link_local()
                || ip.is_unspecified()
                || METADATA_V6.contains(&ip)
                || embedded(ip).is_some_and(|ip| is_link_local(ip.into()))
        }
    }
}

fn ip_is_loopback(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback() || embedded(ip).is_some_and(|ip| ip.is_loopback()),
    }
}

/// The IPv4 address that an IPv6 address stands for.
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let [prefix @ .., high, low] = ip.segments();
    let translated =
        (prefix == NAT64).then(|| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    ip.to_ipv4_mapped().or(translated)
}

/// The IP address in the host of a URL; `None` if the host is a name.
pub(super) fn literal(url: &Url) -> Option<IpAddr> {
    bare(url.host_str()?).parse().ok()
}

/// Whether the host of a URL is a local IP address or `localhost`, without a DNS lookup.
pub(super) fn names_local(url: &Url) -> bool {
    literal(url).map_or_else(|| is_loopback(url.host_str().unwrap_or_default()), is_local)
}

/// Whether the host of `host[:port]` is a loopback IP address or `localhost`, without a DNS lookup.
pub(super) fn is_loopback(registry: &str) -> bool {
    let host = bare(registry);
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(ip_is_loopback)
}

/// The host of `host[:port]` without the brackets of an IPv6 literal.
pub(super) fn bare(host: &str) -> &str {
    host_and_port(host).0.trim_matches(['[', ']'])
}

/// Second-level names under which registrars sell domains, as in `co.uk`.
const PUBLIC: &[&str] = &[
    "ac", "co", "com", "edu", "go", "gov", "gob", "gub", "mil", "ne", "net", "nom", "or", "org",
];

/// The host name without its first label. `None` if that is a public suffix (a top-level domain, or
/// one like `co.uk`), or if the host is an IP address.
pub(super) fn parent_domain(host: &str) -> Option<&str> {
    if host.parse::<IpAddr>().is_ok() {
        return None;
    }
    let (_, parent) = host.split_once('.')?;
    (!is_public_suffix(parent)).then_some(parent)
}

/// The registered domain of a name: `example.com` for `a.b.example.com`. The host itself if it has
/// no registered domain.
pub(super) fn registrable_domain(host: &str) -> &str {
    let mut domain = host;
    while let Some(parent) = parent_domain(domain) {
        domain = parent;
    }
    domain
}

fn is_public_suffix(domain: &str) -> bool {
    match domain
        .trim_end_matches('.')
        .split('.')
        .collect::<Vec<_>>()
        .as_slice()
    {
        [] | [_] => true,
        [second, _] => PUBLIC.contains(second),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses() {
        for (text, local) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("0.0.0.0", true),
            ("::", true),
            ("169.254.169.254", true),
            ("::ffff:169.254.169.254", true),
            ("64:ff9b::a9fe:a9fe", true),
            ("64:ff9b::7f00:1", true),
            ("fe80::1", true),
            ("fd00:ec2::254", true),
            ("100.100.100.200", true),
            ("168.63.129.16", true),
            // Registries in the cluster have private addresses.
            ("10.0.0.1", false),
            ("172.16.0.1", false),
            ("192.168.1.1", false),
            ("fd00::1", false),
            ("192.0.2.1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_local(text.parse().unwrap()), local, "{text}");
        }
        for (url, local) in [
            ("https://localhost/", true),
            ("https://LOCALHOST:5000/", true),
            ("https://[::1]:5000/", true),
            ("https://[fe80::1]/", true),
            ("https://2130706433/", true),
            ("https://localhost.example.com/", false),
            ("https://10.0.0.1/", false),
        ] {
            assert_eq!(names_local(&Url::parse(url).unwrap()), local, "{url}");
        }
    }

    #[test]
    fn registrable_domains() {
        for (host, domain) in [
            ("a.b.example.com", "example.com"),
            ("example.com", "example.com"),
            ("a.example.co.uk", "example.co.uk"),
            ("registry.ns.svc.cluster.local", "cluster.local"),
            ("registry", "registry"),
            ("10.0.0.1", "10.0.0.1"),
        ] {
            assert_eq!(registrable_domain(host), domain, "{host}");
        }
    }
}
