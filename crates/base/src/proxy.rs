//! The proxies of the environment: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, in upper or lower
//! case, as kubectl and containerd obey them (`golang.org/x/net/http/httpproxy`). The client for
//! registries reads the same variables itself.

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;

/// The proxy for requests to a server; `None` for direct requests. Loopback is always direct.
pub fn for_server(server: &Uri) -> Option<Uri> {
    choose(server, variable)
}

/// The hosts of all proxies. archaware resolves their names; a proxy resolves the names of the
/// servers behind it.
pub fn hosts() -> Vec<String> {
    ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"]
        .into_iter()
        .filter_map(|name| with_scheme(&variable(name)?)?.host().map(str::to_owned))
        .collect()
}

/// The value of a variable, or else of the variable in lower case; empty means unset.
fn variable(name: &str) -> Option<String> {
    let read = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    read(name).or_else(|| read(&name.to_ascii_lowercase()))
}

fn choose(server: &Uri, variable: impl Fn(&str) -> Option<String>) -> Option<Uri> {
    let host = server.host()?.trim_matches(['[', ']']);
    let is_loopback = |host: &str| {
        host == "localhost"
            || host
                .parse()
                .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    };
    if is_loopback(host) {
        return None;
    }
    let name = match server.scheme_str() {
        Some("http") => "HTTP_PROXY",
        _ => "HTTPS_PROXY",
    };
    let proxy = variable(name)?;
    let exceptions = variable("NO_PROXY").unwrap_or_default();
    let port = server
        .port_u16()
        .unwrap_or(if name == "HTTP_PROXY" { 80 } else { 443 });
    let exceptions: Vec<&str> = exceptions
        .split(',')
        .map(str::trim)
        .filter_map(|proxy| without_port(proxy, port))
        .collect();
    // The matcher applies `*` to host names only, not to IP addresses.
    if exceptions.contains(&"*") {
        return None;
    }
    let exceptions = exceptions.join(",");
    let matcher = Matcher::builder()
        .all(proxy.as_str())
        .no(exceptions)
        .build();
    // The address in the matcher's result lacks user and password, so `proxy` is returned instead.
    matcher.intercept(server).and_then(|_| with_scheme(&proxy))
}

/// An exception without its port; `None` if it is for another port.
fn without_port(exception: &str, port: u16) -> Option<&str> {
    match exception.rsplit_once(':') {
        Some((host, exception_port)) if !host.contains(':') || host.ends_with(']') => {
            (exception_port.parse() == Ok(port)).then_some(host)
        }
        _ => Some(exception),
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

    #[test]
    fn the_environment_decides() {
        let environment = |name: &str| match name {
            "HTTPS_PROXY" => Some("http://user:pass@proxy.example:3128".to_owned()),
            "HTTP_PROXY" => Some("plain.example:3128".to_owned()),
            "NO_PROXY" => Some("10.96.0.0/12, .cluster.local,192.0.2.7,api.example".to_owned()),
            _ => None,
        };
        for (server, proxy) in [
            ("https://k8s.example:6443", Some("proxy.example")),
            ("http://k8s.example:8080", Some("plain.example")),
            ("https://10.96.0.1", None),
            ("https://10.200.0.1", Some("proxy.example")),
            ("https://192.0.2.7:6443", None),
            ("https://kubernetes.default.svc.cluster.local", None),
            ("https://api.example:6443", None),
            ("https://127.0.0.1:6443", None),
            ("https://localhost:6443", None),
            ("https://[::1]:6443", None),
        ] {
            let chosen = choose(&server.parse().unwrap(), environment);
            assert_eq!(chosen.as_ref().and_then(Uri::host), proxy, "{server}");
        }
        let chosen = choose(&"https://k8s.example".parse().unwrap(), environment).unwrap();
        assert_eq!(chosen.authority().unwrap(), "user:pass@proxy.example:3128");
        assert_eq!(
            choose(&"https://k8s.example".parse().unwrap(), |_| None),
            None
        );
    }
}
