//! Files that people write: small ones.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Larger files hold no configuration, no credential and no certificate.
const MAX_SIZE: u64 = 1024 * 1024;

/// A file cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what}{}", path.display())]
pub struct FileError {
    /// What it is to hold, with a space behind it; may be empty.
    what: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The whole of a file of at most 1 MiB.
pub(crate) fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, FileError> {
    let read = || {
        if std::fs::metadata(path)?.len() > MAX_SIZE {
            return Err(io::Error::other("it is larger than 1 MiB"));
        }
        std::fs::read(path)
    };
    read().map_err(failed(what, path))
}

/// The same, as text.
pub(crate) fn read_text(what: &'static str, path: &Path) -> Result<String, FileError> {
    let text = String::from_utf8(read(what, path)?);
    text.map_err(|_| failed(what, path)(io::Error::other("it is not UTF-8")))
}

/// An error of a file.
pub(crate) fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError {
        what,
        path: path.clone(),
        source,
    }
}
