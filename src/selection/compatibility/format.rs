//! The formats of compatibility documents, their limits, and errors.

use super::{CompatibilityDocument, FeatureRules, LabelRules, Models};

/// Maximum size of a document in bytes, many times that of real ones: it is parsed and kept.
pub const MAX_SIZE: u64 = 256 * 1024;
/// Maximum number of entries of a document, and of expressions and values in it: real ones have some dozens.
pub(super) const MAX_ENTRIES: usize = 256;
pub(crate) const MAX_EXPRESSIONS: usize = 4096;
/// A pattern counts as much as this many values: compiled, it may have 64 KiB.
pub(super) const COST_OF_PATTERN: usize = 16;

/// A format of compatibility documents: a layer of one of its media types, and how it is read. A new format is a file with an
/// implementation, a line in [`FORMATS`], and its media types among the layers of the artifact kind.
pub trait DocumentFormat: Sync {
    /// The media types of its layers.
    fn media_types(&self) -> &'static [&'static str];

    /// Adds to a document what a layer says.
    ///
    /// # Errors
    ///
    /// When the layer is none of this format, or too large.
    fn read(
        &self,
        layer: &[u8],
        document: &mut CompatibilityDocument,
    ) -> Result<(), InvalidDocument>;
}

/// All formats.
const FORMATS: [&dyn DocumentFormat; 3] = [&LabelRules, &FeatureRules, &Models];

/// The format of layers with this media type.
pub fn of_media_type(media_type: &str) -> Option<&'static dyn DocumentFormat> {
    let mut all = FORMATS.into_iter();
    all.find(|format| format.media_types().contains(&media_type))
}

/// What the keys of expressions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RuleKeys {
    /// Node labels: ocifit-k8s.
    Labels,
    /// Elements of features: Node Feature Discovery.
    Features,
}

/// Text that is no compatibility document.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDocument {
    /// Not YAML or JSON of this structure.
    #[error("no compatibility document: {0}")]
    Malformed(String),
    /// More entries or expressions than any real document has.
    #[error(
        "more than {MAX_ENTRIES} entries or {MAX_EXPRESSIONS} expressions and values (a pattern counts as {COST_OF_PATTERN})"
    )]
    TooManyEntries,
    /// Larger than [`MAX_SIZE`].
    #[error("{0} bytes are more than the limit of 256 KiB")]
    TooLarge(u64),
}

/// The parser's messages go on with a part of the document.
pub(super) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
