//! Which mode applies to a pod: the setting nearest to the pod wins.

use std::{collections::BTreeMap, fmt};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_platform::Architectures;

use super::annotation;

/// How a pod is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Decide by its images.
    #[default]
    Inspect,
    /// Tolerate every architecture without reading images.
    Any,
    /// Do not change it.
    Ignore,
}

/// How one pod is handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handling {
    /// A mode.
    Mode(Mode),
    /// Architectures that the pod's author states.
    Architectures(Architectures),
}

impl Handling {
    /// The architectures that the author states, if they do.
    pub fn stated(&self) -> Option<&Architectures> {
        match self {
            Self::Architectures(set) => Some(set),
            Self::Mode(_) => None,
        }
    }
}

/// Where the handling is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlingSource {
    /// By an annotation of the pod or template.
    Pod(&'static str),
    /// By the annotation [`annotation::MODE`] of its namespace.
    Namespace,
    /// By the configuration.
    Configuration,
}

/// An annotation with an invalid value; it is treated as absent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InvalidAnnotation {
    /// Name of the annotation.
    pub name: &'static str,
    /// The value of the annotation.
    pub value: String,
    /// Whether the annotation is on the namespace instead of the pod.
    pub on_namespace: bool,
}

impl fmt::Display for InvalidAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, value) = (self.name, &self.value);
        if self.on_namespace && name == annotation::ARCHITECTURES {
            return write!(
                f,
                "annotation {name} of the namespace is ignored: only pods and templates of DaemonSets can have it"
            );
        }
        let wants = match name {
            annotation::MODE => "inspect, any or ignore",
            annotation::ARCHITECTURES => "architectures like amd64,arm64",
            _ => "weights from 0 to 100 like arm64=80,amd64=20",
        };
        let place = if self.on_namespace {
            " of the namespace"
        } else {
            ""
        };
        write!(
            f,
            "annotation {name}{place} is ignored: {value:?} is not {wants}"
        )
    }
}

type Annotations = BTreeMap<String, String>;

impl Mode {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "inspect" => Some(Self::Inspect),
            "any" => Some(Self::Any),
            "ignore" => Some(Self::Ignore),
            _ => None,
        }
    }
}

/// Whether the annotations of the pod itself say how it is handled.
pub fn has_own_handling(pod: &Annotations) -> bool {
    let mode = pod.get(annotation::MODE);
    let mode = mode.and_then(|text| Mode::parse(text.trim()));
    let architectures = pod.get(annotation::ARCHITECTURES);
    mode.is_some() || architectures.is_some_and(|text| parse_architectures(text).is_some())
}

/// How a pod or template is handled, and where that is set: in its annotations, in those of its
/// namespace, or by the default mode.
pub fn handling(
    pod: &Annotations,
    namespace: &Annotations,
    default: Mode,
) -> (Handling, HandlingSource, Vec<InvalidAnnotation>) {
    let mut invalid = Vec::new();
    let pod_mode = read(pod, annotation::MODE, false, Mode::parse, &mut invalid);
    let architectures = read(
        pod,
        annotation::ARCHITECTURES,
        false,
        parse_architectures,
        &mut invalid,
    );
    let namespace_mode = read(namespace, annotation::MODE, true, Mode::parse, &mut invalid);
    // A person who sets it expects that it counts for all pods of the namespace.
    if let Some(value) = namespace.get(annotation::ARCHITECTURES) {
        invalid.push(InvalidAnnotation {
            name: annotation::ARCHITECTURES,
            value: value.clone(),
            on_namespace: true,
        });
    }
    let (handling, source) = if let Some(mode) = pod_mode {
        (Handling::Mode(mode), HandlingSource::Pod(annotation::MODE))
    } else if let Some(stated) = architectures {
        let source = HandlingSource::Pod(annotation::ARCHITECTURES);
        (Handling::Architectures(stated), source)
    } else if let Some(mode) = namespace_mode {
        (Handling::Mode(mode), HandlingSource::Namespace)
    } else {
        (Handling::Mode(default), HandlingSource::Configuration)
    };
    (handling, source, invalid)
}

pub(super) fn read<T>(
    annotations: &Annotations,
    name: &'static str,
    on_namespace: bool,
    parse: impl Fn(&str) -> Option<T>,
    invalid: &mut Vec<InvalidAnnotation>,
) -> Option<T> {
    let value = annotations.get(name)?;
    let parsed = parse(value.trim());
    if parsed.is_none() {
        invalid.push(InvalidAnnotation {
            name,
            value: value.clone(),
            on_namespace,
        });
    }
    parsed
}

/// Parses `amd64,arm64` or `amd64/v3`. One malformed name or unknown variant invalidates the whole
/// value.
fn parse_architectures(text: &str) -> Option<Architectures> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> Annotations {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn the_nearest_wins() {
        let (mode, architectures) = (annotation::MODE, annotation::ARCHITECTURES);
        let set = |names: &[&str]| {
            Handling::Architectures(names.iter().map(|n| n.parse().unwrap()).collect())
        };
        for (pod, default, namespace, expected, invalid) in [
            (
                &[][..],
                Mode::Inspect,
                &[][..],
                Handling::Mode(Mode::Inspect),
                0,
            ),
            (&[], Mode::Any, &[], Handling::Mode(Mode::Any), 0),
            (
                &[],
                Mode::Any,
                &[(mode, "ignore")],
                Handling::Mode(Mode::Ignore),
                0,
            ),
            (
                &[(architectures, "amd64, arm64")],
                Mode::Inspect,
                &[(mode, "any")],
                set(&["amd64", "arm64"]),
                0,
            ),
            (
                &[(architectures, "amd64"), (mode, "ignore")],
                Mode::Inspect,
                &[],
                Handling::Mode(Mode::Ignore),
                0,
            ),
            (
                &[(mode, "inspect")],
                Mode::Any,
                &[],
                Handling::Mode(Mode::Inspect),
                0,
            ),
            (
                &[(mode, "never")],
                Mode::Any,
                &[],
                Handling::Mode(Mode::Any),
                1,
            ),
            (
                &[(architectures, "amd64,,")],
                Mode::Inspect,
                &[(mode, "x")],
                Handling::Mode(Mode::Inspect),
                2,
            ),
            (
                &[(architectures, "")],
                Mode::Inspect,
                &[],
                Handling::Mode(Mode::Inspect),
                1,
            ),
            (
                &[],
                Mode::Inspect,
                &[(architectures, "amd64")],
                Handling::Mode(Mode::Inspect),
                1,
            ),
            (
                &[(architectures, "x86_64")],
                Mode::Inspect,
                &[],
                set(&["amd64"]),
                0,
            ),
        ] {
            let (found, source, bad) =
                handling(&annotations(pod), &annotations(namespace), default);
            let on_pod = matches!(source, HandlingSource::Pod(_));
            let valid = pod.len() + namespace.len() - bad.len();
            assert_eq!(on_pod, !pod.is_empty() && valid > 0, "{pod:?}");
            assert_eq!(
                source == HandlingSource::Configuration,
                valid == 0,
                "{pod:?}"
            );
            assert_eq!(
                (found, bad.len()),
                (expected, invalid),
                "{pod:?} {namespace:?}"
            );
        }
    }
}
