//! Preferred architectures. For each architecture the setting nearest to the pod wins.

use std::collections::BTreeMap;

use archaware_platform::Architecture;

use super::{
    annotation,
    mode::{InvalidAnnotation, read},
};

type Annotations = BTreeMap<String, String>;
/// Weights by architecture, from 0 (no preference) to 100.
pub type Preferences = BTreeMap<Architecture, u8>;

/// The preferences from a pod's annotations, those of its namespace, and `default`. Invalid
/// annotations are added to `invalid` and treated as absent.
pub fn nearest(
    pod: &Annotations,
    namespace: &Annotations,
    default: Preferences,
    invalid: &mut Vec<InvalidAnnotation>,
) -> Preferences {
    let mut preferences = default;
    for (annotations, on_namespace) in [(namespace, true), (pod, false)] {
        let name = annotation::PREFERRED_ARCHITECTURES;
        preferences.extend(
            read(annotations, name, on_namespace, parse, invalid)
                .into_iter()
                .flatten(),
        );
    }
    preferences
}

/// Parses `arm64=80,amd64=20`. Zero cancels a preference of the namespace or the configuration.
fn parse(text: &str) -> Option<Preferences> {
    let mut preferences = Preferences::new();
    for part in text.split(',') {
        let (name, weight) = part.split_once('=')?;
        let weight: u8 = weight.trim().parse().ok().filter(|weight| *weight <= 100)?;
        if preferences
            .insert(name.trim().parse().ok()?, weight)
            .is_some()
        {
            return None;
        }
    }
    Some(preferences)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotated(value: &str) -> Annotations {
        [(
            annotation::PREFERRED_ARCHITECTURES.to_owned(),
            value.to_owned(),
        )]
        .into()
    }

    #[test]
    fn the_nearest_wins_for_each_architecture() {
        let configured: Preferences = crate::yaml("{arm64: 80, s390x: 5}");
        let none = Annotations::new();
        for (pod, namespace, expected, bad) in [
            (&none, &none, "arm64=80 s390x=5", 0),
            (
                &none,
                &annotated("amd64=20, arm64=70"),
                "amd64=20 arm64=70 s390x=5",
                0,
            ),
            (
                &annotated("aarch64=0"),
                &annotated("arm64=70"),
                "arm64=0 s390x=5",
                0,
            ),
            (
                &annotated("arm64"),
                &annotated("arm64=101"),
                "arm64=80 s390x=5",
                2,
            ),
            (&annotated("arm64=1,arm64=2"), &none, "arm64=80 s390x=5", 1),
            (&annotated(""), &none, "arm64=80 s390x=5", 1),
        ] {
            let mut invalid = Vec::new();
            let found = nearest(pod, namespace, configured.clone(), &mut invalid);
            let texts: Vec<String> = found.iter().map(|(a, w)| format!("{a}={w}")).collect();
            assert_eq!(
                (texts.join(" "), invalid.len()),
                (expected.to_owned(), bad),
                "{pod:?}"
            );
        }
    }
}
