//! Parses `WWW-Authenticate` challenges (RFC 9110, 11.6.1, and token authentication of the distribution
//! specification), and decides which token endpoints may be used.

use std::net::{IpAddr, Ipv4Addr};

use http::{HeaderMap, header::WWW_AUTHENTICATE};
use reqwest::Url;

use crate::image::reference::host_and_port;

use super::hosts::{Endpoint, is_loopback};

/// The authentication that a registry requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer {
        realm: Url,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Selects the challenge to answer from all `WWW-Authenticate` headers: Bearer before Basic.
    pub(super) fn choose(headers: &HeaderMap) -> Option<Self> {
        let mut basic = None;
        for header in headers.get_all(WWW_AUTHENTICATE) {
            let Ok(text) = header.to_str() else { continue };
            let Ok(challenges) = http_auth::parse_challenges(text) else {
                // Parameters of a Basic challenge are not needed and often malformed.
                let scheme = text.split_whitespace().next().unwrap_or_default();
                if scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                }
                continue;
            };
            for challenge in challenges {
                let parameter = |name: &str| {
                    challenge
                        .params
                        .iter()
                        .find(|(key, _)| key.eq_ignore_ascii_case(name))
                        .map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                } else if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let realm = parameter("realm").and_then(|realm| Url::parse(&realm).ok());
                    if let Some(realm) = realm {
                        let (service, scope) = (parameter("service"), parameter("scope"));
                        return Some(Self::Bearer {
                            realm,
                            service,
                            scope,
                        });
                    }
                }
            }
        }
        basic
    }
}

/// Token endpoints of well-known registries under another domain of the same company.
const KNOWN_REALMS: &[(&str, &str)] = &[
    ("nvcr.io", "authn.nvidia.com"),
    ("registry.redhat.io", "sso.redhat.com"),
    ("scw.cloud", "api.scaleway.com"),
];

/// Whether a registry's credential may be sent to a token endpoint.
///
/// Never over plain HTTP, unless the registry itself uses plain HTTP. To another host only if it is under the
/// registry's own domain (`auth.example.com` or `example.com` for `registry.example.com`, `auth.quay.io` for
/// `quay.io`) or well known.
///
/// # Errors
///
/// The reason why it must not be sent.
pub(super) fn may_send_credentials(endpoint: &Endpoint, realm: &Url) -> Result<(), &'static str> {
    may_request(endpoint, realm)?;
    let (registry, host) = (
        bare(endpoint.host()),
        bare(realm.host_str().unwrap_or_default()),
    );
    let under = |domain: &str| {
        host == domain
            || host
                .strip_suffix(domain)
                .is_some_and(|rest| rest.ends_with('.'))
    };
    let named = |(of, realm): &&(&str, &str)| {
        *realm == host && (registry == *of || registry.ends_with(&format!(".{of}")))
    };
    let loopback = is_loopback(registry) && is_loopback(host);
    let own = parent(registry).is_some_and(under);
    if loopback || under(registry) || own || KNOWN_REALMS.iter().any(|known| named(&known)) {
        Ok(())
    } else {
        Err("is on a foreign domain")
    }
}

/// Whether a token endpoint may be asked without a credential. Users choose the registry, and it must not make
/// archaware send requests to its own machine or to a cloud's metadata service.
///
/// # Errors
///
/// The reason why it must not be asked.
pub(super) fn may_request(endpoint: &Endpoint, realm: &Url) -> Result<(), &'static str> {
    let (registry, host) = (
        bare(endpoint.host()),
        bare(realm.host_str().unwrap_or_default()),
    );
    if realm.scheme() != "https" && !endpoint.is_plain() {
        Err("is not https")
    } else if is_local(realm) && registry != host && !is_loopback(registry) {
        Err("is an address of this machine")
    } else {
        Ok(())
    }
}

/// Whether the host is loopback, link-local (cloud metadata services) or unspecified.
pub(super) fn is_local(url: &Url) -> bool {
    let host = bare(url.host_str().unwrap_or_default());
    let v4 = |ip: Ipv4Addr| ip.is_loopback() || ip.is_link_local() || ip.is_unspecified();
    match host.parse() {
        Ok(IpAddr::V4(ip)) => v4(ip),
        Ok(IpAddr::V6(ip)) => {
            let own = ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified();
            own || ip.to_ipv4_mapped().is_some_and(v4)
        }
        Err(_) => is_loopback(host),
    }
}

fn bare(host: &str) -> &str {
    host_and_port(host).0.trim_matches(['[', ']'])
}

/// Second-level names under which registrars sell domains, as in `co.uk`.
const PUBLIC: &[&str] = &[
    "ac", "co", "com", "edu", "go", "gov", "gob", "gub", "mil", "ne", "net", "nom", "or", "org",
];

/// The domain that a registry's host belongs to, unless that is a public suffix: a top-level domain, or one like
/// `co.uk`.
fn parent(host: &str) -> Option<&str> {
    if host.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let (_, parent) = host.split_once('.')?;
    match parent.split('.').collect::<Vec<_>>().as_slice() {
        [_] => None,
        [second, _] if PUBLIC.contains(second) => None,
        _ => Some(parent),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint(url: &str) -> Endpoint {
        Endpoint::new(&Url::parse(url).unwrap())
    }

    #[test]
    fn credentials_go_to_token_endpoints_of_the_same_house() {
        for (registry, realm, allowed) in [
            (
                "https://registry-1.docker.io",
                "https://auth.docker.io/token",
                true,
            ),
            ("https://quay.io", "https://quay.io/v2/auth", true),
            ("https://quay.io", "https://auth.quay.io/token", true),
            (
                "https://registry.gitlab.com",
                "https://gitlab.com/jwt/auth",
                true,
            ),
            (
                "https://a.b.example.com:5000",
                "https://login.b.example.com",
                true,
            ),
            ("https://nvcr.io", "https://authn.nvidia.com/token", true),
            (
                "https://rg.fr-par.scw.cloud",
                "https://api.scaleway.com/x",
                true,
            ),
            ("https://quay.io", "https://evil.io/token", false),
            ("https://foo.co.uk", "https://evil.co.uk/token", false),
            (
                "https://registry.sap.com",
                "https://auth.sap.com/token",
                true,
            ),
            ("https://reg.example.com", "https://notexample.com/", false),
            ("https://reg.example.com", "http://reg.example.com/", false),
            ("http://reg.example.com", "http://reg.example.com/", true),
            ("https://10.0.0.1:5000", "https://10.0.0.2/token", false),
            ("https://10.0.0.1:5000", "https://10.0.0.1/token", true),
            ("http://127.0.0.1:5000", "http://127.0.0.1:5001/token", true),
            ("http://127.0.0.1:5000", "https://evil.example/token", false),
        ] {
            let url = Url::parse(realm).unwrap();
            assert_eq!(
                may_send_credentials(&endpoint(registry), &url).is_ok(),
                allowed,
                "{registry} {realm}"
            );
        }
    }

    #[test]
    fn a_registry_cannot_send_archaware_anywhere() {
        for (registry, realm, allowed) in [
            ("https://quay.io", "https://elsewhere.io/token", true),
            ("https://quay.io", "http://quay.io/token", false),
            ("https://quay.io", "https://127.0.0.1/token", false),
            (
                "http://reg.example.com",
                "http://169.254.169.254/latest",
                false,
            ),
            ("http://reg.example.com", "http://[fe80::1]/latest", false),
            (
                "http://reg.example.com",
                "http://[::ffff:169.254.169.254]/",
                false,
            ),
            ("http://reg.example.com", "http://0.0.0.0/", false),
            ("http://localhost:5000", "http://127.0.0.1:5001/token", true),
        ] {
            let url = Url::parse(realm).unwrap();
            assert_eq!(
                may_request(&endpoint(registry), &url).is_ok(),
                allowed,
                "{registry} {realm}"
            );
        }
    }

    fn choose(headers: &[&str]) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for header in headers {
            map.append(WWW_AUTHENTICATE, header.parse().unwrap());
        }
        Challenge::choose(&map)
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic(text in r#"[a-zA-Z =",\\:/.?&-]{0,120}"#, odd in "[ -~]{0,200}") {
            let _ = choose(&[&text, &odd]);
            let _ = choose(&[&format!("Bearer realm=\"{odd}\",{text}")]);
        }

        #[test]
        fn parameters_are_found_in_any_order(
            order in Just(vec![r#"realm="https://auth/t?a=b""#, r#"service="a \"b\", c""#, r#"scope="repository:a:pull""#, "error=invalid"]).prop_shuffle(),
            scheme in "(Bearer|bearer|BEARER)",
        ) {
            let chosen = choose(&[&format!("{scheme} {}", order.join(", "))]);
            prop_assert_eq!(chosen, Some(Challenge::Bearer {
                realm: Url::parse("https://auth/t?a=b").unwrap(),
                service: Some(r#"a "b", c"#.to_owned()),
                scope: Some("repository:a:pull".to_owned()),
            }));
        }
    }

    #[test]
    fn reads_challenges_in_any_order_and_number() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            Some(Challenge::Bearer {
                realm: Url::parse(realm).unwrap(),
                service: service.map(str::to_owned),
                scope: scope.map(str::to_owned),
            })
        };
        let full = bearer(
            "https://auth/t",
            Some("reg"),
            Some("repository:a:pull,push"),
        );
        for headers in [
            &[r#"Bearer realm="https://auth/t",service="reg",scope="repository:a:pull,push""#][..],
            &[r#"bearer scope="repository:a:pull,push", service="reg", realm="https://auth/t""#],
            &[
                "Basic realm=x",
                r#"Bearer realm="https://auth/t",service=reg,scope="repository:a:pull,push""#,
            ],
            &[
                r#"Basic realm="x", Bearer realm="https://auth/t",service="reg",scope="repository:a:pull,push""#,
            ],
        ] {
            assert_eq!(choose(headers), full, "{headers:?}");
        }
        assert_eq!(
            choose(&[r#"Bearer realm="https://auth/t""#]),
            bearer("https://auth/t", None, None)
        );
        for basic in [
            r#"Basic realm="x""#,
            "Basic realm=Registry Realm",
            "basic realm=",
        ] {
            assert_eq!(choose(&[basic]), Some(Challenge::Basic), "{basic}");
        }
        for nothing in [
            &[][..],
            &["Bearer"],
            &["Negotiate"],
            &["Bearer realm=\"not a url\""],
            &["\"\"\""],
        ] {
            assert_eq!(choose(nothing), None, "{nothing:?}");
        }
    }
}
