use proptest::prelude::*;
use testsupport::mutated;

use super::*;
use crate::cluster::objects::Pod;

const PODS: Expected = Expected {
    group: "",
    resource: "pods",
    operations: &["CREATE"],
};

fn open(value: &Value) -> Result<(AdmissionRequest<Pod>, Pod), InvalidReview> {
    serde_json::from_value::<Review<Pod>>(value.clone())?.open(&PODS)
}

#[test]
fn only_expected_requests_are_answered() {
    let good = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "unknown": 1,
        "request": {
            "uid": "u", "operation": "CREATE", "namespace": "ns", "dryRun": true,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"spec": {"nodeName": "n"}}, "oldObject": null,
        },
    });
    let (request, pod) = open(&good).unwrap();
    assert_eq!(
        (request.uid.as_str(), request.namespace.as_str()),
        ("u", "ns")
    );
    assert!(pod.is_bound());
    for (path, value, says) in [
        ("/apiVersion", json!("admission.k8s.io/v1beta1"), "v1beta1"),
        ("/kind", json!("Pod"), "AdmissionReview"),
        ("/request", json!(null), "no request"),
        ("/request/uid", json!(""), "uid"),
        ("/request/uid", json!(null), "not an AdmissionReview"),
        ("/request/operation", json!("DELETE"), "DELETE"),
        ("/request/subResource", json!("status"), "pods/status"),
        ("/request/resource/resource", json!("nodes"), "nodes"),
        ("/request/resource/version", json!("v2"), "v2"),
        ("/request/object", json!(null), "no object"),
        ("/request/object", json!([1]), "not an AdmissionReview"),
    ] {
        let mut bad = good.clone();
        if path == "/request/subResource" {
            bad["request"]["subResource"] = value;
        } else {
            *bad.pointer_mut(path).unwrap() = value;
        }
        let error = open(&bad).unwrap_err().to_string();
        assert!(error.contains(says), "{path}: {error}");
    }
}

#[test]
fn warnings_are_short_and_printable() {
    let mut answer = AdmissionResponse::default();
    answer.warn(&"é\n".repeat(500));
    let warning = &answer.warnings[0];
    assert!(
        warning.len() <= MAX_WARNING && !warning.contains('\n'),
        "{warning}"
    );
}

#[test]
fn answers_are_complete() {
    let body: Value = serde_json::from_slice(&AdmissionResponse::default().into_body("u")).unwrap();
    assert_eq!(
        body,
        json!({"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": "u", "allowed": true}})
    );
    let refused = AdmissionResponse {
        refused: Some("no".to_owned()),
        ..AdmissionResponse::default()
    };
    let body: Value = serde_json::from_slice(&refused.into_body("u")).unwrap();
    assert_eq!(body["response"]["allowed"], false);
    assert_eq!(body["response"]["status"]["message"], "no");
}

proptest! {
    /// The reason for a refusal goes to an unauthenticated client.
    #[test]
    fn any_review_is_opened_or_refused(review in mutated(json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "operation": "CREATE", "namespace": "ns", "dryRun": true, "subResource": "",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"metadata": {"name": "p", "labels": {"a": "b"}}, "spec": {
                "containers": [{"name": "c", "image": "a:b"}], "tolerations": [{"key": "a"}]}},
            "oldObject": null,
        },
    }))) {
        match open(&review) {
            Ok((request, _)) => prop_assert!(!request.uid.is_empty()),
            Err(error) => prop_assert!(error.to_string().len() < 400, "{error}"),
        }
    }
}
