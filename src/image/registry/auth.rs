//! Answering a registry's challenge: Basic, or a Bearer token from its token endpoint
//! (the distribution specification's token authentication).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use futures::FutureExt;
use http::{HeaderMap, HeaderValue, Method, header::AUTHORIZATION};
use quick_cache::sync::Cache;
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::image::{
    credentials::{Credential, Fingerprint, Secret},
    error::ImageError,
    flight::Flights,
};

use super::{
    challenge::{Challenge, may_ask, may_show},
    exchange::{Call, Clients, HttpAnswer, Limits, exchange},
    gate::Gates,
    hosts::{Endpoint, Host, Transport},
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

/// What to put into the `Authorization` header: a token, or user and password.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Authorization(HeaderValue);

#[derive(Clone)]
struct Kept {
    authorization: Authorization,
    expires: Instant,
}

pub(super) struct Authorizations {
    kept: Cache<Slot, Kept>,
    flights: Flights<(Slot, String), Result<Authorization, ImageError>>,
}

impl Authorization {
    fn basic(username: &str, password: &SecretString) -> Option<Self> {
        let both = format!("{username}:{}", password.expose_secret());
        Self::new(format!("Basic {}", STANDARD.encode(both)))
    }

    fn bearer(token: &SecretString) -> Option<Self> {
        Self::new(format!("Bearer {}", token.expose_secret()))
    }

    /// `None` for a secret with what no header can hold. Its `Debug` does not show it.
    fn new(text: String) -> Option<Self> {
        let mut value = HeaderValue::try_from(text).ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.clone()
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

    /// The registry refused it. One that somebody else has got meanwhile stays.
    pub(super) fn forget(&self, slot: &Slot, refused: &Authorization) {
        if self
            .kept
            .get(slot)
            .is_some_and(|kept| kept.authorization == *refused)
        {
            self.kept.remove(slot);
        }
    }

    /// Answers a challenge of `host`, which refused the last authorisation if there was one; many who need
    /// the same token at once share one request for it.
    pub(super) async fn answer(
        self: &Arc<Self>,
        asking: &Asking,
        host: &Host,
        slot: Slot,
        challenge: Challenge,
        credential: Option<Credential>,
    ) -> Result<Authorization, ImageError> {
        // Somebody who was refused earlier may have got it by now.
        if let Some(known) = self.known(&slot) {
            return Ok(known);
        }
        let what = slot.endpoint.host().to_owned();
        let denied = |why: String| ImageError::Denied { what, why };
        let secret = credential.as_ref().map(Credential::secret);
        let (realm, service, scope) = match challenge {
            Challenge::Bearer {
                realm,
                service,
                scope,
            } => (realm, service, scope),
            Challenge::Basic => {
                let Some(Secret::Password { username, password }) = secret else {
                    let only = secret.map_or("nothing", |_| "a token");
                    let why =
                        format!("it wants a user name and password, and there is {only} for it");
                    return Err(denied(why));
                };
                let basic = Authorization::basic(username, password);
                let unusable =
                    || denied("its user name or password fits into no header".to_owned());
                let basic = basic.ok_or_else(unusable)?;
                self.keep(slot, basic.clone(), Duration::from_hours(24));
                return Ok(basic);
            }
        };
        let allowed = match credential {
            Some(_) => may_show(&slot.endpoint, &realm),
            None => may_ask(&slot.endpoint, &realm),
        };
        if let Err(why) = allowed {
            let endpoint = realm.host_str().unwrap_or_default();
            return Err(denied(format!(
                "its token endpoint {endpoint} {why}, so it is not asked"
            )));
        }
        // The headers of hosts.toml are for that address alone.
        let same = slot.endpoint.is_at(&realm);
        let request = TokenRequest {
            asking: asking.clone(),
            transport: host.transport.clone(),
            headers: if same {
                host.headers.clone()
            } else {
                HeaderMap::new()
            },
            scopes: scopes(scope.as_deref(), &slot.repository),
            realm,
            service,
            credential,
        };
        let this = self.clone();
        let key = (
            slot.clone(),
            format!("{} {}", request.realm, request.scopes.join(" ")),
        );
        let fetched = move || {
            async move {
                let (authorization, life) = request.send().await?;
                this.keep(slot, authorization.clone(), life.mul_f32(0.9));
                Ok(authorization)
            }
            .boxed()
        };
        self.flights.run(key, fetched).await
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

/// What the challenge asks for, and the right to pull, which some challenges leave out.
fn scopes(asked: Option<&str>, repository: &str) -> Vec<String> {
    let pull = format!("repository:{repository}:pull");
    let mut scopes: Vec<String> = asked
        .unwrap_or_default()
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let own = format!("repository:{repository}:");
    if !scopes.iter().any(|scope| scope.starts_with(&own)) {
        scopes.push(pull);
    }
    scopes
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<SecretString>,
    access_token: Option<SecretString>,
    /// Seconds; some write them as text or as a negative number, which means nothing.
    #[serde(default)]
    expires_in: serde_json::Value,
}

/// What every request needs: connections, and the gates of the hosts.
#[derive(Clone)]
pub(super) struct Asking {
    pub(super) clients: Arc<Clients>,
    pub(super) gates: Arc<Gates>,
}

struct TokenRequest {
    asking: Asking,
    transport: Arc<Transport>,
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
        let Asking { clients, gates } = &self.asking;
        let asker = self.credential.as_ref().map(Credential::fingerprint);
        let limits = Limits {
            time: clients.timeout(),
            body: MAX_TOKEN_RESPONSE,
        };
        let gate = gates.host(&host);
        let answer = exchange(clients, &gate, asker, &what, self.call(), limits).await;
        let HttpAnswer { status, body, .. } = answer.map_err(|error| match error {
            // Its size says nothing about the image.
            ImageError::Document { .. } => {
                ImageError::unavailable(&what, "its answer is too large")
            }
            other => other,
        })?;
        let why = format!("it answered {status}");
        match status.as_u16() {
            200..=299 => {}
            // A token endpoint says 400 and 404 too for credentials and scopes that it does not like.
            400..=499 => return Err(ImageError::Denied { what, why }),
            _ => return Err(ImageError::unavailable(what, why)),
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
            .as_u64()
            .map_or(DEFAULT_EXPIRY, Duration::from_secs);
        let authorization = token.as_ref().and_then(Authorization::bearer);
        Ok((
            authorization.ok_or_else(no_token)?,
            life.min(Duration::from_hours(24)),
        ))
    }

    /// GET with the password, or POST with the identity token as an `OAuth2` refresh token.
    fn call(&self) -> Call {
        let mut call = Call {
            method: Method::GET,
            url: self.realm.clone(),
            headers: HeaderMap::new(),
            own_headers: self.headers.clone(),
            form: None,
            transport: self.transport.clone(),
        };
        match self.credential.as_ref().map(Credential::secret) {
            Some(Secret::IdentityToken(token)) => {
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
            Some(Secret::Password { username, password }) => {
                let basic = Authorization::basic(username, password);
                let header = basic.map(|basic| (AUTHORIZATION, basic.header()));
                call.own_headers.extend(header);
            }
            Some(Secret::Anonymous) | None => {}
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
