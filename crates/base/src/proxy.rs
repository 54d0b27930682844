//! The proxies of the environment: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, in upper or lower
//! case. For the API server and for registries they mean what they mean for kubectl and containerd
//! (`golang.org/x/net/http/httpproxy`), which know no `ALL_PROXY`.

use std::{net::IpAddr, sync::LazyLock};

use http::Uri;
use ipnet::IpNet;

/// The proxy for requests to a server; `None` for direct requests. Loopback is always direct.
pub fn for_server(server: &Uri) -> Option<Uri> {
    let host = server.host()?;
    ENVIRONMENT.choose(server.scheme_str()?, host, server.port_u16())
}

/// The hosts of all proxies. archaware resolves their names; a proxy resolves the names of the
/// servers behind it.
pub fn hosts() -> Vec<String> {
    let proxies = [&ENVIRONMENT.http, &ENVIRONMENT.https];
    let hosts = proxies.into_iter().flatten().filter_map(Uri::host);
    hosts.map(str::to_owned).collect()
}

/// The environment does not change while the process runs.
static ENVIRONMENT: LazyLock<Proxies> = LazyLock::new(|| Proxies::read(variable));

/// The value of a variable, or else of the variable in lower case; empty means unset.
fn variable(name: &str) -> Option<String> {
    let read = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    read(name).or_else(|| read(&name.to_ascii_lowercase()))
}

/// The proxies by the scheme of the server, and the servers that are reached directly.
struct Proxies {
    http: Option<Uri>,
    https: Option<Uri>,
    exceptions: Vec<Exception>,
}

/// An entry of `NO_PROXY`, with the port if it is for one port only.
enum Exception {
    All,
    Network(IpNet),
    Address(IpAddr, Option<u16>),
    /// Servers whose name ends with a suffix that begins with a dot.
    Domain {
        suffix: String,
        /// Whether the name may also be the suffix without its dot.
        itself: bool,
        port: Option<u16>,
    },
}

impl Proxies {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let proxy = |name| variable(name).and_then(|text| with_scheme(&text));
        let exceptions = variable("NO_PROXY").unwrap_or_default();
        Self {
            http: proxy("HTTP_PROXY"),
            https: proxy("HTTPS_PROXY"),
            exceptions: exceptions.split(',').filter_map(Exception::parse).collect(),
        }
    }

    fn choose(&self, scheme: &str, host: &str, port: Option<u16>) -> Option<Uri> {
        let (proxy, default_port) = match scheme {
            "http" => (self.http.as_ref()?, 80),
            "https" => (self.https.as_ref()?, 443),
            _ => return None,
        };
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        let address = host.parse::<IpAddr>().ok();
        if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
            return None;
        }
        let port = port.unwrap_or(default_port);
        let mut exceptions = self.exceptions.iter();
        let is_direct = exceptions.any(|exception| exception.matches(&host, address, port));
        (!is_direct).then(|| proxy.clone())
    }
}

impl Exception {
    /// `None` if the entry is empty or names no host.
    fn parse(entry: &str) -> Option<Self> {
        let entry = entry.trim().to_ascii_lowercase();
        if entry == "*" {
            return Some(Self::All);
        }
        if let Ok(network) = entry.parse() {
            return Some(Self::Network(network));
        }
        let (host, port) = match entry.rsplit_once(':') {
            // An IPv6 address without brackets has no port.
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                (host, Some(port.parse().ok()?))
            }
            _ => (entry.as_str(), None),
        };
        let host = host.trim_matches(['[', ']']);
        if let Ok(address) = host.parse() {
            return Some(Self::Address(address, port));
        }
        let host = host.strip_prefix('*').unwrap_or(host);
        let itself = !host.starts_with('.');
        let suffix = format!(".{}", host.trim_start_matches('.'));
        (suffix.len() > 1).then_some(Self::Domain {
            suffix,
            itself,
            port,
        })
    }

    fn matches(&self, host: &str, address: Option<IpAddr>, port: u16) -> bool {
        let is_for_port = |only: &Option<u16>| only.is_none_or(|only| only == port);
        match self {
            Self::All => true,
            Self::Network(network) => address.is_some_and(|address| network.contains(&address)),
            Self::Address(only, only_port) => address == Some(*only) && is_for_port(only_port),
            Self::Domain {
                suffix,
                itself,
                port: only_port,
            } => {
                let is_named = host.ends_with(suffix.as_str())
                    || (*itself && suffix.strip_prefix('.') == Some(host));
                is_named && is_for_port(only_port)
            }
        }
    }
}

/// The address of a proxy; `http` if it has no scheme.
fn with_scheme(proxy: &str) -> Option<Uri> {
    let address = if proxy.contains("://") {
        proxy.parse()
    } else {
        format!("http://{proxy}").parse()
    };
    address.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(proxies: &Proxies, server: &str) -> Option<Uri> {
        let server: Uri = server.parse().unwrap();
        proxies.choose(
            server.scheme_str().unwrap(),
            server.host().unwrap(),
            server.port_u16(),
        )
    }

    #[test]
    fn the_environment_decides() {
        let environment = |name: &str| match name {
            "HTTPS_PROXY" => Some("http://user:pass@proxy.example:3128".to_owned()),
            "HTTP_PROXY" => Some("plain.example:3128".to_owned()),
            "ALL_PROXY" => Some("all.example:3128".to_owned()),
            _ => None,
        };
        let proxies = Proxies::read(environment);
        for (server, proxy) in [
            ("https://k8s.example:6443", Some("proxy.example")),
            ("http://k8s.example:8080", Some("plain.example")),
            ("https://127.0.0.1:6443", None),
            ("https://localhost:6443", None),
            ("https://[::1]:6443", None),
        ] {
            let chosen = choose(&proxies, server);
            assert_eq!(chosen.as_ref().and_then(Uri::host), proxy, "{server}");
        }
        let chosen = choose(&proxies, "https://k8s.example").unwrap();
        assert_eq!(chosen.authority().unwrap(), "user:pass@proxy.example:3128");
        let no_proxy = |name: &str| (name == "ALL_PROXY").then(|| "all.example".to_owned());
        assert_eq!(
            choose(&Proxies::read(no_proxy), "https://k8s.example"),
            None
        );
    }

    /// As the tests of `httpproxy` (`UseProxyTests`) expect it.
    #[test]
    fn exceptions_mean_what_they_mean_for_go() {
        for (exception, direct, by_proxy) in [
            (
                "reg.example",
                &["reg.example", "a.reg.example:5000", "REG.example"][..],
                &["xreg.example", "example"][..],
            ),
            (".reg.example", &["a.reg.example"], &["reg.example"]),
            ("*.reg.example", &["a.reg.example"], &["reg.example"]),
            (
                "reg.example:443",
                &["reg.example", "a.reg.example:443"],
                &["reg.example:5000"],
            ),
            (
                ".reg.example:5000",
                &["a.reg.example:5000"],
                &["a.reg.example", "reg.example:5000"],
            ),
            (
                "10.96.0.0/12",
                &["10.96.0.1", "10.100.0.1:6443"],
                &["10.200.0.1", "reg.example"],
            ),
            (
                "192.0.2.7",
                &["192.0.2.7", "192.0.2.7:5000"],
                &["192.0.2.8"],
            ),
            ("192.0.2.7:5000", &["192.0.2.7:5000"], &["192.0.2.7"]),
            (
                "[2001:db8::1]:443",
                &["[2001:db8::1]"],
                &["[2001:db8::1]:5000", "[2001:db8::2]"],
            ),
            ("2001:db8::1", &["[2001:db8::1]:5000"], &["[2001:db8::2]"]),
            ("2001:db8::/32", &["[2001:db8::1]"], &["[2001:db9::1]"]),
            ("*", &["reg.example", "192.0.2.7"], &[]),
            ("a, ,:80, .b , B.c:x", &["a", "x.b"], &["b", "b.c", "c"]),
        ] {
            let environment = |name: &str| match name {
                "HTTPS_PROXY" => Some("proxy.example".to_owned()),
                "NO_PROXY" => Some(exception.to_owned()),
                _ => None,
            };
            let proxies = Proxies::read(environment);
            for (servers, is_direct) in [(direct, true), (by_proxy, false)] {
                for server in servers {
                    let chosen = choose(&proxies, &format!("https://{server}"));
                    assert_eq!(
                        chosen.is_none(),
                        is_direct,
                        "NO_PROXY={exception}: {server}"
                    );
                }
            }
        }
    }
}
