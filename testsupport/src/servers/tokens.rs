//! A token server for docker-registry: the distribution specification's token authentication, with
//! tokens as the registry verifies them (JWT, RS256, certificate in `x5c`).

use std::{
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Form, Router,
    extract::{Query, State},
    response::IntoResponse,
    routing::get,
};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use super::{Pki, run};

/// A running token server; stops on drop.
pub struct Tokens {
    address: std::net::SocketAddr,
    shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

struct Shared {
    pki: Pki,
    dir: TempDir,
    /// User name, password and the only repository that the user may pull; `*` means all.
    users: Vec<(String, String, String)>,
    /// User and scope of each request.
    seen: Mutex<Vec<(Option<String>, String)>>,
}

#[derive(Deserialize)]
struct Asked {
    scope: Option<String>,
    service: Option<String>,
    grant_type: Option<String>,
    refresh_token: Option<String>,
}

impl Tokens {
    /// Starts with these users: name, password and allowed repository.
    pub async fn start(users: &[(&str, &str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::new(dir.path());
        pki.leaf("signer");
        let owned = |(user, password, repository): &(&str, &str, &str)| {
            (
                (*user).to_owned(),
                (*password).to_owned(),
                (*repository).to_owned(),
            )
        };
        let shared = Arc::new(Shared {
            pki,
            dir,
            users: users.iter().map(owned).collect(),
            seen: Mutex::default(),
        });
        let router = Router::new()
            .route("/token", get(by_get).post(by_post))
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self {
            address,
            shared,
            server,
        }
    }

    pub fn realm(&self) -> String {
        format!("http://{}/token", self.address)
    }

    pub fn certificate(&self) -> String {
        self.shared.pki.path("signer.crt")
    }

    /// User and scope of each request so far.
    pub fn seen(&self) -> Vec<(Option<String>, String)> {
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn by_get(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Query(asked): Query<Asked>,
) -> impl IntoResponse {
    let basic = headers.get("authorization").and_then(|value| {
        let encoded = value.to_str().ok()?.strip_prefix("Basic ")?;
        let text = String::from_utf8(STANDARD.decode(encoded).ok()?).ok()?;
        let (user, password) = text.split_once(':')?;
        Some((user.to_owned(), password.to_owned()))
    });
    shared.answer(basic, &asked)
}

/// A refresh token is `user:password` here.
async fn by_post(State(shared): State<Arc<Shared>>, Form(asked): Form<Asked>) -> impl IntoResponse {
    if asked.grant_type.as_deref() != Some("refresh_token") {
        return (StatusCode::BAD_REQUEST, String::new());
    }
    let known = asked
        .refresh_token
        .as_deref()
        .and_then(|token| token.split_once(':'));
    let known = known.map(|(user, password)| (user.to_owned(), password.to_owned()));
    shared.answer(known, &asked)
}

impl Shared {
    fn answer(&self, who: Option<(String, String)>, asked: &Asked) -> (StatusCode, String) {
        let scope = asked.scope.clone().unwrap_or_default();
        let user = who.as_ref().map(|(user, _)| user.clone());
        self.seen.lock().unwrap().push((user, scope.clone()));
        let known = |(user, password): (String, String)| {
            self.users
                .iter()
                .find(|(u, p, _)| *u == user && *p == password)
        };
        let Some((user, _, may)) = who.and_then(known) else {
            return (StatusCode::UNAUTHORIZED, String::new());
        };
        assert_eq!(asked.service.as_deref(), Some("test"));
        let repository = scope.split(':').nth(1).unwrap_or_default();
        let access = if may == "*" || may == repository {
            json!([{"type": "repository", "name": repository, "actions": ["pull"]}])
        } else {
            json!([])
        };
        let token = self.sign(user, &access);
        (
            StatusCode::OK,
            json!({"access_token": token, "expires_in": 300}).to_string(),
        )
    }

    fn sign(&self, user: &str, access: &serde_json::Value) -> String {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let certificate = std::fs::read_to_string(self.pki.path("signer.crt")).unwrap();
        let der: String = certificate
            .lines()
            .filter(|line| !line.starts_with('-'))
            .collect();
        let header = json!({"typ": "JWT", "alg": "RS256", "x5c": [der]});
        let claims = json!({
            "iss": "test", "sub": user, "aud": "test", "exp": now + 300, "nbf": now - 10, "iat": now,
            "jti": format!("{now}-{}", self.seen.lock().unwrap().len()), "access": access,
        });
        let encode = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(&header), encode(&claims));
        let number = self.seen.lock().unwrap().len();
        let (input, output) = (
            self.dir.path().join(format!("{number}")),
            self.dir.path().join(format!("{number}.sig")),
        );
        std::fs::write(&input, &signed).unwrap();
        run(
            "openssl",
            &[
                "dgst",
                "-sha256",
                "-sign",
                &self.pki.path("signer.key"),
                "-out",
                output.to_str().unwrap(),
                input.to_str().unwrap(),
            ],
        );
        format!(
            "{signed}.{}",
            URL_SAFE_NO_PAD.encode(std::fs::read(&output).unwrap())
        )
    }
}
