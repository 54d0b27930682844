//! Who manages the field that archaware changes: `spec.taints` of nodes, the tolerations of a
//! DaemonSet's template. Both are atomic lists, so each has one value that its managers share
//! ([server-side apply](https://kubernetes.io/docs/reference/using-api/server-side-apply/)).

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, SeqAccess, Visitor},
};

/// Field manager of all creates and patches.
pub(crate) const FIELD_MANAGER: &str = "archaware";

/// The managers of the field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldManagers {
    /// Those other than archaware.
    other_managers: Vec<FieldManager>,
    recorded: Option<Recorded>,
}

/// The latest field manager of archaware's record of a template's tolerations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The time of its last write.
    pub time: Option<Time>,
    /// Whether the manager is archaware's controller. Additions of the webhook belong to the
    /// manager that sent the request.
    pub is_by_controller: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FieldManager {
    name: String,
    /// Whether it uses server-side apply. If archaware changes the field, the next apply of this
    /// manager ends with a conflict.
    applies: bool,
    time: Option<Time>,
}

impl FieldManagers {
    /// The managers that set the field by server-side apply.
    pub fn appliers(&self) -> impl Iterator<Item = &str> {
        let appliers = self.other_managers.iter().filter(|manager| manager.applies);
        appliers.map(|manager| manager.name.as_str())
    }

    /// Who wrote archaware's record of a template's tolerations, and when; `None` if no field
    /// manager claims it.
    pub fn recorded(&self) -> Option<&Recorded> {
        self.recorded.as_ref()
    }

    /// The manager that set the field last, in quotes, for messages. `another tool` if there is no
    /// manager: a tool that only removes the field does not become its manager.
    pub fn last_writer(&self) -> String {
        let last = self
            .other_managers
            .iter()
            .max_by_key(|manager| &manager.time);
        last.map_or("another tool".to_owned(), |manager| {
            format!("{:?}", manager.name)
        })
    }
}

/// An entry of `metadata.managedFields`, with only the fields that matter here.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Entry {
    manager: String,
    operation: String,
    subresource: String,
    time: Option<Time>,
    fields_v1: Fields,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Fields {
    #[serde(rename = "f:metadata")]
    metadata: Option<Metadata>,
    #[serde(rename = "f:spec")]
    spec: Option<Spec>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Metadata {
    #[serde(rename = "f:annotations")]
    annotations: Option<Annotations>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "f:archaware.dev/tolerations")]
    tolerations: Option<IgnoredAny>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Spec {
    #[serde(rename = "f:taints")]
    taints: Option<IgnoredAny>,
    #[serde(rename = "f:template")]
    template: Option<Template>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Template {
    #[serde(rename = "f:spec")]
    spec: Option<PodSpec>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PodSpec {
    #[serde(rename = "f:tolerations")]
    tolerations: Option<IgnoredAny>,
}

impl Entry {
    fn recorded(&self) -> Option<Recorded> {
        let annotations = self.fields_v1.metadata.as_ref()?.annotations.as_ref()?;
        annotations.tolerations.as_ref()?;
        Some(Recorded {
            time: self.time.clone(),
            is_by_controller: self.manager == FIELD_MANAGER,
        })
    }

    /// `None` for archaware itself, for subresources, and for managers of other fields.
    fn manager(self) -> Option<FieldManager> {
        let spec = self.fields_v1.spec?;
        let is_ignored = self.manager == FIELD_MANAGER || !self.subresource.is_empty();
        let in_template = |template: Template| template.spec?.tolerations;
        let has_field = spec.taints.is_some() || spec.template.and_then(in_template).is_some();
        (has_field && !is_ignored).then_some(FieldManager {
            name: self.manager,
            applies: self.operation == "Apply",
            time: self.time,
        })
    }
}

impl<'de> Deserialize<'de> for FieldManagers {
    /// A value that is not a list yields no managers: parsing never fails because of an unusual
    /// object.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = FieldManagers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("managed fields")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<FieldManagers, A::Error> {
        let mut managers = FieldManagers::default();
        while let Some(entry) = entries.next_element::<Entry>()? {
            let earlier = managers.recorded.take();
            let writes = earlier.into_iter().chain(entry.recorded());
            managers.recorded = writes.max_by_key(|manager| manager.time.clone());
            managers.other_managers.extend(entry.manager());
        }
        Ok(managers)
    }

    fn visit_unit<E: Error>(self) -> Result<FieldManagers, E> {
        Ok(FieldManagers::default())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<FieldManagers, E> {
        Ok(FieldManagers::default())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn entry(manager: &str, operation: &str, minute: u8, spec: &Value) -> Value {
        json!({ "manager": manager, "operation": operation, "fieldsType": "FieldsV1",
            "time": format!("2026-01-01T00:{minute:02}:00Z"), "fieldsV1": { "f:spec": spec } })
    }

    #[test]
    fn who_wrote_the_record_is_known() {
        let record = |manager: &str, minute: u8| {
            json!({ "manager": manager, "operation": "Update", "time": format!("2026-01-01T00:{minute:02}:00Z"),
                "fieldsV1": { "f:metadata": { "f:annotations": { "f:archaware.dev/tolerations": {} } } } })
        };
        let tolerations = json!({"f:template": {"f:spec": {"f:tolerations": {}}}});
        for (entries, expected) in [
            (
                json!([record("archaware", 3)]),
                Some(("2026-01-01T00:03:00Z", true)),
            ),
            // The webhook added it to a user's request.
            (
                json!([record("archaware", 3), record("kubectl-create", 4)]),
                Some(("2026-01-01T00:04:00Z", false)),
            ),
            (json!([entry("archaware", "Update", 3, &tolerations)]), None),
            (json!(null), None),
        ] {
            let managers: FieldManagers = serde_json::from_value(entries.clone()).unwrap();
            let found = managers.recorded();
            let found = found.map(|write| {
                (
                    write.time.as_ref().unwrap().0.to_string(),
                    write.is_by_controller,
                )
            });
            let found = found
                .as_ref()
                .map(|(time, is_by_controller)| (time.as_str(), *is_by_controller));
            assert_eq!(found, expected, "{entries}");
        }
    }

    #[test]
    fn only_managers_of_the_field_count() {
        let tolerations =
            json!({"f:template": {"f:spec": {"f:tolerations": {}, "f:containers": {"k:{}": {}}}}});
        let other_fields = json!({"f:template": {"f:spec": {"f:containers": {}}}});
        let taints = json!({"f:taints": {}});
        for (entries, appliers, last) in [
            (json!(null), vec![], "another tool"),
            (json!("not a list"), vec![], "another tool"),
            (
                json!([
                    entry("archaware", "Update", 9, &tolerations),
                    entry("helm", "Update", 1, &other_fields)
                ]),
                vec![],
                "another tool",
            ),
            (
                json!([
                    entry("argocd", "Apply", 1, &tolerations),
                    entry("kubectl-edit", "Update", 2, &other_fields)
                ]),
                vec!["argocd"],
                "\"argocd\"",
            ),
            (
                json!([
                    entry("old", "Update", 1, &tolerations),
                    entry("new", "Update", 2, &tolerations)
                ]),
                vec![],
                "\"new\"",
            ),
            (
                json!([
                    entry("cloud", "Update", 1, &taints),
                    {"manager": "kubelet", "operation": "Update", "subresource": "status", "fieldsV1": {"f:spec": {}}},
                    {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:metadata": {}}},
                ]),
                vec![],
                "\"cloud\"",
            ),
        ] {
            let managers: FieldManagers = serde_json::from_value(entries.clone()).unwrap();
            assert_eq!(
                managers.appliers().collect::<Vec<_>>(),
                appliers,
                "{entries}"
            );
            assert_eq!(managers.last_writer(), last, "{entries}");
        }
    }
}
