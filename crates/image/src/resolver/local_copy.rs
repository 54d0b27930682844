//! The platforms of the node's copy of an image that cannot be resolved: weak evidence.

use crate::{reference::Reference, summary};
use archaware_platform::PlatformSet;

use super::{ImageError, PullPolicy, RequestContext, Resolver, tag::ResolvedDigest};

impl Resolver {
    /// The platforms of the node's own copy of an image. The copy is weak evidence: a single
    /// platform may have been imported under the name of an image that has several, or the copy may
    /// be old. Asks no registry, and caches nothing. `None` if there is no readable copy. `error`:
    /// why the image cannot be resolved.
    pub async fn local_copy(
        &self,
        reference: &Reference,
        error: &ImageError,
    ) -> Option<PlatformSet> {
        let inner = &self.0;
        let containerd = inner.containerd.as_ref()?;
        let digest = containerd.any_record(reference).await.ok()??;
        let context = RequestContext {
            reference: reference.clone(),
            policy: PullPolicy::IfNotPresent,
            credentials: [].into(),
            isolated: None,
        };
        let found = ResolvedDigest::recorded(digest);
        let mut source = inner.document_source(&context, &found, "");
        source.failed = Some(error.clone());
        let (root, content_type) = source.root(&found).await.ok()?;
        let read = summary::read(&source, &found.digest, &root, content_type.as_deref());
        Some(read.await.ok()?.summary.platforms)
    }
}
