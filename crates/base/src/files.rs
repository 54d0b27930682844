//! Reads small files: configuration, credentials, certificates.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Configuration, credentials and certificates are smaller than this.
const MAX_SIZE: u64 = 1024 * 1024;

/// A file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what}{}", path.display())]
pub struct FileError {
    /// What the file should contain, followed by a space; may be empty.
    what: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Reads a file of at most 1 MiB, without its byte order mark.
///
/// # Errors
///
/// When the file is missing, unreadable or larger.
pub fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, FileError> {
    let read = || {
        if std::fs::metadata(path)?.len() > MAX_SIZE {
            return Err(io::Error::other("it is larger than 1 MiB"));
        }
        std::fs::read(path).map(without_mark)
    };
    read().map_err(failed(what, path))
}

/// Reads a UTF-8 file of at most 1 MiB.
///
/// # Errors
///
/// When the file is missing, unreadable, larger or not UTF-8.
pub fn read_text(what: &'static str, path: &Path) -> Result<String, FileError> {
    let text = String::from_utf8(read(what, path)?);
    text.map_err(|_| failed(what, path)(io::Error::other("it is not UTF-8")))
}

/// The text without a byte order mark at its beginning, which some editors of Windows write.
pub fn without_byte_order_mark(mut text: String) -> String {
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    text
}

fn without_mark(mut bytes: Vec<u8>) -> Vec<u8> {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    bytes
}

/// Builds the [`FileError`] of a path.
pub fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError {
        what,
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_content() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (content, expected) in [
            ("\u{feff}kind: A", "kind: A"),
            ("kind: \u{feff}", "kind: \u{feff}"),
            ("", ""),
        ] {
            std::fs::write(file.path(), content).unwrap();
            assert_eq!(read_text("", file.path()).unwrap(), expected);
            assert_eq!(without_byte_order_mark(content.to_owned()), expected);
        }
    }
}
