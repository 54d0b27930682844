//! What earlier reports found out about images: a report that was interrupted, or is made again,
//! asks registries for the rest only.

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
    /// The file of this user; `None` if there is no place for it.
    pub(super) fn default_path() -> Option<PathBuf> {
        let named = |name: &str| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let folder = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
        Some(folder?.join("archaware/images.jsonl"))
    }

    /// Gives a resolver what the file has, and opens it for more. Lines that cannot be understood
    /// are left out.
    pub(super) fn open(path: &Path, resolver: &Resolver) -> std::io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let is_large = fs::metadata(path).is_ok_and(|file| file.len() > MAX_SIZE);
        let mut options = OpenOptions::new();
        options.create(true).read(true).mode(0o600);
        // Each line is written at once, so that reports that run side by side do not mix theirs.
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
