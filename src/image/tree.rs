//! From a root document to the platforms of the image: follows an index into what does not name its
//! own platform, and a manifest into its config.

use std::{collections::HashSet, future::Future};

use bytes::Bytes;

use crate::platform::{
    Config, Descriptor, Document, Index, MAX_DOCUMENT, Manifest, Note, Platform, PlatformSet,
};

use super::{digest::Digest, error::ImageError};

/// Indexes within indexes, the root included: what builders make has two.
const MAX_DEPTH: usize = 4;
/// Children that have to be read, in one image: an index with more is an attack or a catalogue.
const MAX_CHILDREN: usize = 256;
/// Bytes of all documents of one image: 256 children have some 2 KiB each.
const MAX_TOTAL: usize = 16 * 1024 * 1024;
/// Larger trees are rare, and not worth keeping.
const MAX_KEPT: usize = 1024 * 1024;

/// What kind of content is asked for: a registry keeps them under different paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Manifest,
    Config,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Config => "config",
        }
    }
}

/// Where content comes from, by digest. Implementations need not verify it.
pub(crate) trait Fetch: Sync {
    /// The whole content, at most [`MAX_DOCUMENT`] bytes.
    fn fetch(
        &self,
        kind: Kind,
        digest: &Digest,
    ) -> impl Future<Output = Result<Bytes, ImageError>> + Send;
}

/// What a root document says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Tree {
    pub(crate) media_type: &'static str,
    pub(crate) platforms: PlatformSet,
}

/// A document that was read on the way.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub(crate) digest: Digest,
    pub(crate) bytes: Bytes,
    pub(crate) kind: Kind,
    /// The document that names it; the root has none.
    pub(crate) parent: Option<Digest>,
}

/// Reads what `root` (already fetched, of `digest`) leads to; gives what it says and all that was read, the
/// root first; nothing when that is more than is worth keeping.
pub(crate) async fn read(
    fetch: &impl Fetch,
    digest: &Digest,
    root: &Bytes,
    content_type: Option<&str>,
) -> Result<(Tree, Vec<Leaf>), ImageError> {
    verify(Kind::Manifest, digest, None, root)?;
    let document = parse(digest, root, content_type)?;
    let media_type = media_type_of(root, content_type, &document);
    let mut walk = Walk {
        fetch,
        seen: HashSet::from([digest.clone()]),
        children: 0,
        total: 0,
        leaves: Vec::new(),
    };
    walk.keep(Leaf {
        digest: digest.clone(),
        bytes: root.clone(),
        kind: Kind::Manifest,
        parent: None,
    })?;
    let platforms = match document {
        Document::Manifest(manifest) => walk.manifest(digest, manifest).await?,
        Document::Index(index) => walk.index(digest, index).await?,
    };
    let tree = Tree {
        media_type,
        platforms,
    };
    Ok((tree, walk.leaves))
}

struct Walk<'a, F> {
    fetch: &'a F,
    seen: HashSet<Digest>,
    children: usize,
    total: usize,
    leaves: Vec<Leaf>,
}

impl<F: Fetch> Walk<'_, F> {
    async fn manifest(
        &mut self,
        parent: &Digest,
        manifest: Manifest,
    ) -> Result<PlatformSet, ImageError> {
        let Some(config) = manifest.config else {
            return Ok(PlatformSet::None(Note::NotAnImage));
        };
        let (digest, bytes) = self.read(Kind::Config, parent, &config).await?;
        let Config(platforms) = Config::parse(&bytes).map_err(|source| ImageError::Document {
            what: format!("config {digest}"),
            source,
        })?;
        Ok(platforms)
    }

    /// A worklist instead of recursion: the depth is bounded by data, not by the stack.
    async fn index(&mut self, digest: &Digest, root: Index) -> Result<PlatformSet, ImageError> {
        let mut platforms: Vec<Platform> = Vec::new();
        let (mut images, mut gone) = (0_usize, 0_usize);
        let mut work = vec![(1_usize, digest.clone(), root)];
        while let Some((depth, parent, index)) = work.pop() {
            if depth > MAX_DEPTH {
                return Err(ImageError::TooDeep(
                    "indexes are nested deeper than 4 levels",
                ));
            }
            images += index.platforms.len();
            platforms.extend(index.platforms);
            for descriptor in index.unnamed {
                let digest: Digest = descriptor.digest.parse()?;
                if !self.seen.insert(digest.clone()) {
                    continue;
                }
                let platforms_of = match self.child(&parent, &descriptor).await {
                    Ok(Document::Index(nested)) => {
                        work.push((depth + 1, digest, nested));
                        continue;
                    }
                    Ok(Document::Manifest(manifest)) => self.manifest(&digest, manifest).await,
                    Err(error) => Err(error),
                };
                images += 1;
                match platforms_of {
                    Ok(set) => platforms.extend_from_slice(set.platforms()),
                    // Registries collect children nobody pulls; the others still count.
                    Err(ImageError::NotFound { .. }) => gone += 1,
                    Err(error) => return Err(error),
                }
            }
        }
        if images > 0 && gone == images {
            return Err(ImageError::NotFound {
                what: "every image of the index".to_owned(),
            });
        }
        Ok(PlatformSet::new(platforms, Note::NoArchitecture))
    }

    async fn child(
        &mut self,
        parent: &Digest,
        descriptor: &Descriptor,
    ) -> Result<Document, ImageError> {
        self.children += 1;
        if self.children > MAX_CHILDREN {
            return Err(ImageError::TooDeep(
                "more than 256 images of an index have to be read",
            ));
        }
        let (digest, bytes) = self.read(Kind::Manifest, parent, descriptor).await?;
        parse(&digest, &bytes, Some(&descriptor.media_type))
    }

    async fn read(
        &mut self,
        kind: Kind,
        parent: &Digest,
        descriptor: &Descriptor,
    ) -> Result<(Digest, Bytes), ImageError> {
        let digest: Digest = descriptor.digest.parse()?;
        if let Some(size) = descriptor.size.filter(|size| *size > MAX_DOCUMENT) {
            return Err(ImageError::too_large(
                format!("{} {digest}", kind.as_str()),
                size,
            ));
        }
        let bytes = self.fetch.fetch(kind, &digest).await?;
        verify(kind, &digest, descriptor.size, &bytes)?;
        self.keep(Leaf {
            digest: digest.clone(),
            bytes: bytes.clone(),
            kind,
            parent: Some(parent.clone()),
        })?;
        Ok((digest, bytes))
    }

    fn keep(&mut self, leaf: Leaf) -> Result<(), ImageError> {
        self.total += leaf.bytes.len();
        if self.total > MAX_TOTAL {
            return Err(ImageError::too_large(
                "all of the image's documents",
                self.total as u64,
            ));
        }
        if self.total > MAX_KEPT {
            self.leaves = Vec::new();
        } else {
            self.leaves.push(leaf);
        }
        Ok(())
    }
}

/// Everything read is hashed, wherever it came from.
fn verify(kind: Kind, digest: &Digest, size: Option<u64>, bytes: &Bytes) -> Result<(), ImageError> {
    let what = || format!("{} {digest}", kind.as_str());
    let actual = bytes.len() as u64;
    if let Some(size) = size.filter(|size| *size != actual) {
        let why = format!("its descriptor says {size} bytes, it has {actual}");
        return Err(ImageError::Corrupt { what: what(), why });
    }
    if !digest.verify(bytes) {
        let why = "its content has another digest".to_owned();
        return Err(ImageError::Corrupt { what: what(), why });
    }
    Ok(())
}

fn parse(digest: &Digest, bytes: &[u8], hint: Option<&str>) -> Result<Document, ImageError> {
    Document::parse(bytes, hint).map_err(|source| ImageError::Document {
        what: format!("manifest {digest}"),
        source,
    })
}

/// The document's own word, else the carrier's, else what its shape means.
fn media_type_of(bytes: &[u8], content_type: Option<&str>, document: &Document) -> &'static str {
    use crate::platform::media_type::{MANIFESTS, OCI_INDEX, OCI_MANIFEST};
    #[derive(serde::Deserialize)]
    struct MediaType {
        #[serde(rename = "mediaType")]
        media_type: Option<String>,
    }
    let known = |text: &str| MANIFESTS.into_iter().find(|known| *known == text);
    let own = serde_json::from_slice::<MediaType>(bytes)
        .ok()
        .and_then(|own| known(&own.media_type?));
    let carried = || known(content_type?.split(';').next()?.trim());
    own.or_else(carried).unwrap_or(match document {
        Document::Index(_) => OCI_INDEX,
        Document::Manifest(_) => OCI_MANIFEST,
    })
}
