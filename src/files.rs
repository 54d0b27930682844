//! Files that people write: small ones.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Larger files hold no configuration, no credential and no certificate.
const MAX_SIZE: u64 = 1024 * 1024;

/// The whole of a file of at most 1 MiB.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.len() > MAX_SIZE {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    std::fs::read(path)
}

/// The same, as text.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// The same off the runtime's workers: a file system may hang.
pub(crate) async fn read_text_async(path: PathBuf) -> io::Result<String> {
    let read = tokio::task::spawn_blocking(move || read_text(&path)).await;
    read.unwrap_or_else(|failed| Err(io::Error::other(failed)))
}
