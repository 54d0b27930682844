//! An API server for tests, in process and without sockets, so that tests can use Tokio's paused
//! clock. Stores objects, applies JSON patches, serves watches, and answers as scripted. Records
//! every call except watches, with its virtual time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    convert::Infallible,
    fmt,
    sync::Arc,
    time::Duration,
};

use axum::body::Body;
use futures::{StreamExt, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::Client;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};
use tower::Layer;

use crate::cluster::api::{ApiClient, PageLimitLayer};

/// How long a test waits for a condition, in virtual time.
const DEADLINE: Duration = Duration::from_hours(1);

#[derive(Clone, Debug)]
pub(crate) struct RecordedCall {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

/// For example `PATCH /api/v1/nodes/a`.
impl fmt::Display for RecordedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}

/// A scripted answer.
#[derive(Clone, Debug)]
pub(crate) enum ScriptedResponse {
    /// A `Status` with this code, message and details.
    Status(u16, &'static str, Value),
    /// Plain text with a `Retry-After`, as when the API server has too many requests in flight.
    RetryAfter(u16, u64),
    /// 200 with this body.
    Body(Value),
    /// The call is executed, but its answer never arrives.
    Lost,
    /// The call is executed, but watches do not see it.
    Unwatched,
    /// No answer, and the call is not executed.
    Silence,
    /// The call is executed after this delay.
    Slow(Duration),
    /// The connection breaks.
    Broken,
}

type Watchers = Vec<mpsc::UnboundedSender<Value>>;

#[derive(Default)]
struct State {
    calls: Vec<RecordedCall>,
    /// By path.
    objects: BTreeMap<String, Value>,
    version: u64,
    /// By path of the collection.
    watchers: HashMap<String, Watchers>,
    /// By method and path.
    script: HashMap<String, VecDeque<ScriptedResponse>>,
    /// Wakes tests when a call has been answered.
    answered: Arc<Notify>,
}

/// The server. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct ScriptedApi(Arc<Mutex<State>>);

/// The path of the collection over all namespaces.
fn collection(path: &str) -> String {
    let (folder, _) = path.rsplit_once('/').unwrap();
    let parts: Vec<&str> = folder.split('/').collect();
    match parts.iter().position(|part| *part == "namespaces") {
        // `/api/v1/namespaces/ns/pods`, but not `/api/v1/namespaces`.
        Some(at) if at + 2 < parts.len() => [&parts[..at], &parts[at + 2..]].concat().join("/"),
        _ => folder.to_owned(),
    }
}

impl ScriptedApi {
    /// A client of this server.
    pub(crate) fn client(&self) -> ApiClient {
        let server = self.clone();
        let service = tower::service_fn(move |request| {
            let server = server.clone();
            async move { server.serve(request).await }
        });
        let service = PageLimitLayer.layer(service);
        ApiClient::new(Client::new(service, "default"))
    }

    /// Creates or replaces an object and notifies watches.
    pub(crate) fn put(&self, path: &str, mut object: Value) {
        let mut state = self.0.lock();
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let known = state.objects.insert(path.to_owned(), object.clone());
        let kind = if known.is_some() { "MODIFIED" } else { "ADDED" };
        state.notify(path, json!({ "type": kind, "object": object }));
    }

    /// Deletes an object and notifies watches.
    pub(crate) fn delete(&self, path: &str) -> Option<Value> {
        let mut state = self.0.lock();
        let object = state.objects.remove(path)?;
        state.notify(path, json!({ "type": "DELETED", "object": object }));
        Some(object)
    }

    /// The current object.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.0.lock().objects.get(path).cloned()
    }

    /// Ends the watches of a collection with 410, so that clients list again.
    pub(crate) fn expire(&self, collection: &str) {
        let gone = json!({ "type": "ERROR", "object": {
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "reason": "Expired", "message": "too old", "code": 410,
        }});
        let watchers = self.0.lock().watchers.remove(collection);
        for watcher in watchers.into_iter().flatten() {
            let _ = watcher.send(gone.clone());
        }
    }

    /// Scripts the next answers to a call (`PATCH /api/v1/nodes/a`). Later calls are executed.
    pub(crate) fn script(&self, call: &str, answers: impl IntoIterator<Item = ScriptedResponse>) {
        let mut state = self.0.lock();
        let script = state.script.entry(call.to_owned()).or_default();
        script.extend(answers);
    }

    /// Calls so far whose text begins with one of `beginnings`.
    pub(crate) fn calls(&self, beginnings: &[&str]) -> Vec<RecordedCall> {
        let state = self.0.lock();
        let wanted = |call: &&RecordedCall| {
            let text = call.to_string();
            beginnings.iter().any(|start| text.starts_with(start))
        };
        state.calls.iter().filter(wanted).cloned().collect()
    }

    /// Waits until there are `count` calls whose text begins with `beginning`, and returns them.
    pub(crate) async fn wait_for(&self, beginning: &str, count: usize) -> Vec<RecordedCall> {
        self.until(&format!("{count} of {beginning}"), || {
            let calls = self.calls(&[beginning]);
            (calls.len() >= count).then_some(calls)
        })
        .await
    }

    /// Waits until `look` returns something.
    pub(crate) async fn until<T>(&self, what: &str, look: impl Fn() -> Option<T>) -> T {
        let answered = self.0.lock().answered.clone();
        let search = async {
            loop {
                let next = answered.notified();
                if let Some(found) = look() {
                    return found;
                }
                // Some tests wait for state that changes without a call.
                let _ = tokio::time::timeout(Duration::from_millis(100), next).await;
                // The client still has to read the answer.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let found = tokio::time::timeout(DEADLINE, search).await;
        found.unwrap_or_else(|_| {
            let calls: Vec<String> = self.calls(&[""]).iter().map(ToString::to_string).collect();
            panic!("waited for {what}; calls were:\n{}", calls.join("\n"))
        })
    }

    async fn serve(
        &self,
        request: Request<kube::client::Body>,
    ) -> Result<Response<Body>, std::io::Error> {
        let (head, body) = request.into_parts();
        let (path, query) = (
            head.uri.path().to_owned(),
            head.uri.query().unwrap_or_default().to_owned(),
        );
        if query.contains("watch=true") {
            let unbound = query.contains("fieldSelector=spec.nodeName%3D&")
                || query.ends_with("fieldSelector=spec.nodeName%3D");
            return Ok(self.watch(&path, unbound));
        }
        let body = body.collect().await.expect("a whole body").to_bytes();
        let call = RecordedCall {
            method: head.method,
            path,
            query,
            body: serde_json::from_slice(&body).unwrap_or_default(),
            at: Instant::now(),
        };
        let scripted = {
            let mut state = self.0.lock();
            state.calls.push(call.clone());
            let script = state.script.get_mut(&call.to_string());
            script.and_then(VecDeque::pop_front)
        };
        let answer = self.answer(scripted, &call).await;
        self.0.lock().answered.notify_waiters();
        answer
    }

    async fn answer(
        &self,
        scripted: Option<ScriptedResponse>,
        call: &RecordedCall,
    ) -> Result<Response<Body>, std::io::Error> {
        match scripted {
            None => Ok(self.carry_out(call, true)),
            Some(ScriptedResponse::Status(code, message, details)) => {
                Ok(status(code, message, &details))
            }
            Some(ScriptedResponse::RetryAfter(code, seconds)) => Ok(Response::builder()
                .status(code)
                .header("Retry-After", seconds)
                .body(Body::from("Too many requests, please try again later.\n"))
                .unwrap()),
            Some(ScriptedResponse::Body(body)) => Ok(json_body(&body)),
            Some(ScriptedResponse::Unwatched) => Ok(self.carry_out(call, false)),
            Some(ScriptedResponse::Lost) => {
                let _ = self.carry_out(call, true);
                std::future::pending().await
            }
            Some(ScriptedResponse::Slow(time)) => {
                tokio::time::sleep(time).await;
                Ok(self.carry_out(call, true))
            }
            Some(ScriptedResponse::Silence) => std::future::pending().await,
            Some(ScriptedResponse::Broken) => Err(std::io::Error::other("connection reset")),
        }
    }

    fn carry_out(&self, call: &RecordedCall, is_watched: bool) -> Response<Body> {
        let path = &call.path;
        match call.method {
            Method::POST if path.ends_with("/selfsubjectaccessreviews") => {
                json_body(&json!({ "spec": {}, "status": { "allowed": true } }))
            }
            Method::POST if path.ends_with("/eviction") => {
                self.delete(path.strip_suffix("/eviction").unwrap());
                status(201, "", &Value::Null)
            }
            Method::POST => {
                let name = call.body["metadata"]["name"].as_str().unwrap().to_owned();
                let path = format!("{path}/{name}");
                if self.get(&path).is_some() {
                    return status(409, "already exists", &Value::Null);
                }
                self.put(&path, call.body.clone());
                json_body(&call.body)
            }
            Method::GET if path == "/version" => json_body(&json!({})),
            Method::GET => match self.get(path) {
                Some(object) => json_body(&object),
                None if call.query.contains("fieldSelector=") || call.query.contains("limit=") => {
                    self.list(path, node_of(&call.query))
                }
                None => status(404, "not found", &Value::Null),
            },
            Method::PATCH => {
                // A patch of the subresource `scale` changes the object's `spec.replicas`.
                let path = path.strip_suffix("/scale").unwrap_or(path);
                let Some(mut object) = self.get(path) else {
                    return status(404, "not found", &Value::Null);
                };
                if apply(&mut object, &call.body).is_err() {
                    return status(422, "the server rejected our request", &Value::Null);
                }
                if is_watched {
                    self.put(path, object.clone());
                } else {
                    self.0
                        .lock()
                        .objects
                        .insert(path.to_owned(), object.clone());
                }
                json_body(&object)
            }
            Method::DELETE => match self.delete(path) {
                Some(object) => json_body(&object),
                None => status(404, "not found", &Value::Null),
            },
            _ => status(405, "method not allowed", &Value::Null),
        }
    }

    /// All objects, or those on a node.
    fn list(&self, path: &str, node: Option<&str>) -> Response<Body> {
        let state = self.0.lock();
        let mut items: Vec<&Value> = state.objects(path);
        items.retain(|item| node.is_none_or(|node| item["spec"]["nodeName"] == node));
        json_body(&json!({ "kind": "List", "apiVersion": "v1", "items": items,
            "metadata": { "resourceVersion": state.version.to_string() } }))
    }

    /// Streams the current objects, the bookmark that ends the list, and later changes. `unbound`:
    /// leaves out pods that have a node.
    fn watch(&self, path: &str, unbound: bool) -> Response<Body> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut state = self.0.lock();
        for object in state.objects(path) {
            let _ = sender.send(json!({ "type": "ADDED", "object": object }));
        }
        let _ = sender.send(json!({ "type": "BOOKMARK", "object": {
            "kind": "Pod", "apiVersion": "v1", "metadata": {
                "resourceVersion": state.version.to_string(),
                "annotations": { "k8s.io/initial-events-end": "true" },
            },
        }}));
        state
            .watchers
            .entry(path.to_owned())
            .or_default()
            .push(sender);
        let events = stream::unfold(receiver, move |mut receiver| async move {
            let mut event: Value = receiver.recv().await?;
            while unbound && !event["object"]["spec"]["nodeName"].is_null() {
                event = receiver.recv().await?;
            }
            Some((Ok::<_, Infallible>(format!("{event}\n")), receiver))
        });
        Response::new(Body::from_stream(events.boxed()))
    }
}

/// The node in a field selector `spec.nodeName=NODE`.
fn node_of(query: &str) -> Option<&str> {
    let (_, selector) = query.split_once("fieldSelector=spec.nodeName%3D")?;
    let node = selector.split('&').next()?;
    Some(node).filter(|node| !node.is_empty())
}

impl State {
    fn objects(&self, path: &str) -> Vec<&Value> {
        let entries = self
            .objects
            .iter()
            .filter(|(key, _)| collection(key) == path);
        entries.map(|(_, object)| object).collect()
    }

    fn notify(&mut self, path: &str, event: Value) {
        if let Some(watchers) = self.watchers.get_mut(&collection(path)) {
            watchers.retain(|watcher| watcher.send(event.clone()).is_ok());
        }
    }
}

/// Applies a JSON patch as the API server does: a `test` for null succeeds where there is nothing
/// (`evanphx/json-patch`).
fn apply(object: &mut Value, patch: &Value) -> Result<(), json_patch::PatchError> {
    for operation in patch.as_array().unwrap() {
        let path = operation["path"].as_str().unwrap();
        let is_absent = operation["op"] == "test"
            && operation["value"].is_null()
            && object.pointer(path).is_none();
        if !is_absent {
            let operation_patch: json_patch::Patch =
                serde_json::from_value(json!([operation])).unwrap();
            json_patch::patch(object, &operation_patch)?;
        }
    }
    Ok(())
}

fn json_body(body: &Value) -> Response<Body> {
    Response::new(Body::from(body.to_string()))
}

fn status(code: u16, message: &str, details: &Value) -> Response<Body> {
    let outcome = if code < 400 { "Success" } else { "Failure" };
    let body = json!({ "kind": "Status", "apiVersion": "v1", "status": outcome,
        "message": message, "code": code, "details": details });
    let mut response = json_body(&body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}
