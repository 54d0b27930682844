//! Removes archaware's additions from a node affinity.

use super::{Affinity, AffinityChange, NodeSelectorTerm};

/// Where archaware's additions are in an affinity. Each index applies after the removals before it in the same list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityUndo {
    /// Expressions, as (term, expression).
    pub expressions: Vec<(usize, usize)>,
    /// The required term that archaware added beside others.
    pub term: Option<usize>,
    /// Whether archaware's term is the only required term, so that all of `required` is removed.
    pub required: bool,
    /// Indexes of preferred terms.
    pub preferred: Vec<usize>,
}

/// Removes what `change` added, as far as it is still there. Returns where it was.
pub fn undo(affinity: &mut Affinity, change: &AffinityChange) -> AffinityUndo {
    let mut undo = AffinityUndo::default();
    let Some(node) = &mut affinity.node_affinity else {
        return undo;
    };
    if let (Some(own), Some(required)) = (&change.require, &mut node.required) {
        let (expressions, terms) = (own.expressions(), &mut required.node_selector_terms);
        if own.terms.is_empty() {
            let made = NodeSelectorTerm {
                match_expressions: expressions,
                match_fields: Vec::new(),
            };
            undo.required = *terms == [made.clone()];
            if undo.required {
                node.required = None;
            } else if let Some(index) = terms.iter().position(|term| *term == made) {
                terms.remove(index);
                undo.term = Some(index);
            }
        } else {
            let pairs = own
                .terms
                .iter()
                .flat_map(|term| expressions.iter().map(move |one| (*term, one)));
            for (index, expression) in pairs {
                // Another webhook may have inserted a term before it, so all terms are searched.
                let elsewhere = 0..terms.len();
                let found = std::iter::once(index).chain(elsewhere).find_map(|index| {
                    let of_term = &terms.get(index)?.match_expressions;
                    // A single remaining expression was written by the author: without it the term would match no
                    // node.
                    let is_one_of_several = of_term.len() > 1;
                    let at = of_term.iter().rposition(|one| one == expression);
                    Some((index, at.filter(|_| is_one_of_several)?))
                });
                if let Some((index, at)) = found
                    && let Some(term) = terms.get_mut(index)
                {
                    term.match_expressions.remove(at);
                    undo.expressions.push((index, at));
                }
            }
        }
    }
    if let Some(preferred) = &mut node.preferred {
        for own in &change.prefer {
            let own = own.term();
            if let Some(index) = preferred.iter().rposition(|term| *term == own) {
                preferred.remove(index);
                undo.preferred.push(index);
            }
        }
    }
    undo
}

impl AffinityUndo {
    /// Whether every addition was found.
    pub fn is_complete(&self, added: &AffinityChange) -> bool {
        let required = added.require.as_ref().is_none_or(|require| {
            let made = self.required || self.term.is_some();
            let found = self.expressions.len();
            let added = require.terms.len() * require.expressions().len();
            (require.terms.is_empty() && made) || (found > 0 && found == added)
        });
        required && self.preferred.len() == added.prefer.len()
    }
}
