//! Removes archaware's additions from a node affinity.

use std::collections::BTreeSet;

use crate::{
    affinity::{Affinity, NodeSelectorTerm},
    removal::remove_each,
    requirement::Requirement,
};

use super::{AffinityChange, Require};

/// Where archaware's additions are in an affinity. Each index applies after the removals before it
/// in the same list, and the expressions are removed before the terms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityUndo {
    /// Expressions, as (term, expression).
    pub expressions: Vec<(usize, usize)>,
    /// The required terms that archaware added beside the author's terms, in descending order.
    pub terms: Vec<usize>,
    /// Whether there are only archaware's required terms, so that all of `required` is removed.
    pub required: bool,
    /// Indexes of preferred terms.
    pub preferred: Vec<usize>,
}

/// Removes the additions of `change` that are still in the affinity. Returns their positions.
pub fn undo(affinity: &mut Affinity, change: &AffinityChange) -> AffinityUndo {
    let mut undo = AffinityUndo::default();
    let Some(node) = &mut affinity.node_affinity else {
        return undo;
    };
    // Everybody who may write a pod may write its annotations, so the record may be forged.
    let require = change
        .require
        .as_ref()
        .filter(|require| require.is_possible());
    if let (Some(require), Some(required)) = (require, &mut node.required) {
        let (alternatives, terms) = (require.alternatives(), &mut required.node_selector_terms);
        match alternatives.as_slice() {
            made if require.terms.is_empty() => {
                undo.terms = remove_each(terms, made.iter().cloned());
                // The API server accepts no empty list.
                if terms.is_empty() {
                    undo.terms.clear();
                    undo.required = true;
                    node.required = None;
                }
            }
            [added] => undo.expressions = remove_expressions(terms, require, added),
            several => {
                undo = remove_repeated(terms, require, several).unwrap_or_default();
            }
        }
    }
    if let Some(preferred) = &mut node.preferred {
        undo.preferred = remove_each(preferred, change.preferred_terms());
    }
    undo
}

/// Removes the expressions from the terms that got them. Another webhook may have inserted a term
/// before these, so if a term lacks an expression, the expression is removed from the first other
/// term that has it.
fn remove_expressions(
    terms: &mut [NodeSelectorTerm],
    require: &Require,
    added: &NodeSelectorTerm,
) -> Vec<(usize, usize)> {
    // A single remaining expression was written by the author: without it the term would match no
    // node.
    let has_several = |term: &NodeSelectorTerm| term.match_expressions.len() > 1;
    let holders = |expression: &Requirement| -> BTreeSet<usize> {
        let terms = terms.iter().enumerate();
        let holding = terms
            .filter(|(_, term)| has_several(term) && term.match_expressions.contains(expression));
        holding.map(|(index, _)| index).collect()
    };
    let expressions = added.match_expressions.iter();
    // For each expression, the terms that contain it are searched once, and not for each addition.
    let mut expressions: Vec<_> = expressions
        .map(|expression| (expression, holders(expression)))
        .collect();
    let mut found = Vec::new();
    for term in &require.terms {
        for (expression, holders) in &mut expressions {
            let places = std::iter::once(*term).filter(|term| holders.contains(term));
            let Some(place) = places.chain(holders.first().copied()).next() else {
                continue;
            };
            let Some(term) = terms.get_mut(place) else {
                continue;
            };
            let of_term = &mut term.match_expressions;
            let at = of_term.iter().rposition(|kept| kept == *expression);
            if let Some(at) = at.filter(|_| of_term.len() > 1) {
                of_term.remove(at);
                found.push((place, at));
            }
            if of_term.len() == 1 || !of_term.contains(expression) {
                holders.remove(&place);
            }
        }
    }
    found
}

/// Restores repeated terms: removes the added expressions from the first copy of each term, and
/// removes its other copies. Removes nothing if the copies are not where archaware puts them,
/// because an author's term may equal an alternative.
fn remove_repeated(
    terms: &mut Vec<NodeSelectorTerm>,
    require: &Require,
    alternatives: &[NodeSelectorTerm],
) -> Option<AffinityUndo> {
    let count = alternatives.len();
    let places = require.terms.iter().enumerate();
    // Each earlier term was repeated once per alternative, which moved the later terms.
    let places = places.map(|(before, index)| index.checked_add(before * (count - 1)));
    let places: Vec<usize> = places.collect::<Option<_>>()?;
    for place in &places {
        let mut repeated = terms.get(*place..)?.get(..count)?.iter().zip(alternatives);
        let (term, first) = repeated.next()?;
        let before = without(term, first)?;
        if !repeated.all(|(term, alternative)| without(term, alternative).as_ref() == Some(&before))
        {
            return None;
        }
    }
    let mut undo = AffinityUndo::default();
    for place in places.into_iter().rev() {
        let first = &alternatives.first()?.match_expressions;
        for expression in first.iter().rev() {
            let expressions = &mut terms.get_mut(place)?.match_expressions;
            let at = expressions.iter().rposition(|kept| kept == expression)?;
            expressions.remove(at);
            undo.expressions.push((place, at));
        }
        let copies = place + 1..place + count;
        undo.terms.extend(copies.clone().rev());
        terms.drain(copies);
    }
    Some(undo)
}

/// The term without the expressions of the alternative; `None` if an expression is missing, or if
/// no expression is left.
fn without(term: &NodeSelectorTerm, alternative: &NodeSelectorTerm) -> Option<NodeSelectorTerm> {
    let mut rest = term.clone();
    for expression in alternative.match_expressions.iter().rev() {
        let expressions = &mut rest.match_expressions;
        let at = expressions.iter().rposition(|kept| kept == expression)?;
        expressions.remove(at);
    }
    Some(rest).filter(|rest| !rest.match_expressions.is_empty())
}

impl AffinityUndo {
    /// Whether every addition was found.
    pub fn is_complete(&self, added: &AffinityChange) -> bool {
        let required = added.require.as_ref().is_none_or(|require| {
            let alternatives = require.alternatives();
            let first = alternatives.first();
            let first = first.map_or(0, |first| first.match_expressions.len());
            let (count, terms) = (alternatives.len(), require.terms.len());
            if terms == 0 {
                self.required || self.terms.len() == count
            } else {
                self.expressions.len() == terms * first && self.terms.len() == terms * (count - 1)
            }
        });
        required && self.preferred.len() == added.preferred_terms().count()
    }
}
