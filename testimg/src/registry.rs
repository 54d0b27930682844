//! An in-process registry on loopback that answers as scripted and counts requests.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{HeaderMap, Method, StatusCode, header};
use parking_lot::{Mutex, MutexGuard};
use tokio::net::TcpListener;

use crate::blob::{Blob, Image};

/// Required authentication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Basic with this user name and password.
    Basic(String, String),
    /// A bearer token from this registry's `/token`, with user name and password if given.
    Bearer(Option<(String, String)>),
}

/// How requests whose path contains a text are answered.
#[derive(Clone, Debug)]
pub enum Script {
    /// With this status and these headers.
    Status(u16, Vec<(String, String)>),
    /// After this time.
    Slow(Duration),
    /// Never.
    Hang,
    /// One byte per interval, forever.
    Trickle(Duration),
    /// A body of this many bytes without Content-Length.
    Oversized(usize),
    /// This many bytes, and then nothing more.
    Stall(usize),
    /// 200 with other content than requested.
    OtherContent(Bytes),
    /// A wrong `Docker-Content-Digest`.
    OtherDigest(String),
    /// This body with `Content-Encoding: gzip`.
    Packed(Bytes),
    /// A redirect to this address.
    Redirect(String),
    /// A redirect to this address after this time.
    SlowRedirect(Duration, String),
    /// 401 with this header without `Authorization`; with it, a redirect by the end of the path.
    Authorized((String, String), Vec<(String, String)>),
    /// A body shorter than its Content-Length.
    CutShort,
    /// HEAD without a digest.
    NoDigestHeader,
}

/// A received request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// `GET`, `HEAD`, `POST`.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The `Authorization` header.
    pub authorization: Option<String>,
    /// The `Accept` header.
    pub accept: Option<String>,
    /// All headers.
    pub headers: Vec<(String, String)>,
}

#[derive(Default)]
struct Content {
    /// By repository and tag or digest.
    manifests: HashMap<(String, String), Blob>,
    blobs: HashMap<(String, String), Blob>,
    /// What is attached, by repository and digest.
    referrers: HashMap<(String, String), Blob>,
    /// Whether each answer of the referrers API has one artifact, and links to the next.
    referrers_in_pages: bool,
    scripts: Vec<(String, Script)>,
    auth: Option<Auth>,
    tokens: Vec<String>,
    token_life: Option<u64>,
    seen: Vec<Seen>,
}

/// A running registry; ends when it is dropped.
pub struct FakeRegistry {
    address: SocketAddr,
    content: Arc<Mutex<Content>>,
    server: tokio::task::JoinHandle<()>,
}

type Shared = (Arc<Mutex<Content>>, SocketAddr);

impl FakeRegistry {
    /// Starts on a free port.
    ///
    /// # Errors
    /// When loopback has no free port.
    pub async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let content: Arc<Mutex<Content>> = Arc::default();
        let router = Router::new()
            .fallback(answer)
            .with_state((content.clone(), address));
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self {
            address,
            content,
            server,
        })
    }

    /// `127.0.0.1:PORT`
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// The name of an image in this registry.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Stores an image as `repository:latest`.
    pub fn add(&self, repository: &str, image: &Image) {
        self.add_tag(repository, "latest", image);
    }

    /// Stores an image as `repository:tag`.
    pub fn add_tag(&self, repository: &str, tag: &str, image: &Image) {
        let mut content = self.content();
        let key = |name: &str| (repository.to_owned(), name.to_owned());
        for manifest in image.manifests.iter().chain([&image.root]) {
            content
                .manifests
                .insert(key(&manifest.digest), manifest.clone());
        }
        content.manifests.insert(key(tag), image.root.clone());
        for blob in &image.blobs {
            content.blobs.insert(key(&blob.digest), blob.clone());
        }
    }

    /// Stores one document under a tag.
    pub fn add_manifest(&self, repository: &str, tag: &str, document: Blob) {
        let key = (repository.to_owned(), tag.to_owned());
        self.content().manifests.insert(key, document);
    }

    /// Answers the referrers API: these artifacts are attached to this digest. `None`: it lacks the
    /// API.
    pub fn set_referrers(&self, repository: &str, digest: &str, attached: Option<&[&Image]>) {
        let key = (repository.to_owned(), digest.to_owned());
        let index = attached.map(Image::referrers);
        let mut content = self.content();
        match index {
            Some(index) => content.referrers.insert(key, index),
            None => content.referrers.remove(&key),
        };
    }

    /// Each answer of the referrers API has one artifact from now on, and links to the next.
    pub fn split_referrers(&self) {
        self.content().referrers_in_pages = true;
    }

    /// Answers requests whose path contains `part` by the script.
    pub fn script(&self, part: &str, script: Script) {
        self.content().scripts.push((part.to_owned(), script));
    }

    /// Removes all scripts.
    pub fn unscript(&self) {
        self.content().scripts.clear();
    }

    /// Requires this authentication.
    pub fn require(&self, auth: Auth) {
        self.content().auth = Some(auth);
    }

    /// Invalidates all tokens.
    pub fn revoke_tokens(&self) {
        self.content().tokens.clear();
    }

    /// `expires_in` of tokens, in seconds.
    pub fn set_token_life(&self, seconds: u64) {
        self.content().token_life = Some(seconds);
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.content().seen.clone()
    }

    /// Clears the recorded requests.
    pub fn forget(&self) {
        self.content().seen.clear();
    }

    /// Number of requests with this method whose path contains `part`.
    pub fn count(&self, method: &str, part: &str) -> usize {
        let matches = |seen: &&Seen| seen.method == method && seen.path.contains(part);
        self.content().seen.iter().filter(matches).count()
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        lock(&self.content)
    }
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock()
}

async fn answer(State((content, address)): State<Shared>, request: Request) -> Response {
    let (request, _) = request.into_parts();
    let path = request
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_owned();
    let header = |name| {
        request
            .headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .map(str::to_owned)
    };
    let seen = Seen {
        method: request.method.to_string(),
        path: path.clone(),
        authorization: header(header::AUTHORIZATION),
        accept: header(header::ACCEPT),
        headers: request
            .headers
            .iter()
            .filter_map(|(name, value)| Some((name.to_string(), value.to_str().ok()?.to_owned())))
            .collect(),
    };
    let script = {
        let mut content = lock(&content);
        content.seen.push(seen.clone());
        content
            .scripts
            .iter()
            .rev()
            .find(|(part, _)| path.contains(part))
            .map(|(_, s)| s.clone())
    };
    let head = request.method == Method::HEAD;
    match script {
        Some(Script::Slow(time)) => tokio::time::sleep(time).await,
        Some(Script::Hang) => futures::future::pending().await,
        Some(Script::NoDigestHeader) => {
            let mut response = truthful(&content, address, &seen);
            if head {
                response.headers_mut().remove("docker-content-digest");
            }
            return response;
        }
        Some(Script::OtherDigest(digest)) => {
            let mut response = truthful(&content, address, &seen);
            if let Ok(value) = digest.parse() {
                response
                    .headers_mut()
                    .insert("docker-content-digest", value);
            }
            return response;
        }
        Some(Script::SlowRedirect(time, to)) => {
            tokio::time::sleep(time).await;
            return scripted(Script::Redirect(to));
        }
        Some(Script::Authorized(challenge, _)) if seen.authorization.is_none() => {
            return scripted(Script::Status(401, vec![challenge]));
        }
        Some(Script::Authorized(_, targets)) => {
            let target = targets.into_iter().find(|(end, _)| path.ends_with(end));
            let target = target.map(|(_, target)| target).unwrap_or_default();
            return scripted(Script::Redirect(target));
        }
        Some(script) => return scripted(script),
        None => {}
    }
    truthful(&content, address, &seen)
}

fn scripted(script: Script) -> Response {
    match script {
        Script::Status(status, headers) => {
            let mut response = plain(status, "scripted");
            for (name, value) in headers {
                if let (Ok(name), Ok(value)) = (name.parse::<http::HeaderName>(), value.parse()) {
                    response.headers_mut().insert(name, value);
                }
            }
            response
        }
        Script::Trickle(pause) => {
            let drops = stream::unfold((), move |()| async move {
                tokio::time::sleep(pause).await;
                Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), ()))
            });
            Response::new(Body::from_stream(drops))
        }
        Script::Oversized(size) => {
            let chunk = Bytes::from(vec![b' '; 64 * 1024]);
            let chunks = (0..size.div_ceil(chunk.len()))
                .map(move |_| Ok::<_, std::io::Error>(chunk.clone()));
            Response::new(Body::from_stream(stream::iter(chunks)))
        }
        Script::Stall(size) => {
            let chunk = Bytes::from(vec![b' '; 64 * 1024]);
            let chunks = (0..size.div_ceil(chunk.len()))
                .map(move |_| Ok::<_, std::io::Error>(chunk.clone()));
            let chunks = stream::iter(chunks).chain(stream::pending());
            Response::new(Body::from_stream(chunks))
        }
        Script::OtherContent(bytes) => Response::new(Body::from(bytes)),
        Script::Packed(bytes) => {
            let mut response = Response::new(Body::from(bytes));
            let gzip = http::HeaderValue::from_static("gzip");
            response
                .headers_mut()
                .insert(header::CONTENT_ENCODING, gzip);
            response
        }
        Script::Redirect(to) => {
            let mut response = plain(307, "");
            if let Ok(to) = to.parse() {
                response.headers_mut().insert(header::LOCATION, to);
            }
            response
        }
        Script::CutShort => {
            let parts = stream::iter([
                Ok(Bytes::from_static(b"{\"schemaVersion\":")),
                Err(std::io::Error::other("cut")),
            ]);
            let mut response = Response::new(Body::from_stream(parts));
            response
                .headers_mut()
                .insert(header::CONTENT_LENGTH, 1000.into());
            response
        }
        Script::Slow(_)
        | Script::Hang
        | Script::OtherDigest(_)
        | Script::NoDigestHeader
        | Script::SlowRedirect(..)
        | Script::Authorized(..) => plain(500, "unreachable"),
    }
}

fn truthful(content: &Mutex<Content>, address: SocketAddr, seen: &Seen) -> Response {
    let mut content = lock(content);
    if seen.path.starts_with("/token") {
        return token(&mut content, seen);
    }
    let path = seen.path.split('?').next().unwrap_or_default();
    let Some(path) = path.strip_prefix("/v2/") else {
        return plain(404, "not found");
    };
    if let Some(refusal) = refuse(&content, address, seen, path) {
        return refusal;
    }
    let content = &*content;
    for (part, held) in [
        ("/manifests/", &content.manifests),
        ("/blobs/", &content.blobs),
        ("/referrers/", &content.referrers),
    ] {
        if let Some((repository, name)) = path.split_once(part) {
            if part == "/referrers/" && content.referrers_in_pages {
                return referrers_page(content, seen, repository, name);
            }
            return match held.get(&(repository.to_owned(), name.to_owned())) {
                Some(blob) => send(blob, seen.method == "HEAD"),
                None => plain(404, "{\"errors\":[{\"code\":\"MANIFEST_UNKNOWN\"}]}"),
            };
        }
    }
    plain(404, "not found")
}

/// The artifact after the one that `last` counts, in an index of its own.
fn referrers_page(content: &Content, seen: &Seen, repository: &str, digest: &str) -> Response {
    let key = (repository.to_owned(), digest.to_owned());
    let Some(blob) = content.referrers.get(&key) else {
        return plain(404, "not found");
    };
    let (_, query) = seen.path.split_once('?').unwrap_or_default();
    let last = query.split('&').find_map(|one| one.strip_prefix("last="));
    let at: usize = last.and_then(|last| last.parse().ok()).unwrap_or_default();
    let mut index: serde_json::Value = serde_json::from_slice(&blob.bytes).unwrap_or_default();
    let Some(all) = index
        .get_mut("manifests")
        .and_then(|all| all.as_array_mut())
    else {
        return plain(500, "no index");
    };
    let count = all.len();
    *all = all.iter().skip(at).take(1).cloned().collect();
    let mut response = plain(200, &index.to_string());
    if at + 1 < count {
        let next = format!(
            "</v2/elsewhere/referrers/{digest}?n=1&last={}>; rel=\"next\"",
            at + 1
        );
        if let Ok(next) = next.parse() {
            response.headers_mut().insert(header::LINK, next);
        }
    }
    response
}

fn token(content: &mut Content, seen: &Seen) -> Response {
    if let Some(Auth::Bearer(Some((user, password)))) = &content.auth
        && seen.authorization.as_deref() != Some(&basic(user, password))
    {
        return plain(401, "wrong user or password");
    }
    let token = format!("token-{}", content.tokens.len() + 1);
    content.tokens.push(token.clone());
    let life = content
        .token_life
        .map_or(String::new(), |life| format!(",\"expires_in\":{life}"));
    plain(200, &format!("{{\"token\":\"{token}\"{life}}}"))
}

fn refuse(content: &Content, address: SocketAddr, seen: &Seen, path: &str) -> Option<Response> {
    let given = seen.authorization.as_deref().unwrap_or_default();
    let challenge = match content.auth.as_ref()? {
        Auth::Basic(user, password) => {
            if given == basic(user, password) {
                return None;
            }
            "Basic realm=\"fake\"".to_owned()
        }
        Auth::Bearer(_) => {
            let token = given.strip_prefix("Bearer ").unwrap_or_default();
            if content.tokens.iter().any(|known| known == token) {
                return None;
            }
            let repository = path.split("/manifests/").next().unwrap_or_default();
            let repository = repository.split("/blobs/").next().unwrap_or_default();
            format!(
                "Bearer scope=\"repository:{repository}:pull\",service=\"fake\",realm=\"http://{address}/token\""
            )
        }
    };
    let mut response = plain(401, "unauthorized");
    if let Ok(challenge) = challenge.parse() {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, challenge);
    }
    Some(response)
}

fn basic(user: &str, password: &str) -> String {
    const TABLE: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("Basic ");
    for chunk in format!("{user}:{password}").as_bytes().chunks(3) {
        let bits = chunk
            .iter()
            .fold(0_u32, |bits, byte| (bits << 8) | u32::from(*byte));
        let bits = bits << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let index = usize::try_from((bits >> (18 - 6 * place)) & 63).unwrap_or_default();
            let letter = TABLE.get(index).copied().unwrap_or(b'=');
            text.push(if place <= chunk.len() {
                char::from(letter)
            } else {
                '='
            });
        }
    }
    text
}

fn send(blob: &Blob, head: bool) -> Response {
    let body = if head {
        Body::empty()
    } else {
        Body::from(blob.bytes.clone())
    };
    let mut response = Response::new(body);
    let headers: &mut HeaderMap = response.headers_mut();
    if let Ok(value) = blob.media_type.parse() {
        headers.insert(header::CONTENT_TYPE, value);
    }
    if let Ok(value) = blob.digest.parse() {
        headers.insert("docker-content-digest", value);
    }
    headers.insert(header::CONTENT_LENGTH, blob.bytes.len().into());
    response
}

fn plain(status: u16, text: &str) -> Response {
    let mut response = Response::new(Body::from(text.to_owned()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::IM_A_TEAPOT);
    response
}
