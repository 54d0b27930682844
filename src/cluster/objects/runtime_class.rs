//! Runtime classes, as far as they say where their pods run.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use crate::placement::covers;

use super::{PodSpec, stored};

/// A `RuntimeClass`; only its scheduling is read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RuntimeClass {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// Where its pods run.
    pub scheduling: Option<Scheduling>,
}

/// `scheduling` of a `RuntimeClass`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Scheduling {
    /// Node labels that are required.
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations, in the API's form.
    pub tolerations: Option<Vec<Value>>,
}

impl PodSpec {
    /// Adds what Kubernetes' admission plugin `RuntimeClass` adds to a new pod of a class.
    ///
    /// # Errors
    ///
    /// The key of a node label. The pod and the class require different values of it: Kubernetes
    /// rejects such a pod.
    pub fn add_scheduling(&mut self, scheduling: &Scheduling) -> Result<(), String> {
        for (key, value) in &scheduling.node_selector {
            match self.node_selector.get(key) {
                Some(existing) if existing != value => return Err(key.clone()),
                _ => self.node_selector.insert(key.clone(), value.clone()),
            };
        }
        let tolerations = self.tolerations.get_or_insert_default();
        for toleration in scheduling.tolerations.iter().flatten() {
            if !tolerations
                .iter()
                .any(|existing| covers(existing, toleration))
            {
                tolerations.push(toleration.clone());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn scheduling_is_merged_as_kubernetes_does() {
        let tolerate = |key: &str| json!({"key": key, "operator": "Exists"});
        for (own, class, expected) in [
            (
                json!({}),
                json!({"nodeSelector": {"a": "b"}, "tolerations": [tolerate("t")]}),
                Ok(json!({"nodeSelector": {"a": "b"}, "tolerations": [tolerate("t")]})),
            ),
            (
                json!({"nodeSelector": {"a": "b", "c": "d"}, "tolerations": [tolerate("t")]}),
                json!({"nodeSelector": {"a": "b"}, "tolerations": [tolerate("t"), tolerate("u")]}),
                Ok(
                    json!({"nodeSelector": {"a": "b", "c": "d"}, "tolerations": [tolerate("t"), tolerate("u")]}),
                ),
            ),
            (
                json!({"nodeSelector": {"a": "c"}}),
                json!({"nodeSelector": {"a": "b"}}),
                Err("a".to_owned()),
            ),
            (json!({}), json!({}), Ok(json!({"tolerations": []}))),
        ] {
            let case = format!("{own} {class}");
            let mut spec: PodSpec = serde_json::from_value(own).unwrap();
            let class: Scheduling = serde_json::from_value(class).unwrap();
            let merged = spec.add_scheduling(&class).map(|()| spec);
            let expected = expected.map(|spec| serde_json::from_value::<PodSpec>(spec).unwrap());
            assert_eq!(merged, expected, "{case}");
        }
    }
}
