//! A thin registry client: the digest of a tag, and documents by digest. Nothing is pulled.

mod auth;
mod client;
mod exchange;
mod gate;

use crate::image::reference::{Reference, host_and_port};

pub use client::Settings;
pub(crate) use client::{Answer, Head, Registry};
pub use exchange::TlsError;

/// Where a registry's API is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Endpoint {
    host: String,
    plain_http: bool,
}

impl Endpoint {
    /// The registry of a reference. Loopback registries (unless on port 443) and the ones named by
    /// the operator speak plain http.
    pub(crate) fn of(reference: &Reference, plain_http: &[String]) -> Self {
        let host = reference.api_host().to_ascii_lowercase();
        let plain_http = is_plain_loopback(&host)
            || plain_http
                .iter()
                .any(|name| name.eq_ignore_ascii_case(&host));
        Self { host, plain_http }
    }

    /// `http://host:port/v2/` or `https://…`
    fn base(&self) -> String {
        format!(
            "{}://{}/v2/",
            if self.plain_http { "http" } else { "https" },
            self.host
        )
    }
}

fn is_plain_loopback(registry: &str) -> bool {
    is_loopback(registry) && host_and_port(registry).1 != Some("443")
}

/// Of `host[:port]`.
fn is_loopback(registry: &str) -> bool {
    let host = host_and_port(registry).0.trim_matches(['[', ']']);
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_only_where_it_is_meant() {
        let plain = ["reg.local:5000".to_owned()];
        for (image, expected) in [
            ("localhost:5000/x", "http://localhost:5000/v2/"),
            ("127.0.0.1/x", "http://127.0.0.1/v2/"),
            ("127.3.2.1:8080/x", "http://127.3.2.1:8080/v2/"),
            ("[::1]:5000/x", "http://[::1]:5000/v2/"),
            ("localhost:443/x", "https://localhost:443/v2/"),
            ("Reg.Local:5000/x", "http://reg.local:5000/v2/"),
            ("reg.local/x", "https://reg.local/v2/"),
            ("nginx", "https://registry-1.docker.io/v2/"),
        ] {
            let reference = Reference::parse(image).unwrap();
            assert_eq!(Endpoint::of(&reference, &plain).base(), expected, "{image}");
        }
    }
}
