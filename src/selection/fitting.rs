//! Evaluates the rules of a document for the nodes that a pod can land on. The work depends on the
//! authors of documents and pods, so it has limits, and does not keep other pods waiting.

use std::sync::Arc;

use tokio::time::timeout_at;

use super::{
    Selecting,
    compatibility::{CompatibilityDocument, Fits, FitsWork, NodeGroup, TooMuchWork},
    groups::AlikeNodes,
    landing::Pod,
};

/// Why the rules of a document were not evaluated.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotEvaluated {
    #[error(transparent)]
    TooMuch(#[from] TooMuchWork),
    #[error("other documents for this namespace are being evaluated")]
    Late,
    #[error("archaware is stopping")]
    Stopping,
}

impl Selecting<'_> {
    /// Computes which entries of a document fit which groups. `groups`: some of `alike`.
    ///
    /// # Errors
    ///
    /// When the work is too much, or does not begin in time.
    pub(super) async fn fits(
        &self,
        pod: &Pod<'_>,
        document: &Arc<CompatibilityDocument>,
        alike: &Arc<[AlikeNodes]>,
        groups: &[NodeGroup<'_>],
    ) -> Result<Fits, NotEvaluated> {
        let work = FitsWork::new(document, groups)?;
        if work.is_small() {
            return Ok(Fits::new(document, groups.iter().copied()));
        }
        let place = self.parts.computations.enter(pod.subject.namespace);
        let place = timeout_at(pod.deadline, place).await;
        let place = place.map_err(|_| NotEvaluated::Late)?;
        let (document, alike) = (document.clone(), alike.clone());
        let indexes: Vec<usize> = groups.iter().map(|group| group.index).collect();
        let computing = tokio::task::spawn_blocking(move || {
            // Holds the place until the computation ends, even if the pod no longer waits for it.
            let _place = place;
            let groups = indexes.iter().filter_map(|index| {
                let alike = alike.get(*index)?;
                Some(alike.group(*index))
            });
            Fits::new(&document, groups)
        });
        computing.await.map_err(|_| NotEvaluated::Stopping)
    }
}
