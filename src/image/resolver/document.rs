//! From a digest to platforms: content in containerd first, the registry for what it lacks.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;

use crate::image::{
    cache::Known,
    containerd::{Containerd, Patience, Store},
    digest::Digest,
    error::ImageError,
    tree::{self, Fetch, Kind, Tree},
};

use super::{Asker, Inner, Source, tag::Found};

impl Inner {
    /// Reads a tree and remembers it.
    pub(super) async fn read_tree(
        &self,
        asker: &Asker,
        found: &Found,
    ) -> Result<(Arc<Tree>, Source), ImageError> {
        let rights = asker.rights();
        let subject = format!("{}@{}", asker.reference.name(), found.digest);
        let layers = Layers {
            inner: self,
            asker,
            containerd: self.shared_containerd(asker),
            patience: Patience::new(),
            failed: self.caches.failure(&subject, &rights),
            containerd_failed: AtomicBool::new(found.without_containerd),
            asked_registry: AtomicBool::new(found.root.is_some()),
        };
        let read = async {
            let (root, content_type) = match &found.root {
                Some(answer) => (
                    answer.body.clone(),
                    answer.content_type().map(str::to_owned),
                ),
                None => layers.fetch_typed(Kind::Manifest, &found.digest).await?,
            };
            tree::read(&layers, &found.digest, &root, content_type.as_deref()).await
        };
        let (tree, leaves) = match read.await {
            Ok(read) => read,
            Err(error) => {
                // One that is remembered already does not count twice.
                if layers.failed.is_none() {
                    self.caches.keep_failure(&subject, &rights, &error);
                }
                return Err(error);
            }
        };
        self.caches.forget_failure(&subject, &rights);
        let asked = layers.asked_registry.load(Ordering::Relaxed);
        let tree = self.caches.share(tree);
        let mut known = Known {
            tree: tree.clone(),
            told: 0,
        };
        if let Some(store) = self.store(asker) {
            known.told = Store::today();
            if asked {
                store.keep(&found.digest, leaves);
            } else {
                store.touch(&found.digest);
            }
        }
        self.caches.keep_tree(&found.digest, asker.owner(), known);
        let source = if asked {
            Source::Registry
        } else {
            Source::Containerd
        };
        Ok((tree, source))
    }
}

struct Layers<'a> {
    inner: &'a Inner,
    asker: &'a Asker,
    containerd: Option<&'a Containerd>,
    patience: Patience,
    /// The registry has failed lately: containerd may know more by now, the registry is not asked.
    failed: Option<ImageError>,
    /// One silence is enough: it costs a pod the budget of one look-up, not of each document.
    containerd_failed: AtomicBool,
    asked_registry: AtomicBool,
}

impl Layers<'_> {
    async fn fetch_typed(
        &self,
        kind: Kind,
        digest: &Digest,
    ) -> Result<(Bytes, Option<String>), ImageError> {
        let usable = !self.containerd_failed.load(Ordering::Relaxed);
        if let Some(containerd) = self.containerd.filter(|_| usable) {
            match containerd.read(self.patience, digest).await {
                Ok(Some(bytes)) => return Ok((bytes, None)),
                Ok(None) => {}
                Err(_) => self.containerd_failed.store(true, Ordering::Relaxed),
            }
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.asked_registry.store(true, Ordering::Relaxed);
        let Asker {
            reference,
            credentials,
            ..
        } = self.asker;
        let registry = &self.inner.registry;
        let answer = registry.get(reference, kind, digest, credentials).await?;
        let content_type = answer.content_type().map(str::to_owned);
        Ok((answer.body, content_type))
    }
}

impl Fetch for Layers<'_> {
    async fn fetch(&self, kind: Kind, digest: &Digest) -> Result<Bytes, ImageError> {
        self.fetch_typed(kind, digest).await.map(|(bytes, _)| bytes)
    }
}
