//! Errors of calls to the API server. Every answer whose status is not 2xx is classified here,
//! except those of watches.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;

use crate::backoff::{Backoff, jittered};

/// Delay before the object is reconciled again, without jitter and `Retry-After`.
const REQUEUE_DELAY: Duration = Duration::from_secs(2);
/// Delays between attempts after a refusal by RBAC or an admission policy: either may be changed
/// meanwhile.
const REFUSED_BACKOFF: Backoff = Backoff::seconds(30, 600);
/// The longest `Retry-After` that is obeyed. The API server asks for seconds, but a load balancer
/// may ask for an hour during a restart of ten seconds.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(30);
/// Bytes that are shown of an answer that is not a `Status`.
const MAX_TEXT: usize = 256;

/// Why a call failed, with the API server's message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// 404: the object or its kind does not exist.
    #[error("the object or its kind does not exist: {0}")]
    NotFound(String),
    /// 409, or 422 because a `test` of a JSON patch failed: the object changed, or one of that name
    /// exists already.
    #[error("the object has changed or exists already: {0}")]
    Conflict(String),
    /// 400, 413, 415 or 422: the request is invalid. Retries fail until the object is edited.
    #[error("the API server rejects the change: {0}")]
    Invalid(String),
    /// An admission webhook or a `ValidatingAdmissionPolicy` denied the change, with any status
    /// code.
    #[error("an admission plugin denied the change: {0}")]
    Denied(String),
    /// 401: the credentials are not accepted.
    #[error("the API server does not accept the credentials: {0}")]
    Unauthorized(String),
    /// 403.
    #[error("a permission is missing: {0}")]
    Forbidden(String),
    /// 429 for an eviction that a `PodDisruptionBudget` does not allow at the moment.
    #[error("a PodDisruptionBudget does not allow the eviction now: {0}")]
    DisruptionBudget(String),
    /// 429: the API server is overloaded or limits the rate.
    #[error("the API server limits the rate of requests: {message}")]
    TooManyRequests {
        message: String,
        /// Delay that the server asked for.
        retry_after: Option<Duration>,
    },
    /// 5xx or any other code.
    #[error("the API server answered {code}: {message}")]
    Unavailable {
        /// The status code.
        code: u16,
        message: String,
        /// Delay that the server asked for.
        retry_after: Option<Duration>,
    },
    /// No connection, or a truncated answer.
    #[error("the API server cannot be reached: {0}")]
    Unreachable(String),
    /// No answer within this time.
    #[error("the API server did not answer within {} s", .0.as_secs_f32())]
    TimedOut(Duration),
    /// The answer is larger than this many bytes.
    #[error("the answer of the API server is larger than {0} bytes")]
    TooLarge(usize),
    /// The answer cannot be parsed.
    #[error("the answer of the API server is malformed: {0}")]
    Malformed(String),
    /// The name is not valid for any object. Names become part of a path, so they are checked.
    #[error("{0:?} cannot be the name of an object")]
    Name(String),
}

impl ApiError {
    /// Classifies an answer whose status is not 2xx.
    pub(super) fn classify(code: u16, retry_after: Option<Duration>, body: &[u8]) -> Self {
        // Proxies, and the API server's limit of concurrent requests, answer with plain text.
        let status = serde_json::from_slice::<Status>(body).unwrap_or_default();
        let message = status.message.unwrap_or_else(|| {
            let text = String::from_utf8_lossy(body.get(..MAX_TEXT).unwrap_or(body));
            text.trim().to_owned()
        });
        let details = status.details.unwrap_or_default();
        let causes = details.causes.unwrap_or_default();
        let has_cause = |reason: &str| {
            let mut reasons = causes.iter().filter_map(|cause| cause.reason.as_deref());
            reasons.any(|listed| listed == reason)
        };
        let retry_after = retry_after.or_else(|| {
            let seconds = u64::try_from(details.retry_after_seconds?).ok()?;
            (seconds > 0).then(|| Duration::from_secs(seconds))
        });
        // A webhook may deny with any status code, and only the message tells that it was a webhook
        // (`ToStatusErr` of `k8s.io/apiserver/pkg/admission/plugin/webhook/errors`; the plugin of
        // policies does the same).
        let denied = ["admission webhook \"", "ValidatingAdmissionPolicy '"];
        // Plugins of Kubernetes itself (PodSecurity, ResourceQuota) deny with 403, as the
        // authorizer does. Only the authorizer's message names the user (`NewForbidden` of
        // `k8s.io/apiserver/pkg/admission`, `forbiddenMessage` of `handlers/responsewriters`).
        let is_by_plugin = code == 403
            && message.contains(" is forbidden: ")
            && !message.contains(" is forbidden: User \"");
        if is_by_plugin || denied.iter().any(|by| message.contains(by)) {
            return Self::Denied(message);
        }
        match code {
            404 => Self::NotFound(message),
            409 => Self::Conflict(message),
            // A failed `test` and a rejection by validation are both 422. Only the rejection has
            // details.
            422 if causes.is_empty() && details.kind.unwrap_or_default().is_empty() => {
                Self::Conflict(message)
            }
            400 | 413 | 415 | 422 => Self::Invalid(message),
            401 => Self::Unauthorized(message),
            403 => Self::Forbidden(message),
            429 if has_cause("DisruptionBudget") => Self::DisruptionBudget(message),
            429 => Self::TooManyRequests {
                message,
                retry_after,
            },
            code => Self::Unavailable {
                code,
                message,
                retry_after,
            },
        }
    }

    /// Removes the message, which may repeat the content of an object.
    pub(super) fn without_content(self) -> Self {
        let hidden = || "(not shown, because it may contain secrets)".to_owned();
        match self {
            Self::Conflict(_) => Self::Conflict(hidden()),
            Self::Invalid(_) => Self::Invalid("the Secret may be immutable".to_owned()),
            Self::Denied(_) => Self::Denied(hidden()),
            Self::Malformed(_) => Self::Malformed(hidden()),
            Self::Unavailable {
                code, retry_after, ..
            } => Self::Unavailable {
                code,
                message: hidden(),
                retry_after,
            },
            other => other,
        }
    }

    /// The delay that the API server asked for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after, .. } | Self::Unavailable { retry_after, .. } => {
                retry_after.map(|after| after.min(MAX_RETRY_AFTER))
            }
            _ => None,
        }
    }

    /// Whether the API server understood and rejected the change. Retries fail until someone edits
    /// the object, a role or a policy.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Invalid(_)
                | Self::Denied(_)
                | Self::Unauthorized(_)
                | Self::Forbidden(_)
                | Self::Name(_)
        )
    }

    /// Whether the API server rejected the change because of its content. The other refusals reject
    /// the client, maybe only until the API server has loaded roles or the keys of tokens again.
    pub fn is_about_content(&self) -> bool {
        matches!(self, Self::Invalid(_) | Self::Denied(_) | Self::Name(_))
    }

    /// The delay before a retry, after this many refusals in a row. `None` if a retry is useless
    /// until someone edits the object: it does not exist, or its name or the patch is invalid.
    pub fn retry(&self, refusals: u32) -> Option<Duration> {
        match self {
            Self::NotFound(_) | Self::Invalid(_) | Self::Name(_) => None,
            Self::Denied(_) | Self::Unauthorized(_) | Self::Forbidden(_) => {
                Some(REFUSED_BACKOFF.delay(refusals))
            }
            // With jitter, because thousands of pods may wait for an API server that restarts.
            _ => Some(jittered(REQUEUE_DELAY) + self.retry_after().unwrap_or_default()),
        }
    }

    /// The label value in the metric of writes.
    pub(crate) fn result(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "gone",
            Self::Conflict(_) => "stale",
            Self::Invalid(_) | Self::Denied(_) | Self::Name(_) => "refused",
            Self::Unauthorized(_) | Self::Forbidden(_) => "forbidden",
            _ => "unavailable",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn classify(code: u16, body: &Value) -> ApiError {
        ApiError::classify(code, None, body.to_string().as_bytes())
    }

    fn status(message: &str, details: Value) -> Value {
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "details": details})
    }

    /// Answers of real API servers (1.36) and of proxies.
    #[test]
    fn every_answer_has_one_class() {
        let none = json!({});
        let text = || "m".to_owned();
        let field =
            json!({"kind": "Pod", "causes": [{"reason": "FieldValueInvalid", "field": "spec"}]});
        let unavailable = |code| ApiError::Unavailable {
            code,
            message: text(),
            retry_after: None,
        };
        let limited = |seconds: Option<u64>| ApiError::TooManyRequests {
            message: text(),
            retry_after: seconds.map(Duration::from_secs),
        };
        for (code, details, expected) in [
            (404, &none, ApiError::NotFound(text())),
            (409, &none, ApiError::Conflict(text())),
            // A `test` of the patch failed.
            (422, &none, ApiError::Conflict(text())),
            (422, &Value::Null, ApiError::Conflict(text())),
            // Validation rejected the change.
            (422, &field, ApiError::Invalid(text())),
            (422, &json!({"kind": "Node"}), ApiError::Invalid(text())),
            (400, &none, ApiError::Invalid(text())),
            (413, &none, ApiError::Invalid(text())),
            (415, &none, ApiError::Invalid(text())),
            (401, &none, ApiError::Unauthorized(text())),
            (403, &none, ApiError::Forbidden(text())),
            (429, &none, limited(None)),
            (429, &json!({"retryAfterSeconds": 7}), limited(Some(7))),
            (
                429,
                &json!({"causes": [{"reason": "DisruptionBudget", "message": "needs 1"}]}),
                ApiError::DisruptionBudget(text()),
            ),
            (500, &none, unavailable(500)),
            (503, &none, unavailable(503)),
            (418, &none, unavailable(418)),
            (302, &none, unavailable(302)),
        ] {
            assert_eq!(
                classify(code, &status("m", details.clone())),
                expected,
                "{code} {details}"
            );
        }
    }

    #[test]
    fn a_denial_is_one_with_any_code() {
        for (code, message) in [
            (
                403,
                "admission webhook \"a.example\" denied the request: no",
            ),
            (
                400,
                "admission webhook \"a.example\" denied the request without explanation",
            ),
            (
                429,
                "admission webhook \"a.example\" denied the request: later",
            ),
            (
                422,
                "pods \"p\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            ),
            (
                403,
                "pods \"p\" is forbidden: violates PodSecurity \"restricted:latest\": privileged",
            ),
        ] {
            let error = classify(code, &status(message, json!({})));
            assert_eq!(error, ApiError::Denied(message.to_owned()), "{code}");
            let pauses = [1, 2, 9].map(|refusals| error.retry(refusals).unwrap().as_secs());
            assert!(error.is_refusal() && pauses == [30, 60, 600]);
        }
        let unauthorized =
            "pods \"p\" is forbidden: User \"u\" cannot patch resource \"pods\" in API group \"\"";
        let error = classify(403, &status(unauthorized, json!({})));
        assert_eq!(error, ApiError::Forbidden(unauthorized.to_owned()));
    }

    #[test]
    fn the_header_counts_before_the_body_and_plain_text_is_shown_shortly() {
        let after = Some(Duration::from_secs(3));
        let text = "Too many requests, please try again later.\n";
        let error = ApiError::classify(429, after, text.as_bytes());
        assert_eq!(error.retry_after(), after);
        assert!(error.retry(0).is_some_and(|retry| Some(retry) >= after));
        assert!(error.to_string().ends_with("please try again later."));
        let page = ApiError::classify(502, None, "<html>".repeat(1000).as_bytes());
        assert!(page.to_string().len() < 2 * MAX_TEXT);
        let long = ApiError::classify(429, Some(Duration::from_hours(9)), b"");
        assert_eq!(long.retry_after(), Some(MAX_RETRY_AFTER));
    }

    #[test]
    fn what_may_be_secret_is_in_no_text() {
        let details = json!({"kind": "Secret", "causes": [{"field": "data"}]});
        for code in [400, 409, 422, 500] {
            let error = classify(
                code,
                &status("data: Invalid value: hunter2", details.clone()),
            );
            assert!(error.to_string().contains("hunter2"), "{code}");
            let error = error.without_content();
            assert!(!error.to_string().contains("hunter2"), "{code}");
        }
    }
}
