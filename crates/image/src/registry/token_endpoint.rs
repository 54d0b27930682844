//! Which token endpoints may be asked, and which of them may get a registry's credential.

use reqwest::Url;

use super::{
    address::{bare, is_loopback, names_local, parent_domain},
    hosts::Endpoint,
    settings::TokenEndpoint,
};

/// Well-known registries with a token server on another domain of the same company: the host or
/// domain suffix of the registry, and the host of the token server. `{}` stands for the registry's
/// label in front of the suffix. Source: the realms that these registries send.
const WELL_KNOWN: &[(&str, &str)] = &[
    ("nvcr.io", "authn.nvidia.com"),
    ("registry.redhat.io", "sso.redhat.com"),
    ("registry.connect.redhat.com", "sso.redhat.com"),
    ("scw.cloud", "api.scaleway.com"),
    // Container Registry Enterprise Edition: `NAME-registry.REGION.cr.aliyuncs.com`.
    ("cr.aliyuncs.com", "dockerauth-ee.{}.aliyuncs.com"),
    ("cr.aliyuncs.com", "dockerauth-ee-vpc.{}.aliyuncs.com"),
];

/// The operator's token endpoints.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenEndpoints(Vec<TokenEndpoint>);

/// Why a token endpoint is not asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("is not https, so it is not asked")]
    NotHttps,
    #[error("is an address of this machine, so it is not asked")]
    Local,
    #[error(
        "is on another domain, so it gets no credential; if it belongs to the registry, add \
         {{registry: {registry:?}, host: {host:?}}} to registries.tokenEndpoints"
    )]
    OtherDomain { registry: String, host: String },
}

impl TokenEndpoints {
    pub(super) fn new(configured: Vec<TokenEndpoint>) -> Self {
        Self(configured)
    }

    /// Whether a registry's credential may be sent to a token endpoint.
    ///
    /// The token endpoint must use HTTPS, unless the registry itself uses plain HTTP. Its host must
    /// be in the domain of the registry (`auth.quay.io` for `quay.io`) or in that domain's parent
    /// (`example.com` or `auth.example.com` for `registry.example.com`), well known, or configured.
    /// If the registry is on loopback, the token endpoint may be on loopback, too.
    ///
    /// # Errors
    ///
    /// The reason why it must not be sent.
    pub(super) fn may_send_credentials(
        &self,
        endpoint: &Endpoint,
        realm: &Url,
    ) -> Result<(), Refused> {
        may_request(endpoint, realm)?;
        let registry = bare(endpoint.host());
        let host = bare(realm.host_str().unwrap_or_default());
        let is_under = |domain: &str| host == domain || label_before(host, domain).is_some();
        let is_configured = |entry: &TokenEndpoint| {
            let registries = [registry, endpoint.host()];
            entry.host.eq_ignore_ascii_case(host)
                && registries
                    .iter()
                    .any(|name| entry.registry.eq_ignore_ascii_case(name))
        };
        if (is_loopback(registry) && is_loopback(host))
            || is_under(registry)
            || parent_domain(registry).is_some_and(is_under)
            || WELL_KNOWN
                .iter()
                .any(|(domain, template)| is_well_known(registry, host, domain, template))
            || self.0.iter().any(is_configured)
        {
            Ok(())
        } else {
            Err(Refused::OtherDomain {
                registry: endpoint.host().to_owned(),
                host: host.to_owned(),
            })
        }
    }
}

fn is_well_known(registry: &str, host: &str, domain: &str, template: &str) -> bool {
    match label_before(registry, domain) {
        Some(label) => template.replace("{}", label) == host,
        None => registry == domain && template == host,
    }
}

/// The label in front of a domain that a host is in.
fn label_before<'a>(host: &'a str, domain: &str) -> Option<&'a str> {
    host.strip_suffix(domain)?
        .strip_suffix('.')?
        .rsplit('.')
        .next()
}

/// Whether a token endpoint may be asked without a credential. Users choose the registry, and the
/// registry must not make archaware send requests to archaware's own machine or to a cloud's
/// metadata service.
///
/// # Errors
///
/// The reason why it must not be asked.
pub(super) fn may_request(endpoint: &Endpoint, realm: &Url) -> Result<(), Refused> {
    let registry = bare(endpoint.host());
    let host = bare(realm.host_str().unwrap_or_default());
    if realm.scheme() != "https" && !endpoint.is_plain() {
        Err(Refused::NotHttps)
    } else if names_local(realm) && registry != host && !is_loopback(registry) {
        Err(Refused::Local)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
            (
                "https://registry.connect.redhat.com",
                "https://sso.redhat.com/auth",
                true,
            ),
            (
                "https://team-registry.cn-hangzhou.cr.aliyuncs.com",
                "https://dockerauth-ee.cn-hangzhou.aliyuncs.com/auth",
                true,
            ),
            (
                "https://team-registry.cn-hangzhou.cr.aliyuncs.com",
                "https://dockerauth-ee.oss-cn-hangzhou.aliyuncs.com/auth",
                false,
            ),
            (
                "https://cr.aliyuncs.com.evil.io",
                "https://dockerauth-ee.cn-hangzhou.aliyuncs.com/auth",
                false,
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
                TokenEndpoints::default()
                    .may_send_credentials(&endpoint(registry), &url)
                    .is_ok(),
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

    #[test]
    fn the_operator_names_further_ones_and_the_error_says_how() {
        let realm = Url::parse("https://keycloak.example.org/token").unwrap();
        let registry = endpoint("https://reg.example.com:5000");
        let refused = TokenEndpoints::default()
            .may_send_credentials(&registry, &realm)
            .unwrap_err();
        let line = r#"{registry: "reg.example.com:5000", host: "keycloak.example.org"}"#;
        assert!(refused.to_string().contains(line), "{refused}");
        for (name, allowed) in [
            ("reg.example.com:5000", true),
            ("reg.example.com", true),
            ("example.com", false),
            ("reg.example.com:443", false),
        ] {
            let configured = TokenEndpoint {
                registry: name.to_owned(),
                host: "keycloak.example.org".to_owned(),
            };
            let endpoints = TokenEndpoints::new(vec![configured]);
            let may = endpoints.may_send_credentials(&registry, &realm);
            assert_eq!(may.is_ok(), allowed, "{name}");
        }
    }
}
