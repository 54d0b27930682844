//! The kind of keys in compatibility documents, limits of documents, and errors.

/// Maximum size of a document in bytes, many times that of real documents: it is parsed and kept.
pub const MAX_SIZE: u64 = 256 * 1024;
/// Maximum number of entries of a document, and of expressions and values in it; real documents
/// have some dozens.
pub(super) const MAX_ENTRIES: usize = 256;
pub(crate) const MAX_EXPRESSIONS: usize = 4096;
/// The cost of a pattern: compiled, it may have 64 KiB.
pub(super) const COST_OF_PATTERN: usize = 16;

/// The kind of keys in expressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RuleKeys {
    /// Node labels, in documents of ocifit-k8s.
    Labels,
    /// Elements of features, in documents of Node Feature Discovery.
    Features,
}

/// Why text is not a compatibility document.
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

/// The first line of an error: the parser's further lines quote the document.
pub(super) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
