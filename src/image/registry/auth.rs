//! Answering a registry's challenge: Basic, or a Bearer token from its token endpoint
//! (the distribution specification's token authentication).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::HeaderMap;
use quick_cache::sync::Cache;
use reqwest::{Url, header::WWW_AUTHENTICATE};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::image::{
    credentials::{Credential, Fingerprint, Secret},
    error::ImageError,
    flight::Flights,
};

use super::{
    Endpoint,
    exchange::{Clients, exchange, read_body},
    gate::{Gates, Host},
};

/// Tokens kept: one per repository and credential in use.
const MAX_TOKENS: usize = 2048;
/// The specification's default when a token endpoint does not say.
const DEFAULT_EXPIRY: Duration = Duration::from_mins(1);
const MAX_TOKEN_RESPONSE: u64 = 64 * 1024;

/// For what a token is good: never shared between registries, repositories or credentials.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Slot {
    pub(super) endpoint: Endpoint,
    pub(super) repository: String,
    pub(super) credential: Option<Fingerprint>,
}

/// What to put into the `Authorization` header.
#[derive(Clone, Debug)]
pub(super) enum Authorization {
    Basic {
        username: String,
        password: SecretString,
    },
    Bearer(SecretString),
}

#[derive(Clone)]
struct Kept {
    authorization: Authorization,
    expires: Instant,
}

/// What the registry wants to see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer {
        realm: Url,
        service: Option<String>,
        scope: Option<String>,
    },
}

pub(super) struct Authorizations {
    kept: Cache<Slot, Kept>,
    flights: Flights<(Slot, String), Result<Authorization, ImageError>>,
}

impl Authorization {
    pub(super) fn apply(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match self {
            Self::Basic { username, password } => {
                request.basic_auth(username, Some(password.expose_secret()))
            }
            Self::Bearer(token) => request.bearer_auth(token.expose_secret()),
        }
    }
}

impl Challenge {
    /// The challenge to answer: Bearer before Basic, from all `WWW-Authenticate` headers.
    pub(super) fn choose(headers: &HeaderMap) -> Option<Self> {
        let mut basic = None;
        for header in headers.get_all(WWW_AUTHENTICATE) {
            let Some(challenges) = header
                .to_str()
                .ok()
                .and_then(|text| http_auth::parse_challenges(text).ok())
            else {
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

impl Authorizations {
    pub(super) fn new() -> Self {
        Self {
            kept: Cache::new(MAX_TOKENS),
            flights: Flights::new(),
        }
    }

    /// What worked before for this slot and has not expired.
    pub(super) fn known(&self, slot: &Slot) -> Option<Authorization> {
        let kept = self.kept.get(slot)?;
        (Instant::now() < kept.expires).then_some(kept.authorization)
    }

    pub(super) fn forget(&self, slot: &Slot) {
        self.kept.remove(slot);
    }

    /// Answers a challenge; many who need the same token at once share one request for it.
    pub(super) async fn answer(
        self: &Arc<Self>,
        tokens: Tokens<'_>,
        slot: Slot,
        challenge: Challenge,
        credential: Option<Credential>,
    ) -> Result<Authorization, ImageError> {
        let what = slot.endpoint.host.clone();
        match (challenge, credential) {
            (Challenge::Basic, None) => Err(ImageError::Denied {
                what,
                why: "it wants a user name and password, and there are none for it".to_owned(),
            }),
            (Challenge::Basic, Some(credential)) => {
                let authorization = basic(&credential).ok_or_else(|| ImageError::Denied {
                    what,
                    why: "it wants a user name and password, and there is only a token".to_owned(),
                })?;
                self.keep(slot, authorization.clone(), Duration::from_hours(24));
                Ok(authorization)
            }
            (
                Challenge::Bearer {
                    realm,
                    service,
                    scope,
                },
                credential,
            ) => {
                let host = realm.host_str().unwrap_or_default().to_owned();
                // A token request carries the credential: never in the clear, unless the registry
                // itself is spoken to in the clear.
                if realm.scheme() != "https" && !slot.endpoint.plain_http && credential.is_some() {
                    let why = format!("its token endpoint on {host} is not https");
                    return Err(ImageError::Denied { what, why });
                }
                let name = realm
                    .port()
                    .map_or(host.clone(), |port| format!("{host}:{port}"));
                let request = TokenRequest {
                    http: tokens.clients.to(&name)?,
                    gate: tokens.gates.host(&name),
                    timeout: tokens.clients.timeout(),
                    name,
                    scope: scope.unwrap_or_else(|| format!("repository:{}:pull", slot.repository)),
                    realm,
                    service,
                };
                let this = self.clone();
                let key = (slot.clone(), format!("{} {}", request.realm, request.scope));
                let fetched = move || {
                    async move {
                        let (token, life) = request.send(credential.as_ref()).await?;
                        let authorization = Authorization::Bearer(token);
                        this.keep(slot, authorization.clone(), life.mul_f32(0.9));
                        Ok(authorization)
                    }
                    .boxed()
                };
                self.flights.run(key, fetched).await
            }
        }
    }

    fn keep(&self, slot: Slot, authorization: Authorization, life: Duration) {
        self.kept.insert(
            slot,
            Kept {
                authorization,
                expires: Instant::now() + life,
            },
        );
    }
}

fn basic(credential: &Credential) -> Option<Authorization> {
    match credential.secret() {
        Secret::Password { username, password } => Some(Authorization::Basic {
            username: username.clone(),
            password: password.clone(),
        }),
        Secret::IdentityToken(_) => None,
    }
}

#[derive(Deserialize)]
struct TokenResponse {
    #[serde(default)]
    token: Option<SecretString>,
    #[serde(default)]
    access_token: Option<SecretString>,
    #[serde(default)]
    expires_in: Option<u64>,
}

/// What a token request needs from the client: connections, and the host's own gate.
pub(super) struct Tokens<'a> {
    pub(super) clients: &'a Clients,
    pub(super) gates: &'a Gates,
}

struct TokenRequest {
    http: reqwest::Client,
    gate: Arc<Host>,
    timeout: Duration,
    /// Host and port of the endpoint.
    name: String,
    realm: Url,
    service: Option<String>,
    scope: String,
}

impl TokenRequest {
    async fn send(
        self,
        credential: Option<&Credential>,
    ) -> Result<(SecretString, Duration), ImageError> {
        let what = format!("token endpoint {}", self.name);
        let request = self.request(credential.map(Credential::secret));
        let asked = async {
            let response = request.send().await?;
            let (status, headers) = (response.status(), response.headers().clone());
            Ok((
                status,
                headers,
                read_body(&what, response, MAX_TOKEN_RESPONSE).await?,
            ))
        };
        let answer = exchange(&self.gate, &self.name, &what, self.timeout, asked).await;
        let (status, _, body) = answer.map_err(|error| match error {
            // Its size says nothing about the image.
            ImageError::Document { .. } => {
                ImageError::unavailable(&what, "its answer is too large")
            }
            other => other,
        })?;
        match status.as_u16() {
            200..=299 => {}
            // A token endpoint says 400 and 404 too for credentials and scopes that it does not like.
            400..=499 => {
                return Err(ImageError::Denied {
                    what,
                    why: format!("it answered {status}"),
                });
            }
            _ => {
                return Err(ImageError::unavailable(
                    what,
                    format!("it answered {status}"),
                ));
            }
        }
        // The body of a success is a secret: no part of it goes into an error.
        let no_token = || ImageError::unavailable(&what, "its answer holds no token");
        let answer: TokenResponse = serde_json::from_slice(&body).map_err(|_| no_token())?;
        let given = |token: &SecretString| !token.expose_secret().is_empty();
        let token = answer
            .token
            .filter(given)
            .or(answer.access_token.filter(given));
        let life = answer
            .expires_in
            .map_or(DEFAULT_EXPIRY, Duration::from_secs);
        Ok((
            token.ok_or_else(no_token)?,
            life.min(Duration::from_hours(24)),
        ))
    }

    /// GET with the password, or POST with the identity token as an `OAuth2` refresh token.
    fn request(&self, secret: Option<&Secret>) -> reqwest::RequestBuilder {
        let mut url = self.realm.clone();
        let service = self.service.as_deref();
        if let Some(Secret::IdentityToken(token)) = secret {
            let mut form = url.clone();
            form.query_pairs_mut()
                .clear()
                .append_pair("grant_type", "refresh_token")
                .append_pair("client_id", "archaware")
                .append_pair("service", service.unwrap_or_default())
                .append_pair("scope", &self.scope)
                .append_pair("refresh_token", token.expose_secret());
            let form_type = "application/x-www-form-urlencoded";
            let body = form.query().unwrap_or_default().to_owned();
            return self
                .http
                .post(url)
                .header(http::header::CONTENT_TYPE, form_type)
                .body(body);
        }
        if let Some(service) = service {
            url.query_pairs_mut().append_pair("service", service);
        }
        url.query_pairs_mut().append_pair("scope", &self.scope);
        match secret {
            Some(Secret::Password { username, password }) => self
                .http
                .get(url)
                .basic_auth(username, Some(password.expose_secret())),
            _ => self.http.get(url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(headers: &[&str]) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for header in headers {
            map.append(WWW_AUTHENTICATE, header.parse().unwrap());
        }
        Challenge::choose(&map)
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
        assert_eq!(choose(&[r#"Basic realm="x""#]), Some(Challenge::Basic));
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
