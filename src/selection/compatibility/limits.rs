//! The kind of keys in compatibility documents, limits of documents, and errors.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{bounded::Budget, json::remove_nulls, text::brief};

/// Maximum size of a document in bytes, many times that of real documents: it is parsed and kept.
pub const MAX_SIZE: usize = 256 * 1024;
/// Maximum number of entries of a document, and of expressions and values in it; real documents
/// have some dozens.
pub(super) const MAX_ENTRIES: usize = 256;
pub(super) const MAX_EXPRESSIONS: usize = 4096;
/// A pattern counts as this many values in the cost of an expression.
pub(super) const COST_OF_PATTERN: usize = 32;
/// Maximum number of elements of a document, where each alias counts as its whole content.
const MAX_ELEMENTS: usize = 16 * 1024;
/// Estimated bytes of memory for one element, such as a rule or an expression.
const MEMORY_OF_ELEMENT: usize = 128;
/// Maximum size of a compiled pattern in bytes. Usual patterns for label values need a tenth.
pub(super) const MAX_PATTERN: usize = 16 * 1024;
/// Bytes of memory for a pattern: compiled for both directions, with the caches of its matches.
pub(super) const MEMORY_OF_PATTERN: usize = 4 * MAX_PATTERN;
/// Maximum bytes of memory for the documents of all platforms of an image together, and for the
/// documents of all containers of a pod together.
pub(crate) const MAX_MEMORY: usize = 16 * 1024 * 1024;
/// Maximum characters of a text of a document in a message, and of a message about a document.
pub(super) const MAX_TEXT: usize = 64;
/// Maximum number of values of an expression in a message.
pub(super) const MAX_VALUES: usize = 4;
const MAX_MESSAGE: usize = 256;
/// Maximum characters of a tag in a message. A tag may be an image reference.
pub(super) const MAX_TAG: usize = 256;

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
    /// More entries, expressions or elements than any real document has.
    #[error(
        "the document exceeds one of the limits: {MAX_ENTRIES} entries; {MAX_EXPRESSIONS} expressions and values (a pattern counts \
         as {COST_OF_PATTERN}); {MAX_ELEMENTS} YAML elements; 256 KiB, where each alias counts as its whole content"
    )]
    TooManyEntries,
    /// Larger than [`MAX_SIZE`].
    #[error("{0} bytes are more than the limit of 256 KiB")]
    TooLarge(usize),
}

impl InvalidDocument {
    /// The first line of an error: the further lines of the parser quote the document.
    pub(super) fn malformed(error: impl std::fmt::Display) -> Self {
        let text = error.to_string();
        Self::Malformed(brief(text.lines().next().unwrap_or_default(), MAX_MESSAGE))
    }
}

/// Parses YAML (JSON is a subset). Also returns the bytes that the value takes in memory.
///
/// Parses to a JSON value first: the YAML parser's code for each type would be large.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, usize), InvalidDocument> {
    if bytes.len() > MAX_SIZE {
        return Err(InvalidDocument::TooLarge(bytes.len()));
    }
    let text = std::str::from_utf8(bytes);
    let text = text.map_err(|_| InvalidDocument::malformed("not UTF-8"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let budget = Budget::new(MAX_ELEMENTS, MAX_SIZE);
    // The parser copies the content of an anchor, and repeats it for each alias.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: 1,
            max_recorded_anchor_events: MAX_ELEMENTS,
            max_recorded_anchor_bytes: bytes.len(),
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 2 * MAX_ELEMENTS,
        },
    };
    let mut value: Value =
        serde_saphyr::with_deserializer_from_str_with_options(text, options, |input| {
            budget.parse(input)
        })
        .map_err(InvalidDocument::malformed)?;
    if budget.is_exceeded() {
        return Err(InvalidDocument::TooManyEntries);
    }
    let (elements, text) = budget.used();
    remove_nulls(&mut value);
    let parsed = T::deserialize(value).map_err(InvalidDocument::malformed)?;
    Ok((parsed, elements * MEMORY_OF_ELEMENT + text))
}
