//! `AdmissionReview` of `admission.k8s.io/v1`. Only the fields that archaware needs are parsed. The
//! object is parsed directly into its slim type.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{cluster::patch::JsonPatch, json::Object};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// Maximum bytes of a warning; the API server truncates longer warnings (`k8s.io/apiserver`,
/// `warning`).
const MAX_WARNING: usize = 256;

/// A request as received.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Review<K> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<AdmissionRequest<K>>,
}

/// The `request` of a review.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionRequest<K> {
    /// Repeated in the response.
    pub(super) uid: String,
    #[serde(default)]
    resource: ResourceName,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    operation: String,
    /// Namespace of the object; empty for kinds without namespaces.
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default = "Option::default")]
    object: Option<Object<K>>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct ResourceName {
    group: String,
    version: String,
    #[serde(rename = "resource")]
    plural: String,
}

/// The requests that a path accepts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    pub(super) operations: &'static [&'static str],
}

/// An invalid request, answered with 400.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidReview {
    #[error("the body is not an AdmissionReview: {0}")]
    Malformed(String),
    #[error("the body is a {kind:?} of {version:?}, not an {KIND} of {API_VERSION}")]
    Kind { kind: String, version: String },
    #[error("the AdmissionReview has no request")]
    NoRequest,
    #[error("the request has no uid")]
    NoUid,
    #[error("this path does not accept {0}")]
    Unexpected(String),
    #[error("the request has no object")]
    NoObject,
}

#[derive(Debug, Default)]
pub(super) struct AdmissionResponse {
    /// The reason for rejecting the object; `None` if it is admitted.
    pub(super) refused: Option<String>,
    /// The patch of the object.
    pub(super) patch: Option<JsonPatch>,
    /// Warnings for the user who sent the request.
    pub(super) warnings: Vec<String>,
}

impl<K> Review<K> {
    /// The request and its object, if this path accepts them.
    pub(super) fn open(
        self,
        expected: &Expected,
    ) -> Result<(AdmissionRequest<K>, K), InvalidReview> {
        if self.api_version != API_VERSION || self.kind != KIND {
            let (kind, version) = (short(self.kind), short(self.api_version));
            return Err(InvalidReview::Kind { kind, version });
        }
        let mut request = self.request.ok_or(InvalidReview::NoRequest)?;
        if request.uid.is_empty() {
            return Err(InvalidReview::NoUid);
        }
        let ResourceName {
            group,
            version,
            plural,
        } = &request.resource;
        let known = group == expected.group && version == "v1" && plural == expected.resource;
        let operation = request.operation.as_str();
        if !known || !request.sub_resource.is_empty() || !expected.operations.contains(&operation) {
            let sub = &request.sub_resource;
            let what = format!("{operation} of {group}/{version} {plural}/{sub}");
            return Err(InvalidReview::Unexpected(short(what)));
        }
        let Object(object) = request.object.take().ok_or(InvalidReview::NoObject)?;
        Ok((request, object))
    }
}

impl From<serde_json::Error> for InvalidReview {
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed(short(error.to_string()))
    }
}

/// Truncates text of an unauthenticated client.
fn short(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(100));
    text
}

impl AdmissionResponse {
    /// Adds a warning.
    pub(super) fn warn(&mut self, warning: &str) {
        // A header cannot contain control characters.
        let mut text: String = format!("archaware: {warning}")
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if text.len() > MAX_WARNING {
            text.truncate(text.floor_char_boundary(MAX_WARNING - '…'.len_utf8()));
            text.push('…');
        }
        self.warnings.push(text);
    }

    pub(super) fn into_body(self, uid: &str) -> Vec<u8> {
        let patch = self.patch.map(JsonPatch::into_operations);
        let patch = patch.map(|operations| STANDARD.encode(to_bytes(&operations)));
        to_bytes(&ReviewAnswer {
            api_version: API_VERSION,
            kind: KIND,
            response: Answer {
                uid,
                allowed: self.refused.is_none(),
                status: self.refused.map(
                    |message| json!({ "code": 403, "reason": "Forbidden", "message": message }),
                ),
                patch_type: patch.as_ref().map(|_| "JSONPatch"),
                patch,
                warnings: self.warnings,
            },
        })
    }
}

/// The answer is serialised for each pod, so it is not built as a `Value` first.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReviewAnswer<'a> {
    api_version: &'a str,
    kind: &'a str,
    response: Answer<'a>,
}

/// The `response` of a review.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// Serialisation cannot fail here, because all map keys are strings. `Display` would take twice as
/// long: `serde_json` checks each part for UTF-8 there.
fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
mod tests;
