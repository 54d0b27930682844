//! `AdmissionReview` of `admission.k8s.io/v1`: what the API server asks, and what it is answered. Only
//! what is read is parsed, the object straight into its slim type.

use std::{fmt, marker::PhantomData};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Map, Value, json};

use crate::cluster::patch::JsonPatch;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// Of one warning, in bytes: the API server cuts longer ones (`k8s.io/apiserver`, `warning`).
const MAX_WARNING: usize = 256;

/// A question, as it comes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Review<K> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<Request<K>>,
}

/// What is asked for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request<K> {
    /// Of this question.
    pub(super) uid: String,
    #[serde(default)]
    resource: Resource,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    operation: String,
    /// Where the object is; empty when that is nowhere.
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default = "Option::default")]
    object: Option<Object<K>>,
}

/// A JSON object. serde takes a list for a struct, too.
#[derive(Debug)]
struct Object<K>(K);

impl<'de, K: Deserialize<'de>> Deserialize<'de> for Object<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyMaps<K>(PhantomData<K>);

        impl<'de, K: Deserialize<'de>> Visitor<'de> for OnlyMaps<K> {
            type Value = Object<K>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<K>, A::Error> {
                K::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(OnlyMaps(PhantomData))
    }
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Resource {
    group: String,
    version: String,
    #[serde(rename = "resource")]
    plural: String,
}

/// Which questions a path answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    pub(super) operations: &'static [&'static str],
}

/// A question that is none of ours. These are answered with 400.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewError {
    #[error("the body is no AdmissionReview: {0}")]
    Malformed(String),
    #[error("the body is a {kind:?} of {version:?}, not an {KIND} of {API_VERSION}")]
    Kind { kind: String, version: String },
    #[error("the AdmissionReview has no request")]
    NoRequest,
    #[error("the request has no uid")]
    NoUid,
    #[error("the request is about {0}, which this path does not answer")]
    Unexpected(String),
    #[error("the request has no object")]
    NoObject,
}

/// An answer.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Why the object is refused; `None`: it is not.
    pub(super) refused: Option<String>,
    /// What is changed in it.
    pub(super) patch: Option<JsonPatch>,
    /// What its author is told.
    pub(super) warnings: Vec<String>,
}

impl<K> Review<K> {
    /// The request and its object, if it is what this path is for.
    pub(super) fn open(self, expected: &Expected) -> Result<(Request<K>, K), ReviewError> {
        if self.api_version != API_VERSION || self.kind != KIND {
            let (kind, version) = (short(self.kind), short(self.api_version));
            return Err(ReviewError::Kind { kind, version });
        }
        let mut request = self.request.ok_or(ReviewError::NoRequest)?;
        if request.uid.is_empty() {
            return Err(ReviewError::NoUid);
        }
        let Resource {
            group,
            version,
            plural,
        } = &request.resource;
        let known = group == expected.group && version == "v1" && plural == expected.resource;
        let operation = request.operation.as_str();
        if !known || !request.sub_resource.is_empty() || !expected.operations.contains(&operation) {
            let sub = &request.sub_resource;
            let what = format!("{operation} of {group}/{version} {plural}/{sub}");
            return Err(ReviewError::Unexpected(short(what)));
        }
        let Object(object) = request.object.take().ok_or(ReviewError::NoObject)?;
        Ok((request, object))
    }
}

impl From<serde_json::Error> for ReviewError {
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed(short(error.to_string()))
    }
}

/// What a stranger says is not repeated at length.
fn short(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(100));
    text
}

impl Answer {
    /// The object as it is, with a word to its author.
    pub(super) fn warn(&mut self, warning: &str) {
        // A header cannot carry control characters.
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

    /// As the API server expects it.
    pub(super) fn into_body(self, uid: &str) -> Vec<u8> {
        let mut response = Map::new();
        let mut set = |field: &str, value: Value| response.insert(field.to_owned(), value);
        set("uid", json!(uid));
        set("allowed", json!(self.refused.is_none()));
        if let Some(message) = self.refused {
            let status = json!({ "code": 403, "reason": "Forbidden", "message": message });
            set("status", status);
        }
        if let Some(patch) = self.patch {
            let patch = STANDARD.encode(patch.into_operations().to_string());
            set("patchType", json!("JSONPatch"));
            set("patch", json!(patch));
        }
        if !self.warnings.is_empty() {
            set("warnings", json!(self.warnings));
        }
        let review = json!({ "apiVersion": API_VERSION, "kind": KIND, "response": response });
        review.to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests;
