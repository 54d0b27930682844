//! A policy of the cluster that refuses what archaware writes.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;

use super::{DEADLINE, TestCluster, eventually, pod, pod_spec};

/// Removes the policy on drop.
pub struct Policy<'a> {
    cluster: &'a TestCluster,
}

/// Of the policy and its binding.
const NAME: &str = "no-tolerations";

impl TestCluster {
    /// Refuses changes of pods that tolerate archaware's taint, from when this returns.
    pub async fn forbid_tolerations(&self) -> Policy<'_> {
        let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods"]});
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{
                    "expression": "!object.spec.tolerations.exists(t, has(t.key) && t.key == 'kubernetes.io/arch')",
                    "message": "no tolerations here",
                }],
            },
        });
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        });
        let file = self.dir().join("policy.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]});
        std::fs::write(&file, list.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]);
        let policy = Policy { cluster: self };
        let probe = pod(
            "policy-probe",
            pod_spec(&["probe".to_owned()]),
            json!({"archaware.dev/mode": "ignore"}),
        );
        let probe: Pod = self.create(probe).await;
        let add = json!([{"op": "add", "path": "/spec/tolerations/-",
            "value": {"key": "kubernetes.io/arch", "operator": "Exists"}}]);
        let add = Patch::<()>::Json(serde_json::from_value(add).unwrap());
        let dry_run = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        eventually("a policy in force", DEADLINE, || async {
            let added = self.pods().patch(&probe.name_any(), &dry_run, &add).await;
            added.is_err().then_some(())
        })
        .await;
        let now = DeleteParams::default().grace_period(0);
        self.pods().delete(&probe.name_any(), &now).await.unwrap();
        policy
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        for kind in [
            "validatingadmissionpolicybinding",
            "validatingadmissionpolicy",
        ] {
            let _ = self.cluster.try_kubectl(&["delete", kind, NAME]);
        }
    }
}
