//! The webhooks of the `MutatingWebhookConfiguration`. Pure.

use k8s_openapi::{
    ByteString,
    api::admissionregistration::v1::{
        MatchCondition, MutatingWebhook, RuleWithOperations, ServiceReference, WebhookClientConfig,
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement},
};
use serde_json::Value;

use crate::{
    cluster::NAME,
    config::{Config, DaemonSets},
    placement::annotation,
};

/// How much longer than `admission.budget` the API server waits, in seconds.
const EXTRA_TIMEOUT: u64 = 2;

/// The webhooks for this configuration.
pub(super) fn desired_webhooks(
    config: &Config,
    namespace: &str,
    authorities: Option<&str>,
) -> Vec<MutatingWebhook> {
    let admission = &config.admission;
    let budget = admission.budget.as_secs() + u64::from(admission.budget.subsec_nanos() > 0);
    let client = |path: &str| {
        let url = admission.url.trim_end_matches('/');
        let service = ServiceReference {
            namespace: namespace.to_owned(),
            name: NAME.to_owned(),
            path: Some(format!("/{path}")),
            port: Some(443),
        };
        WebhookClientConfig {
            ca_bundle: authorities.map(|text| ByteString(text.as_bytes().to_vec())),
            service: url.is_empty().then_some(service),
            url: (!url.is_empty()).then(|| format!("{url}/{path}")),
        }
    };
    let webhook = |path: &str, rule: RuleWithOperations| MutatingWebhook {
        name: format!("{path}.archaware.dev"),
        client_config: client(path),
        rules: Some(vec![rule]),
        admission_review_versions: vec!["v1".to_owned()],
        failure_policy: Some("Ignore".to_owned()),
        match_policy: Some("Equivalent".to_owned()),
        side_effects: "None".to_owned(),
        // Another webhook may add a sidecar with another image.
        reinvocation_policy: Some("IfNeeded".to_owned()),
        timeout_seconds: i32::try_from(budget + EXTRA_TIMEOUT).ok(),
        ..MutatingWebhook::default()
    };
    let pods = MutatingWebhook {
        namespace_selector: Some(namespaces(namespace)),
        match_conditions: Some(match_conditions()),
        ..webhook("pods", rule("", "pods", &["CREATE"], "Namespaced"))
    };
    let mut all = vec![pods];
    if config.taint.manage {
        all.push(webhook("nodes", rule("", "nodes", &["CREATE"], "Cluster")));
    }
    if config.daemon_sets == DaemonSets::Manage {
        let operations = &["CREATE", "UPDATE"];
        all.push(MutatingWebhook {
            namespace_selector: Some(namespaces(namespace)),
            ..webhook(
                "daemonsets",
                rule("apps", "daemonsets", operations, "Namespaced"),
            )
        });
    }
    all
}

fn rule(group: &str, resource: &str, operations: &[&str], scope: &str) -> RuleWithOperations {
    let list = |values: &[&str]| Some(values.iter().map(|value| (*value).to_owned()).collect());
    RuleWithOperations {
        api_groups: list(&[group]),
        api_versions: list(&["v1"]),
        operations: list(operations),
        resources: list(&[resource]),
        scope: Some(scope.to_owned()),
    }
}

/// archaware's own pods cannot wait for archaware, and namespaces can opt out.
fn namespaces(own: &str) -> LabelSelector {
    let not_in = |key: &str, value: &str| LabelSelectorRequirement {
        key: key.to_owned(),
        operator: "NotIn".to_owned(),
        values: Some(vec![value.to_owned()]),
    };
    let expressions = vec![
        not_in("kubernetes.io/metadata.name", own),
        not_in(annotation::ADMISSION, "disabled"),
    ];
    LabelSelector {
        match_expressions: Some(expressions),
        match_labels: None,
    }
}

/// Bound pods and mirror pods of static pods are not scheduled.
fn match_conditions() -> Vec<MatchCondition> {
    let condition = |name: &str, expression: &str| MatchCondition {
        name: name.to_owned(),
        expression: expression.to_owned(),
    };
    vec![
        condition(
            "archaware.dev/unbound",
            "!has(object.spec.nodeName) || object.spec.nodeName == ''",
        ),
        condition(
            "archaware.dev/no-mirror",
            "!has(object.metadata.annotations) || \
             !('kubernetes.io/config.mirror' in object.metadata.annotations)",
        ),
    ]
}

/// Whether a condition is archaware's, of this version or another. In the first one the names had no prefix.
fn is_own(condition: &MatchCondition) -> bool {
    let is_first = |own: &MatchCondition| {
        own.name.strip_prefix(annotation::PREFIX) == Some(condition.name.as_str())
            && own.expression == condition.expression
    };
    condition.name.starts_with(annotation::PREFIX) || match_conditions().iter().any(is_first)
}

/// The webhooks to write, if `existing` differs from `wanted`. Selectors and conditions that other writers added are kept
/// (managed clusters exclude their own namespaces), and so is a `caBundle` that archaware does not maintain. Those of
/// archaware's other versions and configurations are not.
pub(super) fn correct(
    existing: &[MutatingWebhook],
    mut wanted: Vec<MutatingWebhook>,
) -> Option<Vec<MutatingWebhook>> {
    let mut same = existing.len() == wanted.len();
    for webhook in &mut wanted {
        let Some(before) = existing.iter().find(|one| one.name == webhook.name) else {
            same = false;
            continue;
        };
        if let Some(further) = &before.namespace_selector {
            let selector = webhook.namespace_selector.get_or_insert_default();
            selector.match_labels.clone_from(&further.match_labels);
            for expression in further.match_expressions.iter().flatten() {
                if expression.key.starts_with(annotation::PREFIX) {
                    same &= selector
                        .match_expressions
                        .iter()
                        .flatten()
                        .any(|own| own == expression);
                    continue;
                }
                let ours = selector.match_expressions.get_or_insert_default();
                if !ours.contains(expression) {
                    ours.push(expression.clone());
                }
            }
        }
        webhook.object_selector.clone_from(&before.object_selector);
        for condition in before.match_conditions.iter().flatten() {
            if is_own(condition) {
                same &= webhook
                    .match_conditions
                    .iter()
                    .flatten()
                    .any(|own| own == condition);
                continue;
            }
            let ours = webhook.match_conditions.get_or_insert_default();
            if ours.iter().all(|own| own.name != condition.name) {
                ours.push(condition.clone());
            }
        }
        let bundle = &before.client_config.ca_bundle;
        webhook.client_config.ca_bundle = webhook.client_config.ca_bundle.take().or(bundle.clone());
        let (before, webhook) = (serde_json::to_value(before), serde_json::to_value(webhook));
        same &= before.is_ok_and(|before| webhook.is_ok_and(|webhook| contains(&before, &webhook)));
    }
    (!same).then_some(wanted)
}

/// Whether `existing` contains everything in `wanted`. Fields that the API server adds are ignored, and so is the
/// order of selectors.
fn contains(existing: &Value, wanted: &Value) -> bool {
    match (existing, wanted) {
        (Value::Object(existing), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let existing = existing.get(key).unwrap_or(&Value::Null);
            match (key.as_str(), existing.as_array(), wanted.as_array()) {
                ("matchExpressions" | "matchConditions", Some(existing), Some(wanted)) => {
                    wanted.iter().all(|one| existing.contains(one))
                }
                _ => contains(existing, wanted),
            }
        }),
        (Value::Array(existing), Value::Array(wanted)) => {
            existing.len() == wanted.len()
                && existing.iter().zip(wanted).all(|(e, w)| contains(e, w))
        }
        (existing, wanted) => existing == wanted,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(yaml: &str) -> Config {
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        crate::config::parse("c", &format!("{head}{yaml}\n")).unwrap()
    }

    fn usual() -> Vec<MutatingWebhook> {
        desired_webhooks(&Config::default(), "ns", Some("CA"))
    }

    /// The webhooks as the API server stores them.
    fn stored(mut webhooks: Vec<MutatingWebhook>) -> Vec<MutatingWebhook> {
        for webhook in &mut webhooks {
            webhook.object_selector = Some(LabelSelector::default());
            webhook.namespace_selector.get_or_insert_default();
        }
        webhooks
    }

    #[test]
    fn a_correct_configuration_is_not_changed() {
        let names: Vec<String> = usual().into_iter().map(|webhook| webhook.name).collect();
        assert_eq!(
            names,
            [
                "pods.archaware.dev",
                "nodes.archaware.dev",
                "daemonsets.archaware.dev"
            ]
        );
        assert_eq!(correct(&stored(usual()), usual()), None);
        let mut narrowed = stored(usual());
        let further = LabelSelectorRequirement {
            key: "control-plane".to_owned(),
            operator: "DoesNotExist".to_owned(),
            values: None,
        };
        for webhook in &mut narrowed {
            let selector = webhook.namespace_selector.get_or_insert_default();
            let expressions = selector.match_expressions.get_or_insert_default();
            expressions.insert(0, further.clone());
        }
        assert_eq!(
            correct(&narrowed, usual()),
            None,
            "what others exclude stays"
        );
        for (path, value) in [
            ("/0/failurePolicy", json!("Fail")),
            ("/0/timeoutSeconds", json!(30)),
            ("/0/clientConfig/caBundle", json!("b2xk")),
            ("/0/matchConditions/0/expression", json!("true")),
            ("/1/rules/0/operations", json!(["CREATE", "UPDATE"])),
            ("/2/name", json!("else.archaware.dev")),
        ] {
            let mut wrong = json!(narrowed);
            *wrong.pointer_mut(path).unwrap() = value;
            let wrong: Vec<MutatingWebhook> = serde_json::from_value(wrong).unwrap();
            let corrected = correct(&wrong, usual()).expect(path);
            let selector = corrected[0].namespace_selector.as_ref().unwrap();
            let kept = selector
                .match_expressions
                .as_ref()
                .unwrap()
                .contains(&further);
            assert!(kept, "{path}");
            assert_eq!(correct(&stored(corrected), usual()), None, "{path}");
        }
        assert!(correct(&narrowed[..2], usual()).is_some(), "one is missing");
    }

    /// Left by other versions of archaware: not what somebody else narrowed.
    #[test]
    fn stale_conditions_of_archaware_are_removed() {
        let condition = |name: &str| MatchCondition {
            name: name.to_owned(),
            expression: "false".to_owned(),
        };
        let admission = LabelSelectorRequirement {
            key: annotation::ADMISSION.to_owned(),
            operator: "In".to_owned(),
            values: Some(vec!["enabled".to_owned()]),
        };
        let mut stale = stored(usual());
        let conditions = stale[0].match_conditions.get_or_insert_default();
        let mut first = conditions[1].clone();
        first.name = "no-mirror".to_owned();
        conditions.push(first);
        let names = ["unbound", "archaware.dev/gone", "other.example/mine"];
        conditions.extend(names.map(condition));
        let selector = stale[0].namespace_selector.get_or_insert_default();
        let expressions = selector.match_expressions.get_or_insert_default();
        expressions.push(admission.clone());
        let corrected = correct(&stale, usual()).unwrap();
        let left: Vec<&str> = corrected[0]
            .match_conditions
            .iter()
            .flatten()
            .map(|one| one.name.as_str())
            .collect();
        // The one named `unbound` has another expression: it is somebody else's.
        let expected = [
            "archaware.dev/unbound",
            "archaware.dev/no-mirror",
            "unbound",
            "other.example/mine",
        ];
        assert_eq!(left, expected);
        let selector = corrected[0].namespace_selector.as_ref().unwrap();
        assert!(
            !selector
                .match_expressions
                .as_ref()
                .unwrap()
                .contains(&admission)
        );
        assert_eq!(correct(&stored(corrected), usual()), None);
    }

    #[test]
    fn only_necessary_requests_match() {
        let url = "admission: {url: \"https://a.b:9/x/\", budget: 2500ms}";
        let config = config(&format!(
            "taint: {{manage: false}}\ndaemonSets: report\n{url}"
        ));
        let webhooks = desired_webhooks(&config, "ns", None);
        assert_eq!(webhooks.len(), 1);
        assert_eq!(
            json!(webhooks[0].client_config),
            json!({"url": "https://a.b:9/x/pods"})
        );
        assert_eq!(webhooks[0].timeout_seconds, Some(5));
    }

    #[test]
    fn a_foreign_ca_bundle_is_kept() {
        let mut existing = stored(usual());
        let without = || desired_webhooks(&Config::default(), "ns", None);
        assert_eq!(correct(&existing, without()), None);
        existing[0].failure_policy = Some("Fail".to_owned());
        let corrected = correct(&existing, without()).unwrap();
        assert_eq!(
            corrected[0].client_config.ca_bundle,
            existing[0].client_config.ca_bundle
        );
    }
}
