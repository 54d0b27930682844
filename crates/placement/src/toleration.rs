//! Additional tolerations (`tolerations` of the configuration), and which tolerations cover other
//! tolerations.

use serde_json::Value;

use archaware_base::names::is_label_value;
use archaware_platform::{Architectures, Os};

use super::{taint::text, toleration_rule::TolerationRule};

/// The additional tolerations of pods of `os` that run on these architectures, without duplicates.
pub(super) fn by_rules(
    rules: &[TolerationRule],
    architectures: &Architectures,
    os: &Os,
) -> Vec<Value> {
    let mut tolerations = Vec::new();
    for rule in rules {
        for architecture in architectures.names() {
            let mut named = rule.platforms.iter();
            let applies = rule.platforms.is_empty()
                || named
                    .any(|platform| platform.os == *os && platform.architecture == *architecture);
            if !applies {
                continue;
            }
            // An image may name an architecture of any length, and the API server rejects values
            // over 63 characters.
            let toleration = rule.toleration.toleration(architecture.as_str());
            if is_label_value(text(&toleration, "value")) && !tolerations.contains(&toleration) {
                tolerations.push(toleration);
            }
        }
    }
    tolerations
}

/// Whether `existing` tolerates every taint that `new` tolerates, by `Toleration.ToleratesTaint` of
/// `k8s.io/api/core/v1`: an empty key or effect matches every one.
pub fn covers(existing: &Value, new: &Value) -> bool {
    let same = |field: &str| text(existing, field) == text(new, field);
    let wider = |field: &str| text(existing, field).is_empty() || same(field);
    let is_equal = |toleration: &Value| matches!(text(toleration, "operator"), "" | "Equal");
    // A toleration without seconds lasts for ever.
    let seconds = |toleration: &Value| toleration.get("tolerationSeconds").cloned();
    let lasts = seconds(existing).is_none_or(|time| Some(time) == seconds(new));
    wider("key")
        && wider("effect")
        && lasts
        && match text(existing, "operator") {
            "Exists" => true,
            "" | "Equal" => is_equal(new) && same("value"),
            // The numeric operators (`Gt`, `Lt`) are not interpreted: only an equal toleration is
            // covered.
            _ => existing == new,
        }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rules(text: &str) -> Vec<TolerationRule> {
        crate::yaml(text)
    }

    #[test]
    fn rules_are_for_their_platforms() {
        let both: Architectures = "amd64,arm64".parse().unwrap();
        let linux = Os::linux();
        let fixed = rules(
            "[{platforms: [linux/aarch64], toleration: {key: pool, operator: Equal, value: graviton, effect: NoSchedule}}]",
        );
        let one = json!({"key": "pool", "operator": "Equal", "value": "graviton", "effect": "NoSchedule"});
        assert_eq!(by_rules(&fixed, &both, &linux), [one]);
        assert_eq!(
            by_rules(&fixed, &both, &"windows".parse().unwrap()),
            Vec::<Value>::new()
        );
        assert_eq!(
            by_rules(&fixed, &"amd64".parse().unwrap(), &linux),
            Vec::<Value>::new()
        );
        let named = rules("[{toleration: {key: a/b, value: \"pool-{arch}\"}}]");
        let pool_toleration = |arch: &str| json!({"key": "a/b", "operator": "Equal", "value": format!("pool-{arch}")});
        assert_eq!(
            by_rules(&named, &both, &linux),
            [pool_toleration("amd64"), pool_toleration("arm64")]
        );
        let long: Architectures = format!("a{}", "b".repeat(60)).parse().unwrap();
        assert_eq!(
            by_rules(&named, &long, &linux),
            Vec::<Value>::new(),
            "no taint has such a value"
        );
        let bare = rules("[{toleration: {key: pool}}]");
        assert_eq!(
            by_rules(&bare, &both, &linux),
            [json!({"key": "pool", "operator": "Equal"})]
        );
        let limited =
            rules("[{toleration: {key: pool, effect: NoExecute, tolerationSeconds: 60}}]");
        let expected = json!({"key": "pool", "operator": "Equal", "effect": "NoExecute", "tolerationSeconds": 60});
        assert_eq!(
            by_rules(&limited, &both, &linux),
            std::slice::from_ref(&expected)
        );
        let forever = json!({"key": "pool", "operator": "Equal", "effect": "NoExecute"});
        assert!(covers(&forever, &expected) && !covers(&expected, &forever));
        let any = rules("[{toleration: {key: pool, operator: Exists}}]");
        assert_eq!(
            by_rules(&any, &both, &linux),
            [json!({"key": "pool", "operator": "Exists"})]
        );
    }

    #[test]
    fn only_a_wider_toleration_covers() {
        let any = json!({"operator": "Exists"});
        let key = json!({"key": "k", "operator": "Exists"});
        let key_effect = json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"});
        let value = json!({"key": "k", "value": "v"});
        let value_effect =
            json!({"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"});
        let numeric = json!({"key": "k", "operator": "Gt", "value": "1"});
        let all = [&any, &key, &key_effect, &value, &value_effect, &numeric];
        let covered: [&[usize]; 6] = [
            &[0, 1, 2, 3, 4, 5],
            &[1, 2, 3, 4, 5],
            &[2, 4],
            &[3, 4],
            &[4],
            &[5],
        ];
        for (index, existing) in all.iter().enumerate() {
            let found: Vec<usize> = (0..6).filter(|new| covers(existing, all[*new])).collect();
            assert_eq!(found, covered[index], "{existing}");
        }
    }
}
