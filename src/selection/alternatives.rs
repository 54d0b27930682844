//! Candidates in words, for `explain`.

use crate::{evaluate::ImageAlternative, text::brief_list};

use super::{
    compatibility::{Candidate, CandidateOutcome, FailedRule},
    problem::MAX_RULES,
};

/// A candidate in words.
pub(super) fn alternative(candidate: &Candidate) -> ImageAlternative {
    ImageAlternative {
        tag: candidate.tag.clone(),
        weight: match candidate.outcome {
            CandidateOutcome::ChosenByModel { .. } | CandidateOutcome::NotByModel => None,
            _ => Some(candidate.weight),
        },
        chosen: matches!(
            candidate.outcome,
            CandidateOutcome::Chosen
                | CandidateOutcome::ChosenByModel { .. }
                | CandidateOutcome::Preferred
        ),
        outcome: outcome(candidate),
    }
}

fn outcome(candidate: &Candidate) -> String {
    match &candidate.outcome {
        CandidateOutcome::Chosen => "selected".to_owned(),
        CandidateOutcome::SameImage => "fits, and has the selected image".to_owned(),
        CandidateOutcome::Later => {
            "fits, but an earlier entry or an entry of a higher weight also fits".to_owned()
        }
        CandidateOutcome::ChosenByModel { label, value } => {
            format!("selected by selection.predictor, for nodes with {label}={value}")
        }
        CandidateOutcome::NotByModel => "selection.predictor selected another image".to_owned(),
        CandidateOutcome::Preferred => "fits: its nodes are preferred by its weight".to_owned(),
        CandidateOutcome::NotPreferred if candidate.weight == 0 => {
            "fits: without a weight nothing is preferred".to_owned()
        }
        CandidateOutcome::NotPreferred => {
            "fits: its rules hold everywhere, or cannot be written as node affinity".to_owned()
        }
        CandidateOutcome::WithoutImage => "names no image".to_owned(),
        CandidateOutcome::PassedOver(failed) if failed.is_empty() => {
            "has a negative weight".to_owned()
        }
        CandidateOutcome::PassedOver(failed) => {
            let failed = failed.iter().map(|failed| {
                let FailedRule {
                    name,
                    nodes,
                    example,
                } = failed;
                let unit = if *nodes == 1 { "node" } else { "nodes" };
                let example = example.as_deref().map(|why| format!(" ({why})"));
                format!(
                    "{name} fails on {nodes} {unit}{}",
                    example.unwrap_or_default()
                )
            });
            brief_list(failed, ", ", MAX_RULES)
        }
    }
}
