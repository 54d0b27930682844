//! Reads manifests: files, folders and stdin.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::{cluster::workload, files::without_byte_order_mark};

/// Maximum bytes of a file; a large Helm chart renders to some MiB.
const MAX_FILE: u64 = 64 << 20;
/// Maximum number of files in folders.
const MAX_FILES: usize = 10_000;

/// The objects of files.
#[derive(Default)]
pub(super) struct Manifests {
    /// Each object with the name of its file, for messages.
    pub(super) objects: Vec<(String, Value)>,
    /// Files of a folder that cannot be parsed, with the reason: a folder may contain templates of
    /// a chart.
    pub(super) unread: Vec<(String, String)>,
}

/// The objects of a file or of all manifests in a folder; `-` is stdin.
pub(super) fn read(path: &Path) -> anyhow::Result<Manifests> {
    let mut files = Vec::new();
    let is_folder = path.is_dir();
    if is_folder {
        collect(path, &mut files)?;
    } else {
        files.push(path.to_owned());
    }
    let mut manifests = Manifests::default();
    for file in files {
        let name = name_of(&file);
        match parse(&text(&file)?) {
            Ok(documents) => {
                let objects = documents.into_iter().flat_map(workload::objects);
                let objects = objects.map(|object| (name.clone(), object));
                manifests.objects.extend(objects);
            }
            Err(error) if is_folder => {
                let why = format!("it is not YAML: {}", first_line(&error));
                manifests.unread.push((name, why));
            }
            Err(error) => return Err(error).with_context(|| format!("{name} is not YAML")),
        }
    }
    Ok(manifests)
}

/// The first line of an error. The other lines quote the file.
fn first_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().next().unwrap_or_default().to_owned()
}

/// The last of several equal keys wins, as in `kubectl` and Helm.
const LAST_WINS: serde_saphyr::DuplicateKeyPolicy = serde_saphyr::DuplicateKeyPolicy::LastWins;

/// The YAML documents of a text. The parser's default limits are too low for a chart with thousands
/// of objects, so they are raised; [`MAX_FILE`] bounds the work.
fn parse(text: &str) -> anyhow::Result<Vec<Value>> {
    // A stream of JSON objects, as `jq` prints it, is not YAML.
    let is_json = text.trim_start().starts_with('{');
    let stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    if is_json && let Ok(objects) = stream.collect() {
        return Ok(objects);
    }
    let budget = serde_saphyr::budget! {
        max_documents: 100_000,
        max_nodes: 10_000_000,
        max_events: 40_000_000,
    };
    let options =
        serde_saphyr::options! { with_snippet: false, budget: budget, duplicate_keys: LAST_WINS };
    Ok(serde_saphyr::from_multiple_with_options(text, options)?)
}

/// The manifests of a folder and the folders in it, by name.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let cannot_read = || format!("cannot read {}", folder.display());
    let entries = std::fs::read_dir(folder).with_context(cannot_read)?;
    let entries: Result<Vec<_>, _> = entries.collect();
    let mut entries = entries.with_context(cannot_read)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        // Do not follow symbolic links to folders: they may form a cycle.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_manifest = path
            .extension()
            .is_some_and(|end| end == "yaml" || end == "yml" || end == "json");
        if is_folder {
            collect(&path, files)?;
        } else if is_manifest {
            files.push(path);
        }
        if files.len() > MAX_FILES {
            bail!("{} has more than {MAX_FILES} manifests", folder.display());
        }
    }
    Ok(())
}

/// The name of a file in messages; `-` is stdin.
fn name_of(file: &Path) -> String {
    if file.as_os_str() == "-" {
        "stdin".to_owned()
    } else {
        file.display().to_string()
    }
}

/// The text of a file, or of stdin.
pub(super) fn text(file: &Path) -> anyhow::Result<String> {
    let read = |source: &mut dyn Read| {
        let mut text = String::new();
        let read = source.take(MAX_FILE + 1).read_to_string(&mut text);
        read.map(|_| text)
    };
    let name = name_of(file);
    let text = if file.as_os_str() == "-" {
        read(&mut std::io::stdin().lock())
    } else {
        std::fs::File::open(file).and_then(|mut file| read(&mut file))
    };
    let text = text.with_context(|| format!("cannot read {name}"))?;
    if text.len() as u64 > MAX_FILE {
        bail!("{name} is larger than {MAX_FILE} bytes");
    }
    Ok(without_byte_order_mark(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_read_in_order_and_errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("b.yaml", "kind: B\n---\nkind: C\n");
        write("a/a.yml", "kind: List\nitems: [{kind: A}]\n");
        write("c.json", r#"{"kind": "D"}"#);
        write("README.md", "kind: [");
        let kinds = || -> anyhow::Result<Vec<String>> {
            let objects = read(folder.path())?;
            Ok(objects
                .objects
                .iter()
                .map(|(_, object)| object["kind"].as_str().unwrap().to_owned())
                .collect())
        };
        assert_eq!(kinds().unwrap(), ["A", "B", "C", "D"]);
        // A folder may contain a chart's templates; a file was named on purpose.
        write("broken.yaml", "kind: {{ .Values.kind }}");
        assert_eq!(kinds().unwrap(), ["A", "B", "C", "D"]);
        let unread = read(folder.path()).unwrap().unread;
        assert!(unread[0].0.ends_with("broken.yaml"), "{unread:?}");
        let broken = read(&folder.path().join("broken.yaml"));
        let error = broken.err().unwrap().to_string();
        assert!(error.ends_with("broken.yaml is not YAML"), "{error}");
        write(
            "broken.yaml",
            "\u{feff}{\"kind\": \"E\"}\n{\"kind\": \"F\"} {\"kind\": \"G\"}",
        );
        assert_eq!(kinds().unwrap(), ["A", "B", "C", "E", "F", "G", "D"]);
        assert!(read(&folder.path().join("none")).is_err());
    }
}
