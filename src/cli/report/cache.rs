//! A cache file of resolved images: a report that was interrupted, or is made again, asks
//! registries only for images that the file lacks.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;

use crate::image::{Resolved, Resolver, SavedImage};

/// Maximum bytes of the file, for about 100,000 images. A larger file is replaced by an empty one.
const MAX_SIZE: u64 = 32 << 20;

/// A file with one image in each line.
pub(super) struct ReportCache(Mutex<File>);

impl ReportCache {
    /// The user's cache file; `None` if neither `XDG_CACHE_HOME` nor `HOME` is an absolute path.
    pub(super) fn default_path() -> Option<PathBuf> {
        let named = |name: &str| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let folder = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
        Some(folder?.join("archaware/images.jsonl"))
    }

    /// Opens the file, restores its images into the resolver, and keeps the file open for new
    /// images. Lines that cannot be parsed are left out.
    pub(super) fn open(path: &Path, resolver: &Resolver) -> std::io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let is_large = fs::metadata(path).is_ok_and(|file| file.len() > MAX_SIZE);
        let mut options = OpenOptions::new();
        options.create(true).read(true).mode(0o600);
        // In append mode each line is one write, so that concurrent reports do not mix their lines.
        // A file that is too large is truncated, which Rust does not allow in append mode.
        options.append(!is_large).write(is_large).truncate(is_large);
        let file = options.open(path)?;
        for line in BufReader::new(&file).lines() {
            if let Ok(saved) = serde_json::from_str::<SavedImage>(&line?) {
                resolver.restore(&saved);
            }
        }
        Ok(Self(Mutex::new(file)))
    }

    /// Keeps an answer for later reports.
    pub(super) fn keep(&self, resolver: &Resolver, resolved: &Resolved) {
        let Some(saved) = resolver.save(resolved) else {
            return;
        };
        let Ok(mut line) = serde_json::to_vec(&saved) else {
            return;
        };
        line.push(b'\n');
        if let Err(error) = self.0.lock().write_all(&line) {
            tracing::debug!(%error, "cannot keep an answer for later reports");
        }
    }
}
