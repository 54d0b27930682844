//! Reads the documents of an image, beginning with the root, to find its platforms. Follows an
//! index into entries that do not name their platform, and a manifest into its config.

use std::{collections::HashSet, future::Future};

use bytes::Bytes;

use archaware_platform::{
    Descriptor, Document, DocumentError, ImageConfig, Index, MAX_DOCUMENT, Manifest,
    NoPlatformReason, Platform, PlatformSet, media_type::is_config,
};

use super::{digest::Digest, error::ImageError};

/// Maximum depth of nested indexes, the root included. Build tools make two at most.
const MAX_DEPTH: usize = 4;
/// Maximum number of children that are read for one image. An index with more is hostile or not an
/// image.
const MAX_CHILDREN: usize = 256;
/// Maximum bytes of all documents of one image; 256 children of typical size have 2 KiB each.
const MAX_TOTAL: usize = 16 * 1024 * 1024;
/// Maximum bytes of all documents of an image that is persisted in containerd. Larger images are
/// rare. The documents stay in memory until the whole image is read.
const MAX_PERSISTED: usize = 512 * 1024;

/// Registries serve manifests and configs under different paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum DocumentKind {
    Manifest,
    Config,
    Layer,
}

impl DocumentKind {
    /// The name in errors.
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A source of content by digest. The caller verifies the content.
pub(crate) trait Fetch: Sync {
    /// Fetches the whole content, at most [`MAX_DOCUMENT`] bytes.
    fn fetch(
        &self,
        kind: DocumentKind,
        digest: &Digest,
    ) -> impl Future<Output = Result<Bytes, ImageError>> + Send;
}

/// What archaware keeps of an image's documents.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ImageSummary {
    pub(crate) media_type: &'static str,
    pub(crate) platforms: PlatformSet,
}

/// A document that was fetched while reading an image.
#[derive(Debug, Clone)]
pub(crate) struct FetchedDocument {
    pub(crate) digest: Digest,
    pub(crate) bytes: Bytes,
    pub(crate) kind: DocumentKind,
    /// The document that refers to it; `None` for the root.
    pub(crate) parent: Option<Digest>,
}

/// An image that was read.
#[derive(Debug)]
pub(crate) struct ReadImage {
    pub(crate) summary: ImageSummary,
    /// The root first; empty if they are too large to be persisted.
    pub(crate) documents: Vec<FetchedDocument>,
    /// Whether no child was missing. A missing child may appear later, or be found in another
    /// repository or with other credentials.
    pub(crate) is_complete: bool,
}

/// Reads all documents that `root` (already fetched, with digest `digest`) leads to.
pub(crate) async fn read(
    fetch: &impl Fetch,
    digest: &Digest,
    root: &Bytes,
    content_type: Option<&str>,
) -> Result<ReadImage, ImageError> {
    verify(DocumentKind::Manifest, digest, None, root)?;
    let document = parse(digest, root, content_type)?;
    let media_type = media_type_of(root, content_type, &document);
    let mut reader = DocumentReader {
        fetch,
        seen: HashSet::from([digest.clone()]),
        children: 0,
        total: 0,
        gone: 0,
        documents: Vec::new(),
    };
    reader.add(FetchedDocument {
        digest: digest.clone(),
        bytes: root.clone(),
        kind: DocumentKind::Manifest,
        parent: None,
    })?;
    let platforms = match document {
        Document::Manifest(manifest) => reader.manifest(digest, manifest).await?,
        Document::Index(index) => reader.index(digest, index).await?,
    };
    let summary = ImageSummary {
        media_type,
        platforms,
    };
    Ok(ReadImage {
        summary,
        is_complete: reader.gone == 0,
        documents: reader.documents,
    })
}

struct DocumentReader<'a, F> {
    fetch: &'a F,
    seen: HashSet<Digest>,
    children: usize,
    total: usize,
    /// Children that were not found.
    gone: usize,
    documents: Vec<FetchedDocument>,
}

impl<F: Fetch> DocumentReader<'_, F> {
    async fn manifest(
        &mut self,
        parent: &Digest,
        manifest: Manifest,
    ) -> Result<PlatformSet, ImageError> {
        let Some(config) = manifest.config else {
            return Ok(PlatformSet::None(NoPlatformReason::NotAnImage));
        };
        let (digest, bytes) = self.read(DocumentKind::Config, parent, &config).await?;
        match ImageConfig::parse(&bytes) {
            Ok(ImageConfig(platforms)) => Ok(platforms),
            // A media type that is empty or unspecific (`application/octet-stream`) was taken for a
            // config. The content is something else.
            Err(DocumentError::Malformed(_)) if !is_config(&config.media_type) => {
                Ok(PlatformSet::None(NoPlatformReason::NotAnImage))
            }
            Err(source) => Err(ImageError::Document {
                what: format!("config {digest}"),
                source,
            }),
        }
    }

    /// A worklist instead of recursion, so that hostile data cannot overflow the stack.
    async fn index(&mut self, digest: &Digest, root: Index) -> Result<PlatformSet, ImageError> {
        let mut platforms: Vec<Platform> = Vec::new();
        let mut images = 0_usize;
        let mut work = vec![(1_usize, digest.clone(), root)];
        while let Some((depth, parent, index)) = work.pop() {
            if depth > MAX_DEPTH {
                return Err(ImageError::TooDeep(
                    "indexes are nested deeper than 4 levels",
                ));
            }
            images += index.platforms.len();
            platforms.extend(index.platforms);
            for descriptor in index.without_platform {
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
                    // Some registries garbage-collect unused children. The remaining ones still
                    // count.
                    Err(ImageError::NotFound { .. }) => self.gone += 1,
                    Err(error) => return Err(error),
                }
            }
        }
        if images > 0 && self.gone == images {
            return Err(ImageError::NotFound {
                what: "every image of the index".to_owned(),
            });
        }
        Ok(PlatformSet::new(
            platforms,
            NoPlatformReason::NoArchitecture,
        ))
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
        let (digest, bytes) = self
            .read(DocumentKind::Manifest, parent, descriptor)
            .await?;
        parse(&digest, &bytes, Some(&descriptor.media_type))
    }

    async fn read(
        &mut self,
        kind: DocumentKind,
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
        self.add(FetchedDocument {
            digest: digest.clone(),
            bytes: bytes.clone(),
            kind,
            parent: Some(parent.clone()),
        })?;
        Ok((digest, bytes))
    }

    fn add(&mut self, document: FetchedDocument) -> Result<(), ImageError> {
        self.total += document.bytes.len();
        if self.total > MAX_TOTAL {
            return Err(ImageError::too_large(
                "all of the image's documents",
                self.total as u64,
            ));
        }
        if self.total > MAX_PERSISTED {
            self.documents = Vec::new();
        } else {
            self.documents.push(document);
        }
        Ok(())
    }
}

/// Verifies the size, if known, and the digest. Applies to all content, whatever its source.
pub(crate) fn verify(
    kind: DocumentKind,
    digest: &Digest,
    size: Option<u64>,
    bytes: &Bytes,
) -> Result<(), ImageError> {
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

/// The document's `mediaType`, else the registry's `Content-Type`, else the type that the
/// document's structure implies.
fn media_type_of(bytes: &[u8], content_type: Option<&str>, document: &Document) -> &'static str {
    use archaware_platform::media_type::{MANIFESTS, OCI_INDEX, OCI_MANIFEST};
    #[derive(serde::Deserialize)]
    struct MediaType {
        #[serde(rename = "mediaType")]
        media_type: Option<String>,
    }
    let known = |text: &str| MANIFESTS.into_iter().find(|known| *known == text);
    let own_type = serde_json::from_slice::<MediaType>(bytes)
        .ok()
        .and_then(|document| known(&document.media_type?));
    let carried = || known(content_type?.split(';').next()?.trim());
    own_type.or_else(carried).unwrap_or(match document {
        Document::Index(_) => OCI_INDEX,
        Document::Manifest(_) => OCI_MANIFEST,
    })
}
