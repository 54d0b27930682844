//! The webhooks of the `MutatingWebhookConfiguration`, as untyped JSON, because a typed round trip
//! would drop fields that archaware does not know. Pure.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    cluster::NAME,
    config::{Config, DaemonSets},
    placement::annotation,
};

/// `timeoutSeconds` of a webhook that archaware adds. An existing webhook keeps its author's value,
/// because each request contains its timeout.
const TIMEOUT: u64 = 3;
const EXPRESSIONS: &str = "/matchExpressions";

/// A webhook, and whether archaware's settings need it.
pub(super) struct Desired {
    webhook: Value,
    is_needed: bool,
}

/// All webhooks, without `caBundle` if archaware has no authorities.
pub(super) fn desired_webhooks(
    config: &Config,
    namespace: &str,
    ca_bundle: Option<&str>,
) -> Vec<Desired> {
    let base = config.admission.url.trim_end_matches('/');
    let webhook = |path: &str, rule: Value| {
        let mut client = if base.is_empty() {
            json!({"service": {"namespace": namespace, "name": NAME, "path": format!("/{path}"), "port": 443}})
        } else {
            json!({"url": format!("{base}/{path}")})
        };
        if let Some(bundle) = ca_bundle {
            set(&mut client, "caBundle", json!(bundle));
        }
        json!({
            "name": format!("{path}.archaware.dev"),
            "clientConfig": client,
            "rules": [rule],
            "admissionReviewVersions": ["v1"],
            "failurePolicy": "Ignore",
            "matchPolicy": "Equivalent",
            "sideEffects": "None",
            // Another webhook may add a sidecar with another image.
            "reinvocationPolicy": "IfNeeded",
        })
    };
    let mut pods = webhook("pods", rule("", "pods", &["CREATE"], "Namespaced"));
    set(&mut pods, "namespaceSelector", namespaces(namespace));
    set(&mut pods, "matchConditions", json!([match_condition()]));
    let nodes = webhook("nodes", rule("", "nodes", &["CREATE"], "Cluster"));
    let daemon_set_rule = rule("apps", "daemonsets", &["CREATE", "UPDATE"], "Namespaced");
    let mut sets = webhook("daemonsets", daemon_set_rule);
    set(&mut sets, "namespaceSelector", namespaces(namespace));
    let manages_sets = config.daemon_sets == DaemonSets::Manage;
    [
        (pods, true),
        (nodes, config.taint.manage),
        (sets, manages_sets),
    ]
    .map(|(webhook, is_needed)| Desired { webhook, is_needed })
    .into()
}

fn rule(group: &str, resource: &str, operations: &[&str], scope: &str) -> Value {
    json!({"apiGroups": [group], "apiVersions": ["v1"], "operations": operations, "resources": [resource], "scope": scope})
}

/// archaware's own pods cannot wait for archaware, and namespaces can opt out.
fn namespaces(own_namespace: &str) -> Value {
    let not_in =
        |key: &str, value: &str| json!({"key": key, "operator": "NotIn", "values": [value]});
    json!({"matchExpressions": [
        not_in("kubernetes.io/metadata.name", own_namespace),
        not_in(annotation::ADMISSION, "disabled"),
    ]})
}

/// Excludes mirror pods: their static pods are not scheduled, and tolerate every `NoExecute` taint.
fn match_condition() -> Value {
    json!({
        "name": "archaware.dev/no-mirror",
        "expression": "!has(object.metadata.annotations) || \
            !('kubernetes.io/config.mirror' in object.metadata.annotations)",
    })
}

/// Whether the first version of archaware wrote this condition. Its names had no prefix.
fn is_of_first_version(condition: &Value) -> bool {
    let (name, expression) = (text(condition, "name"), text(condition, "expression"));
    match name {
        "no-mirror" => expression == text(&match_condition(), "expression"),
        "unbound" => expression == "!has(object.spec.nodeName) || object.spec.nodeName == ''",
        _ => false,
    }
}

/// Sets a field of a JSON object.
fn set(object: &mut Value, field: &str, value: Value) {
    if let Value::Object(fields) = object {
        fields.insert(field.to_owned(), value);
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Whether a condition is archaware's, of this version or another.
fn is_own(condition: &Value) -> bool {
    text(condition, "name").starts_with(annotation::PREFIX) || is_of_first_version(condition)
}

/// Whether a requirement on namespaces is archaware's.
fn is_own_requirement(requirement: &Value) -> bool {
    text(requirement, "key").starts_with(annotation::PREFIX)
}

fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    let list = value.pointer(pointer).and_then(Value::as_array);
    list.map(Vec::as_slice).unwrap_or_default()
}

/// The shortest time that the API server waits for one of archaware's webhooks.
pub(super) fn shortest_timeout(existing: &[Value]) -> Option<Duration> {
    let own_webhooks = existing
        .iter()
        .filter(|webhook| text(webhook, "name").ends_with(".archaware.dev"));
    let seconds = own_webhooks.filter_map(|webhook| webhook.get("timeoutSeconds")?.as_u64());
    seconds.map(Duration::from_secs).min()
}

/// The webhooks to write; `None` if nothing has to change. Required webhooks that are missing are
/// added. Existing webhooks of archaware are corrected even if they are not required, because the
/// API server calls them. Conditions and selectors of archaware's other versions and configurations
/// are removed. Everything else stays: webhooks of other names, time limits, selectors and
/// conditions of other writers (managed clusters exclude their own namespaces), and a `caBundle`
/// that archaware does not maintain.
pub(super) fn correct(existing: &[Value], desired: Vec<Desired>) -> Option<Vec<Value>> {
    let mut webhooks = existing.to_vec();
    for Desired {
        mut webhook,
        is_needed,
    } in desired
    {
        let name = text(&webhook, "name").to_owned();
        if let Some(found) = webhooks
            .iter_mut()
            .find(|webhook| text(webhook, "name") == name)
        {
            complete(found, webhook);
        } else if is_needed {
            set(&mut webhook, "timeoutSeconds", json!(TIMEOUT));
            webhooks.push(webhook);
        }
    }
    (webhooks != existing).then_some(webhooks)
}

/// Changes a webhook so that it contains all required fields.
fn complete(webhook: &mut Value, needed: Value) {
    let Value::Object(needed) = needed else {
        return;
    };
    for (field, mut needed) in needed {
        let found = webhook.get(&field).unwrap_or(&Value::Null);
        let changed = match field.as_str() {
            "namespaceSelector" => {
                let lists = (list(found, EXPRESSIONS), list(&needed, EXPRESSIONS));
                merged(lists.0, lists.1, is_own_requirement).map(|expressions| {
                    let selector = Some(found).filter(|found| found.is_object());
                    let mut selector = selector.cloned().unwrap_or_else(|| json!({}));
                    set(&mut selector, "matchExpressions", json!(expressions));
                    selector
                })
            }
            "matchConditions" => {
                let conditions = merged(list(found, ""), list(&needed, ""), is_own);
                conditions.map(Value::Array)
            }
            _ if contains(found, &needed) => None,
            _ => {
                // Service and URL exclude each other, so the whole `clientConfig` is replaced.
                let bundle = found.get("caBundle").cloned();
                if let Some(bundle) = bundle.filter(|_| needed.get("caBundle").is_none()) {
                    set(&mut needed, "caBundle", bundle);
                }
                Some(needed)
            }
        };
        if let Some(value) = changed {
            set(webhook, &field, value);
        }
    }
}

/// The required items plus the items of other writers; `None` if the found list has exactly these
/// items. Items that other versions of archaware required are dropped.
fn merged(
    found: &[Value],
    needed: &[Value],
    is_own: impl Fn(&Value) -> bool,
) -> Option<Vec<Value>> {
    let foreign = found
        .iter()
        .filter(|item| !is_own(item) && !needed.contains(item));
    let items: Vec<Value> = needed.iter().chain(foreign).cloned().collect();
    let same = items.len() == found.len() && items.iter().all(|item| found.contains(item));
    (!same).then_some(items)
}

/// Whether `existing` contains everything in `wanted`. Fields that the API server adds are ignored.
fn contains(existing: &Value, wanted: &Value) -> bool {
    match (existing, wanted) {
        (Value::Object(existing), Value::Object(wanted)) => wanted
            .iter()
            .all(|(key, wanted)| contains(existing.get(key).unwrap_or(&Value::Null), wanted)),
        (Value::Array(existing), Value::Array(wanted)) => {
            existing.len() == wanted.len()
                && existing.iter().zip(wanted).all(|(e, w)| contains(e, w))
        }
        (existing, wanted) => existing == wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(yaml: &str) -> Config {
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        crate::config::parse("c", &format!("{head}{yaml}\n")).unwrap()
    }

    fn usual() -> Vec<Desired> {
        desired_webhooks(&Config::default(), "ns", Some("Q0E="))
    }

    /// The API server drops fields that it does not know.
    #[test]
    fn every_field_is_one_of_kubernetes() {
        use k8s_openapi::api::admissionregistration::v1::MutatingWebhook;
        for Desired { webhook, .. } in usual() {
            let typed: MutatingWebhook = serde_json::from_value(webhook.clone()).unwrap();
            assert_eq!(serde_json::to_value(typed).unwrap(), webhook);
            assert_eq!(webhook["reinvocationPolicy"], "IfNeeded");
        }
    }

    /// The webhooks as the API server stores them, with possible additions of other writers.
    fn stored(desired: Vec<Desired>) -> Vec<Value> {
        let mut webhooks: Vec<Value> = desired.into_iter().map(|desired| desired.webhook).collect();
        for webhook in &mut webhooks {
            webhook["objectSelector"] = json!({});
            webhook["timeoutSeconds"] = json!(7);
            webhook["unknownField"] = json!([1]);
            let mut expressions = list(webhook, "/namespaceSelector/matchExpressions").to_vec();
            expressions.insert(
                0,
                json!({"key": "control-plane", "operator": "DoesNotExist"}),
            );
            webhook["namespaceSelector"]["matchExpressions"] = json!(expressions);
        }
        webhooks
    }

    #[test]
    fn a_correct_configuration_is_not_changed() {
        let usual_names: Vec<_> = usual()
            .iter()
            .map(|desired| text(&desired.webhook, "name").to_owned())
            .collect();
        let expected = [
            "pods.archaware.dev",
            "nodes.archaware.dev",
            "daemonsets.archaware.dev",
        ];
        assert_eq!(usual_names, expected);
        assert_eq!(correct(&stored(usual()), usual()), None);
        assert_eq!(
            shortest_timeout(&stored(usual())),
            Some(Duration::from_secs(7))
        );
        let mut with_another = stored(usual());
        with_another.push(json!({"name": "else.example"}));
        assert_eq!(
            correct(&with_another, usual()),
            None,
            "further webhooks stay"
        );
    }

    #[test]
    fn what_is_needed_is_put_back_and_the_rest_stays() {
        let right = stored(usual());
        for (path, value) in [
            ("/0/failurePolicy", json!("Fail")),
            ("/0/clientConfig/caBundle", json!("b2xk")),
            ("/0/clientConfig/caBundle", Value::Null),
            ("/0/clientConfig", json!({"url": "https://a.example/pods"})),
            ("/0/matchConditions/0/expression", json!("true")),
            ("/0/matchConditions", Value::Null),
            (
                "/0/namespaceSelector/matchExpressions/1",
                json!({"key": "x", "operator": "Exists"}),
            ),
            ("/1/rules/0/operations", json!(["CREATE", "UPDATE"])),
            ("/2/rules", Value::Null),
        ] {
            let mut wrong = json!(right);
            *wrong.pointer_mut(path).unwrap() = value;
            let corrected = correct(wrong.as_array().unwrap(), usual()).expect(path);
            assert_eq!(correct(&corrected, usual()), None, "{path}");
            assert_eq!(corrected[0]["timeoutSeconds"], 7, "{path}");
            assert_eq!(corrected[1]["unknownField"], json!([1]), "{path}");
            assert!(
                list(&corrected[0], "/namespaceSelector/matchExpressions")
                    .iter()
                    .any(|expression| expression["key"] == "control-plane"),
                "{path}"
            );
        }
        let corrected = correct(&right[..2], usual()).unwrap();
        assert_eq!(corrected[2]["name"], "daemonsets.archaware.dev");
        assert_eq!(corrected[2]["timeoutSeconds"], TIMEOUT);
    }

    /// Conditions and selectors of other versions of archaware are removed; those of other writers
    /// stay.
    #[test]
    fn stale_conditions_of_archaware_are_removed() {
        let condition = |name: &str| json!({"name": name, "expression": "false"});
        let mut stale = stored(usual());
        let mut conditions = list(&stale[0], "/matchConditions").to_vec();
        let mut first = conditions[0].clone();
        first["name"] = json!("no-mirror");
        conditions.push(first);
        let names = ["unbound", "archaware.dev/gone", "other.example/mine"];
        conditions.extend(names.map(condition));
        stale[0]["matchConditions"] = json!(conditions);
        let mut expressions = list(&stale[0], "/namespaceSelector/matchExpressions").to_vec();
        let enabled =
            json!({"key": annotation::ADMISSION, "operator": "In", "values": ["enabled"]});
        expressions.push(enabled.clone());
        stale[0]["namespaceSelector"]["matchExpressions"] = json!(expressions);
        let corrected = correct(&stale, usual()).unwrap();
        let left: Vec<&str> = list(&corrected[0], "/matchConditions")
            .iter()
            .map(|item| text(item, "name"))
            .collect();
        // The expression of `unbound` is not archaware's, so another writer owns the condition.
        let expected = ["archaware.dev/no-mirror", "unbound", "other.example/mine"];
        assert_eq!(left, expected);
        assert!(!list(&corrected[0], "/namespaceSelector/matchExpressions").contains(&enabled));
        assert_eq!(correct(&corrected, usual()), None);
    }

    #[test]
    fn only_necessary_webhooks_are_added() {
        let config = config(
            "taint: {manage: false}\ndaemonSets: report\nadmission: {url: \"https://a.b:9/x/\"}",
        );
        let desired = || desired_webhooks(&config, "ns", Some("Q0E="));
        let made = correct(&[], desired()).unwrap();
        assert_eq!(made.len(), 1);
        let client = json!({"url": "https://a.b:9/x/pods", "caBundle": "Q0E="});
        assert_eq!(made[0]["clientConfig"], client);
        // The API server calls the webhooks of the manifests in any case, so they are kept correct.
        let shipped = stored(desired_webhooks(&Config::default(), "ns", None));
        let corrected = correct(&shipped, desired()).unwrap();
        assert_eq!(corrected.len(), 3);
        let client = json!({"url": "https://a.b:9/x/nodes", "caBundle": "Q0E="});
        assert_eq!(corrected[1]["clientConfig"], client);
    }

    #[test]
    fn a_foreign_ca_bundle_is_kept() {
        let without = || desired_webhooks(&Config::default(), "ns", None);
        assert_eq!(correct(&stored(usual()), without()), None);
        let mut moved = stored(usual());
        moved[0]["clientConfig"]["service"]["port"] = json!(8443);
        let corrected = correct(&moved, without()).unwrap();
        assert_eq!(
            corrected[0]["clientConfig"],
            stored(usual())[0]["clientConfig"]
        );
    }
}
