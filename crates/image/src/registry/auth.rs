//! Answers a registry's challenge: Basic, or a Bearer token from its token endpoint (token
//! authentication of the distribution specification).

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use futures::FutureExt;
use http::{HeaderMap, HeaderValue, Method, header::AUTHORIZATION};
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::{
    credentials::{Credential, CredentialSecret, Fingerprint},
    error::ImageError,
    trace::{self, Peer},
};
use archaware_base::{expiring_cache::ExpiringCache, json, single_flight::SingleFlight};

use super::{
    challenge::Challenge,
    dns::AddressCheck,
    exchange::{Http, HttpRequest, HttpResponse, Limits},
    hosts::{Endpoint, Transport},
    token_endpoint::{TokenEndpoints, may_request},
};

/// Maximum number of cached tokens: one per repository and credential.
const MAX_TOKENS: usize = 2048;
/// The specification's default lifetime when a token endpoint does not return one.
const DEFAULT_EXPIRY: Duration = Duration::from_mins(1);
const MAX_TOKEN_RESPONSE: u64 = 64 * 1024;

/// Cache key of a token. Tokens are never shared between registries, repositories or credentials.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct TokenKey {
    pub(super) endpoint: Endpoint,
    pub(super) repository: String,
    pub(super) credential: Option<Fingerprint>,
}

/// The value of the `Authorization` header: a token, or user and password. Its `Debug` output is
/// redacted.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Authorization(HeaderValue);

pub(super) struct AuthorizationCache {
    cached: ExpiringCache<TokenKey, Authorization>,
    in_flight: SingleFlight<(TokenKey, String), Result<Authorization, ImageError>>,
    token_endpoints: TokenEndpoints,
}

/// A host that sent a challenge.
pub(super) struct Challenged<'a> {
    /// What the token is for.
    pub(super) token_key: TokenKey,
    pub(super) transport: &'a Arc<Transport>,
    pub(super) check: AddressCheck,
    /// Sent to the host itself only.
    pub(super) headers: &'a HeaderMap,
    pub(super) credential: Option<&'a Credential>,
}

impl Authorization {
    fn basic(username: &str, password: &SecretString) -> Option<Self> {
        let both = format!("{username}:{}", password.expose_secret());
        Self::new(format!("Basic {}", STANDARD.encode(both)))
    }

    fn bearer(token: &SecretString) -> Option<Self> {
        Self::new(format!("Bearer {}", token.expose_secret()))
    }

    /// Returns `None` if the secret contains bytes that no header can hold.
    fn new(text: String) -> Option<Self> {
        let mut value = HeaderValue::try_from(text).ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl AuthorizationCache {
    pub(super) fn new(token_endpoints: TokenEndpoints) -> Self {
        Self {
            cached: ExpiringCache::new(MAX_TOKENS),
            in_flight: SingleFlight::default(),
            token_endpoints,
        }
    }

    /// An authorization that worked before and has not expired.
    pub(super) fn cached(&self, token_key: &TokenKey) -> Option<Authorization> {
        let kept = self.cached.get(token_key)?;
        let repository = &token_key.repository;
        trace::cached(
            "token",
            format_args!("{}/{repository}", token_key.endpoint.host()),
            "held",
        );
        Some(kept)
    }

    /// Removes an authorization that the registry refused, unless it was replaced meanwhile.
    pub(super) fn forget(&self, token_key: &TokenKey, refused: &Authorization) {
        self.cached.remove(token_key, refused);
    }

    /// Answers the challenge of a host. Concurrent callers that need the same token share one
    /// request.
    pub(super) async fn answer_challenge(
        self: &Arc<Self>,
        http: &Http,
        host: Challenged<'_>,
        challenge: Challenge,
    ) -> Result<Authorization, ImageError> {
        let token_key = host.token_key;
        let credential = host.credential;
        // Another caller may have fetched the token meanwhile.
        if let Some(known) = self.cached(&token_key) {
            return Ok(known);
        }
        let what = token_key.endpoint.host().to_owned();
        let denied = |why: String| ImageError::Denied { what, why };
        let secret = credential.map(Credential::secret);
        let (realm, service, scope) = match challenge {
            Challenge::Bearer {
                realm,
                service,
                scope,
            } => (realm, service, scope),
            Challenge::Basic => {
                let Some(CredentialSecret::Password { username, password }) = secret else {
                    let only = secret.map_or("no credential", |_| "only a token");
                    let why =
                        format!("it requires a user name and password, but there is {only} for it");
                    return Err(denied(why));
                };
                let basic = Authorization::basic(username, password);
                let unusable =
                    || denied("its user name or password cannot be sent in a header".to_owned());
                let basic = basic.ok_or_else(unusable)?;
                let life = Duration::from_hours(24);
                self.cached.insert(token_key, basic.clone(), life);
                return Ok(basic);
            }
        };
        let allowed = match credential {
            Some(_) => (self.token_endpoints).may_send_credentials(&token_key.endpoint, &realm),
            None => may_request(&token_key.endpoint, &realm),
        };
        if let Err(why) = allowed {
            let endpoint = realm.host_str().unwrap_or_default();
            return Err(denied(format!("its token endpoint {endpoint} {why}")));
        }
        // Headers and client certificate of a host must not be sent to another server.
        let same = token_key.endpoint.is_at(&realm);
        let request = TokenRequest {
            http: http.clone(),
            transport: if same {
                host.transport.clone()
            } else {
                Transport::without_identity(host.transport)
            },
            check: if same {
                host.check
            } else {
                AddressCheck::RefuseLocal
            },
            headers: if same {
                host.headers.clone()
            } else {
                HeaderMap::new()
            },
            scopes: scopes(scope.as_deref(), &token_key.repository),
            realm,
            service,
            credential: credential.cloned(),
        };
        let this = self.clone();
        let key = (
            token_key.clone(),
            format!("{} {}", request.realm, request.scopes.join(" ")),
        );
        let fetched = move || {
            async move {
                let (authorization, life) = request.send().await?;
                let life = life.mul_f32(0.9);
                this.cached.insert(token_key, authorization.clone(), life);
                Ok(authorization)
            }
            .boxed()
        };
        self.in_flight.run(key, fetched).await
    }
}

/// The scopes of the challenge, with pull access to the repository added if no scope names the
/// repository.
fn scopes(challenge_scopes: Option<&str>, repository: &str) -> Vec<String> {
    let pull = format!("repository:{repository}:pull");
    let mut scopes: Vec<String> = challenge_scopes
        .unwrap_or_default()
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let prefix = format!("repository:{repository}:");
    if !scopes.iter().any(|scope| scope.starts_with(&prefix)) {
        scopes.push(pull);
    }
    scopes
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<SecretString>,
    access_token: Option<SecretString>,
    /// Seconds. Some servers send text or negative numbers, which are ignored.
    #[serde(default)]
    expires_in: serde_json::Value,
}

struct TokenRequest {
    http: Http,
    transport: Arc<Transport>,
    check: AddressCheck,
    realm: Url,
    headers: HeaderMap,
    service: Option<String>,
    scopes: Vec<String>,
    credential: Option<Credential>,
}

impl TokenRequest {
    async fn send(self) -> Result<(Authorization, Duration), ImageError> {
        let host = Endpoint::new(&self.realm).host().to_owned();
        let what = format!("token endpoint {host}");
        let principal = self.credential.as_ref().map(Credential::fingerprint);
        let limits = Limits {
            time: self.http.timeout(),
            body: MAX_TOKEN_RESPONSE,
        };
        let answer = self
            .http
            .exchange(principal, &what, self.http_request(), limits);
        let answer = answer.await;
        let HttpResponse { status, body, .. } = answer.map_err(|error| match error {
            // `Document` means a defect of the image, but here the token response is too large.
            ImageError::Document { .. } => {
                ImageError::unavailable(&what, "its answer is too large")
            }
            other => other,
        })?;
        let why = format!("it answered {status}");
        match status.as_u16() {
            200..=299 => {}
            // Token endpoints also answer 400 and 404 to invalid credentials and scopes.
            400..=499 => return Err(ImageError::Denied { what, why }),
            _ => return Err(ImageError::unavailable(what, why)),
        }
        // The body contains the token, so no part of it goes into an error.
        let no_token = || ImageError::unavailable(&what, "its answer holds no token");
        let answer: TokenResponse = json::object(&body).map_err(|_| no_token())?;
        let given = |token: &SecretString| !token.expose_secret().is_empty();
        let token = answer
            .token
            .filter(given)
            .or(answer.access_token.filter(given));
        let life = answer
            .expires_in
            .as_u64()
            .map_or(DEFAULT_EXPIRY, Duration::from_secs);
        let authorization = token.as_ref().and_then(Authorization::bearer);
        Ok((
            authorization.ok_or_else(no_token)?,
            life.min(Duration::from_hours(24)),
        ))
    }

    /// GET with the password, or POST with the identity token as an `OAuth2` refresh token.
    fn http_request(&self) -> HttpRequest {
        let mut call = HttpRequest {
            peer: Peer::TokenServer,
            method: Method::GET,
            url: self.realm.clone(),
            headers: HeaderMap::new(),
            origin_headers: self.headers.clone(),
            form: None,
            transport: self.transport.clone(),
            check: self.check,
            has_known_digest: false,
            attempt: 1,
        };
        match self.credential.as_ref().map(Credential::secret) {
            Some(CredentialSecret::IdentityToken(token)) => {
                let mut form = self.realm.clone();
                form.query_pairs_mut()
                    .clear()
                    .append_pair("grant_type", "refresh_token")
                    .append_pair("client_id", "archaware")
                    .append_pair("service", self.service.as_deref().unwrap_or_default())
                    .append_pair("scope", &self.scopes.join(" "))
                    .append_pair("refresh_token", token.expose_secret());
                call.method = Method::POST;
                call.form = Some(form.query().unwrap_or_default().to_owned());
                return call;
            }
            Some(CredentialSecret::Password { username, password }) => {
                let basic = Authorization::basic(username, password);
                let header = basic.map(|basic| (AUTHORIZATION, basic.header()));
                call.origin_headers.extend(header);
            }
            Some(CredentialSecret::Anonymous) | None => {}
        }
        let mut query = call.url.query_pairs_mut();
        if let Some(service) = &self.service {
            query.append_pair("service", service);
        }
        for scope in &self.scopes {
            query.append_pair("scope", scope);
        }
        drop(query);
        call
    }
}
