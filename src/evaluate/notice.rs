//! Messages about a pod, for events, admission warnings, `explain` and `plan`.

use std::fmt;

use crate::{
    cluster::events::EventReason,
    placement::{mode::InvalidAnnotation, rule::LeftOutRule},
};

use super::pull_secrets::UnusablePullSecret;

/// A message about a pod or a template.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// An annotation has an invalid value.
    InvalidAnnotation(InvalidAnnotation),
    /// A pull secret is skipped.
    UnusablePullSecret(UnusablePullSecret),
    /// A container asks for image selection, but keeps its image.
    ImageNotSelected {
        /// The reason in words.
        why: String,
        /// Whether the reason is that no image fits a node of the pod.
        fits_no_node: bool,
    },
    /// The author selects nodes that do not run the images, and the pod is placed there.
    AuthorOverrules(String),
    /// A rule of the configuration is left out.
    RuleLeftOut(LeftOutRule),
    /// No node runs all images.
    NoCommonArchitecture(String),
    /// Some nodes run all images, and the author selects other nodes.
    ArchitectureExcluded(String),
}

impl Notice {
    /// The reason of the event for this notice.
    pub fn reason(&self) -> EventReason {
        match self {
            Self::InvalidAnnotation(_) => EventReason::InvalidAnnotation,
            Self::UnusablePullSecret(_) => EventReason::PullSecretUnusable,
            Self::ImageNotSelected { .. } => EventReason::ImageNotSelected,
            Self::AuthorOverrules(_) | Self::ArchitectureExcluded(_) => {
                EventReason::ArchitectureExcluded
            }
            Self::RuleLeftOut(_) => EventReason::RuleLeftOut,
            Self::NoCommonArchitecture(_) => EventReason::NoCommonArchitecture,
        }
    }

    /// Whether the event is about the namespace of the pod.
    pub fn is_on_namespace(&self) -> bool {
        matches!(self, Self::InvalidAnnotation(invalid) if invalid.on_namespace)
    }

    /// Whether the text lists the images that are known so far. If so, a changed text alone is no
    /// reason for a new event.
    pub fn depends_on_images(&self) -> bool {
        self.is_conflict() || matches!(self, Self::AuthorOverrules(_))
    }

    /// Whether the notice is about a permission that archaware lacks.
    pub fn is_for_administrators(&self) -> bool {
        matches!(self, Self::UnusablePullSecret(unusable) if unusable.is_forbidden())
    }

    /// Whether the notice explains why no node can run the pod.
    pub fn is_conflict(&self) -> bool {
        matches!(
            self,
            Self::NoCommonArchitecture(_) | Self::ArchitectureExcluded(_)
        )
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidAnnotation(invalid) => invalid.fmt(f),
            Self::UnusablePullSecret(unusable) => unusable.fmt(f),
            Self::RuleLeftOut(rule) => rule.fmt(f),
            Self::ImageNotSelected { why: text, .. }
            | Self::AuthorOverrules(text)
            | Self::NoCommonArchitecture(text)
            | Self::ArchitectureExcluded(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        config::Config,
        evaluate::{Evaluation, Verdict},
        placement::{Decision, PlacementPolicy, annotation, rule::Contradicted},
    };

    use super::*;

    #[test]
    fn every_notice_has_a_reason_and_a_sentence() {
        let policy = PlacementPolicy::from(&Config::default());
        let mut evaluation = Evaluation::new(Verdict::Decided(Decision::NoCommonArchitecture));
        assert_eq!(evaluation.notices(&policy).len(), 1);
        let overruled = evaluation.explain_overruled(&"amd64".parse().unwrap());
        evaluation.raised = vec![
            Notice::InvalidAnnotation(InvalidAnnotation {
                name: annotation::MODE,
                value: "all".to_owned(),
                on_namespace: true,
            }),
            Notice::ImageNotSelected {
                why: "no image fits".to_owned(),
                fits_no_node: true,
            },
            Notice::AuthorOverrules(overruled),
            Notice::RuleLeftOut(LeftOutRule {
                name: "gpu".to_owned(),
                contradicts: Contradicted::RuntimeClass,
            }),
        ];
        evaluation.unusable = [UnusablePullSecret {
            secret: "registry".to_owned(),
            why: "it has no entries".to_owned(),
        }]
        .into();
        let notices = evaluation.notices(&policy);
        let reasons = notices.iter().map(|notice| {
            let sentence = notice.to_string();
            assert!(!sentence.is_empty());
            (notice.reason().as_str(), notice.is_on_namespace())
        });
        assert_eq!(
            reasons.collect::<Vec<_>>(),
            [
                ("InvalidAnnotation", true),
                ("ImageNotSelected", false),
                ("ArchitectureExcluded", false),
                ("RuleLeftOut", false),
                ("PullSecretUnusable", false),
                ("NoCommonArchitecture", false),
            ]
        );
        assert_eq!(
            notices[4].to_string(),
            "pull secret registry is skipped: it has no entries"
        );
        // The failure policy's decision was reported when it was made.
        evaluation.by_policy = true;
        let mut again = evaluation.notices(&policy).into_iter();
        assert!(!again.any(|notice| notice.is_conflict()));
    }
}
