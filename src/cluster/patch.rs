//! JSON patches, guarded: each is applied only if the fields on which it relies are unchanged. Only
//! [`replicas`], [`event_series`] and the webhook's patches have no guard.
//!
//! Tolerations and taints are atomic lists without a merge key, so any other kind of patch would
//! replace the whole list. Appended tolerations require an unchanged list; an appended taint does
//! not conflict with other appended taints. `test` operations prevent a patch from being applied
//! twice, or to another object of the same name. Patches of nodes do not test `resourceVersion`,
//! because it changes with every update of the status.

pub mod pod;

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Secret,
        events::v1::EventSeries,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::placement::{
    annotation, daemon_set,
    node::{self, Ownership},
};

use super::objects::{DaemonSet, MutatingWebhookConfiguration, Node};

/// The operations of one patch.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonPatch {
    operations: Vec<Value>,
    /// Whether it has tests.
    is_guarded: bool,
}

impl JsonPatch {
    /// An empty patch that applies only to the object with this uid.
    fn for_object(metadata: &ObjectMeta) -> Self {
        let mut patch = Self {
            operations: Vec::new(),
            is_guarded: true,
        };
        if let Some(uid) = &metadata.uid {
            patch.test("/metadata/uid", uid);
        }
        patch
    }

    /// An empty patch that gets no tests: see [`JsonPatch::unguarded`].
    fn without_guard() -> Self {
        Self {
            operations: Vec::new(),
            is_guarded: false,
        }
    }

    fn push(&mut self, op: &str, path: &str, value: Value) {
        self.operations
            .push(json!({ "op": op, "path": path, "value": value }));
    }

    /// Adds a `test`. The API server compares JSON texts (`evanphx/json-patch`), and Go escapes
    /// `&`, `<` and `>` in them, so a test of a value with these characters never succeeds. Such a
    /// test is left out; the other tests remain.
    fn test(&mut self, path: &str, value: impl Serialize) {
        if !self.is_guarded {
            return;
        }
        let value = json!(value);
        if !value
            .to_string()
            .contains(['&', '<', '>', '\u{2028}', '\u{2029}'])
        {
            self.push("test", path, value);
        }
    }

    fn copy(&mut self, from: &str, path: &str) {
        self.operations
            .push(json!({ "op": "copy", "from": from, "path": path }));
    }

    fn add(&mut self, path: &str, value: Value) {
        self.push("add", path, value);
    }

    fn remove(&mut self, path: &str) {
        self.operations
            .push(json!({ "op": "remove", "path": path }));
    }

    /// Appends to a list, if it is unchanged. A missing list passes a test for null.
    fn append(&mut self, path: &str, seen: Option<&Vec<Value>>, values: Vec<Value>) {
        self.test(path, seen);
        self.append_unguarded(path, seen.is_some(), values);
    }

    fn append_unguarded(&mut self, path: &str, exists: bool, values: Vec<Value>) {
        if exists {
            for value in values {
                self.add(&format!("{path}/-"), value);
            }
        } else if !values.is_empty() {
            self.add(path, Value::Array(values));
        }
    }

    /// Sets or removes annotations, if their values are unchanged.
    fn annotate(&mut self, metadata: &ObjectMeta, values: &[(&str, Option<&str>)]) {
        let Some(annotations) = &metadata.annotations else {
            let new: BTreeMap<_, _> = values
                .iter()
                .filter_map(|(n, v)| Some((n, (*v)?)))
                .collect();
            if !new.is_empty() {
                self.test("/metadata/annotations", Value::Null);
                self.add("/metadata/annotations", json!(new));
            }
            return;
        };
        for (name, value) in values {
            let path = format!("/metadata/annotations/{}", escape(name));
            let seen = annotations.get(*name);
            self.test(&path, seen);
            match value {
                Some(value) => self.add(&path, json!(value)),
                None if seen.is_some() => self.remove(&path),
                None => {}
            }
        }
    }

    /// Removes the tests, for the webhook: it patches exactly the object that it received, and a
    /// failing test would reject the object whatever the `failurePolicy`.
    #[must_use]
    pub fn unguarded(mut self) -> Self {
        self.operations.retain(|operation| !is_test(operation));
        self.is_guarded = false;
        self
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.operations.iter().all(is_test)
    }

    /// The operations as JSON.
    pub fn into_operations(self) -> Value {
        Value::Array(self.operations)
    }
}

/// Escapes a key for a JSON pointer (RFC 6901).
fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

fn is_test(operation: &Value) -> bool {
    operation.get("op").is_some_and(|op| op == "test")
}

/// Changes the taint of a node and the annotation that records it.
pub fn node(node: &Node, change: node::NodeChange) -> JsonPatch {
    const TAINTS: &str = "/spec/taints";
    let mut patch = JsonPatch::for_object(&node.metadata);
    let exists = node.spec.taints.is_some();
    match change.ownership {
        Some(Ownership::Of(taint)) => {
            patch.annotate(
                &node.metadata,
                &[(annotation::TAINT, Some(&taint.to_string()))],
            );
        }
        Some(Ownership::Nothing) => patch.annotate(&node.metadata, &[(annotation::TAINT, None)]),
        // The decision depends on the annotation, so its value is tested.
        None => {
            let seen = node
                .metadata
                .annotations
                .as_ref()
                .and_then(|annotations| annotations.get(annotation::TAINT));
            if let Some(seen) = seen {
                patch.annotate(&node.metadata, &[(annotation::TAINT, Some(seen))]);
            }
        }
    }
    if let Some((index, taint)) = change.correct {
        patch.test(&format!("{TAINTS}/{index}/key"), &taint.kind.key);
        patch.test(
            &format!("{TAINTS}/{index}/effect"),
            json!(taint.kind.effect),
        );
        patch.add(&format!("{TAINTS}/{index}/value"), json!(taint.value));
    }
    if let Some((index, taint)) = change.remove {
        let value = (!taint.value.is_empty()).then_some(taint.value);
        patch.test(&format!("{TAINTS}/{index}/key"), &taint.kind.key);
        patch.test(
            &format!("{TAINTS}/{index}/effect"),
            json!(taint.kind.effect),
        );
        patch.test(&format!("{TAINTS}/{index}/value"), &value);
        patch.remove(&format!("{TAINTS}/{index}"));
    }
    if let Some(taint) = change.add {
        // The API server rejects a second taint with the same key and effect, so the list needs no
        // guard.
        if !exists {
            patch.test(TAINTS, Value::Null);
        }
        patch.append_unguarded(TAINTS, exists, vec![taint.to_json()]);
    }
    patch
}

/// Changes the tolerations of a DaemonSet's template and the annotation that records them.
pub fn daemon_set(set: &DaemonSet, change: daemon_set::TemplateChange) -> JsonPatch {
    const TOLERATIONS: &str = "/spec/template/spec/tolerations";
    let mut patch = JsonPatch::for_object(&set.metadata);
    // `generation` changes with the spec, and so with the images that archaware decided about, but
    // not with the status.
    if let Some(generation) = set.metadata.generation {
        patch.test("/metadata/generation", generation);
    }
    let seen = set.spec.template.spec.tolerations.as_ref();
    patch.test(TOLERATIONS, seen);
    for index in change.remove {
        patch.remove(&format!("{TOLERATIONS}/{index}"));
    }
    patch.append_unguarded(TOLERATIONS, seen.is_some(), change.add);
    let record = change.record.and_then(|record| record.to_annotation());
    patch.annotate(
        &set.metadata,
        &[(annotation::TOLERATIONS, record.as_deref())],
    );
    patch
}

/// Sets and removes fields of a Secret, if these fields are unchanged.
pub fn secret(secret: &Secret, fields: &BTreeMap<&str, Option<&str>>) -> JsonPatch {
    let mut patch = JsonPatch::for_object(&secret.metadata);
    let Some(data) = &secret.data else {
        patch.test("/data", Value::Null);
        let new = fields
            .iter()
            .filter_map(|(name, text)| Some((name, bytes((*text)?))));
        patch.add("/data", json!(new.collect::<BTreeMap<_, _>>()));
        return patch;
    };
    for (name, text) in fields {
        let path = format!("/data/{name}");
        let seen = data.get(*name);
        patch.test(&path, seen);
        match text {
            Some(text) => patch.add(&path, json!(bytes(text))),
            None if seen.is_some() => patch.remove(&path),
            None => {}
        }
    }
    patch
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

/// Replaces the webhooks of a configuration, if the configuration is unchanged.
pub fn webhooks(found: &MutatingWebhookConfiguration, webhooks: Vec<Value>) -> JsonPatch {
    let mut patch = JsonPatch::for_object(&found.metadata);
    // The configuration changes rarely, so `resourceVersion` is a good guard here.
    let version = &found.metadata.resource_version;
    patch.test("/metadata/resourceVersion", version);
    patch.add("/webhooks", json!(webhooks));
    patch
}

/// Sets the `caBundle` (base64) of webhooks that have another `caBundle`.
pub fn ca_bundle(found: &MutatingWebhookConfiguration, bundle: &str) -> JsonPatch {
    let mut patch = JsonPatch::for_object(&found.metadata);
    for (index, webhook) in found.webhooks.iter().flatten().enumerate() {
        let current_bundle = webhook
            .pointer("/clientConfig/caBundle")
            .and_then(Value::as_str);
        if current_bundle != Some(bundle) {
            patch.test(
                &format!("/webhooks/{index}/name"),
                json!(webhook.get("name")),
            );
            patch.add(
                &format!("/webhooks/{index}/clientConfig/caBundle"),
                json!(bundle),
            );
        }
    }
    patch
}

/// Updates a Lease and, unless `memory` is `None`, its stored data, if the Lease is unchanged. Only
/// holders write a Lease, so `resourceVersion` is a good guard.
pub fn lease(seen: &Lease, record: &LeaseSpec, memory: Option<&str>) -> JsonPatch {
    let mut patch = JsonPatch::for_object(&seen.metadata);
    let version = &seen.metadata.resource_version;
    patch.test("/metadata/resourceVersion", version);
    patch.add("/spec", json!(record));
    if let Some(memory) = memory {
        patch.annotate(&seen.metadata, &[(annotation::STATE, Some(memory))]);
    }
    patch
}

/// Continues the series of an event, without a guard: only archaware writes its events.
pub fn event_series(series: &EventSeries) -> JsonPatch {
    let mut patch = JsonPatch::without_guard();
    patch.add("/series", json!(series));
    patch
}

/// Scales a Deployment.
pub fn replicas(count: u32) -> JsonPatch {
    let mut patch = JsonPatch::without_guard();
    patch.add("/spec/replicas", json!(count));
    patch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(annotations: Option<&[(&str, &str)]>) -> ObjectMeta {
        ObjectMeta {
            uid: Some("u".to_owned()),
            annotations: annotations.map(|pairs| {
                pairs
                    .iter()
                    .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                    .collect()
            }),
            ..ObjectMeta::default()
        }
    }

    /// `evanphx/json-patch` compares texts in which Go has escaped these characters.
    #[test]
    fn a_guard_that_can_never_hold_is_not_sent() {
        let mut patch = JsonPatch::for_object(&ObjectMeta::default());
        for value in ["a&b", "a<b", "a>b", "a\u{2028}b", "plain"] {
            patch.test("/a", json!({ "b": value }));
        }
        let sent = patch.into_operations();
        assert_eq!(
            sent,
            json!([{"op": "test", "path": "/a", "value": {"b": "plain"}}])
        );
    }

    #[test]
    fn a_node_whose_taint_moves() {
        let old = "old=arm64:NoSchedule";
        let subject = Node {
            metadata: metadata(Some(&[(annotation::TAINT, old)])),
            spec: super::super::objects::NodeSpec {
                taints: Some(vec![json!({"key": "old"})]),
            },
            ..Node::default()
        };
        let new: crate::placement::Taint = "new=arm64:NoSchedule".parse().unwrap();
        let change = node::NodeChange {
            remove: Some((0, old.parse().unwrap())),
            add: Some(new.clone()),
            ownership: Some(Ownership::Of(new)),
            correct: None,
        };
        assert_eq!(
            node(&subject, change).into_operations(),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u"},
                {"op": "test", "path": "/metadata/annotations/archaware.dev~1taint", "value": old},
                {"op": "add", "path": "/metadata/annotations/archaware.dev~1taint", "value": "new=arm64:NoSchedule"},
                {"op": "test", "path": "/spec/taints/0/key", "value": "old"},
                {"op": "test", "path": "/spec/taints/0/effect", "value": "NoSchedule"},
                {"op": "test", "path": "/spec/taints/0/value", "value": "arm64"},
                {"op": "remove", "path": "/spec/taints/0"},
                {"op": "add", "path": "/spec/taints/-", "value": {"key": "new", "value": "arm64", "effect": "NoSchedule"}},
            ])
        );
    }
}
