//! The shape of the source. The modules of the program form layers: each module uses only modules
//! above it in this list. Cargo is the wall between the libraries in `crates/`.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

mod circles;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// From modules without dependencies to the command line.
const LAYERS: [&str; 20] = [
    "connections",
    "telemetry",
    // Libraries.
    "platform",
    "placement",
    "image",
    "metrics",
    "config",
    "cluster",
    "content_proxy",
    "evaluate",
    "selection",
    "sources",
    "explain",
    "report",
    "plan",
    "controller",
    "admission",
    "server",
    "cli",
    "main",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() && name != "tests" {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// A source text without its comments and tests, as one line.
fn production_code(text: &str) -> String {
    let code = text.lines().map(|line| line.split("//").next().unwrap());
    let code: Vec<&str> = code
        .take_while(|line| line.trim() != "mod tests {")
        .collect();
    code.join(" ")
}

/// The modules that a source text names after `crate::`, except in its tests.
fn used(text: &str) -> BTreeSet<String> {
    let code = production_code(text);
    let mut used = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let name = |text: &str| -> String {
            let is_name = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
            text.trim_start().chars().take_while(is_name).collect()
        };
        let Some(tree) = rest.strip_prefix('{') else {
            used.insert(name(rest));
            continue;
        };
        let (mut depth, mut starts) = (1, true);
        for (at, c) in tree.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
            if starts && !c.is_whitespace() {
                used.insert(name(&tree[at..]));
                starts = false;
            }
            starts |= depth == 1 && c == ',';
        }
    }
    used.retain(|name| !name.is_empty());
    used
}

#[test]
fn every_module_uses_only_layers_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&root).unwrap();
        let first = relative.iter().next().unwrap().to_str().unwrap();
        let own = first.trim_end_matches(".rs");
        if own == "lib" || own == "scripted_api" {
            continue;
        }
        let own_layer = layer(own).unwrap_or_else(|| panic!("{own} is in no layer: add it"));
        for other in used(&fs::read_to_string(&file).unwrap()) {
            if layer(&other).is_some_and(|layer| layer > own_layer) {
                wrong.push(format!("{} uses {other}", relative.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A task that keeps its thread from other tasks shows in the metrics (`base/tasks.rs`).
#[test]
fn the_polls_of_all_tasks_are_timed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "crates"] {
        sources(&root.join(folder), &mut files);
    }
    let (mut timed, mut untimed) = (0, Vec::new());
    let others = |file: &&PathBuf| !file.ends_with("base/src/tasks.rs");
    for file in files.iter().filter(others) {
        let code = production_code(&fs::read_to_string(file).unwrap());
        for (before, arguments) in code
            .match_indices("spawn(")
            .map(|(at, _)| code.split_at(at))
        {
            // `tasks.spawn(…)` of a set of tasks, or `tokio::spawn(…)`; without arguments, it
            // starts a process.
            let arguments = arguments.trim_start_matches("spawn(").trim_start();
            if before.ends_with("tasks::") || arguments.starts_with("tasks::timed(") {
                timed += 1;
            } else if before.ends_with([':', '.']) && !arguments.starts_with([')', '"']) {
                let start: String = arguments.chars().take(60).collect();
                untimed.push(format!("{}: spawn({start}", file.display()));
            }
        }
        if code.contains("TokioExecutor") {
            untimed.push(format!("{}: TokioExecutor", file.display()));
        }
    }
    assert!(timed > 20, "{timed}");
    assert!(untimed.is_empty(), "{}", untimed.join("\n"));
}

/// rustfmt leaves comments as they are. Tables cannot be wrapped.
#[test]
fn comment_lines_are_as_short_as_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "crates"] {
        sources(&root.join(folder), &mut files);
    }
    let mut long = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (index, line) in text.lines().enumerate() {
            let comment = line.trim_start();
            let is_table = comment.starts_with("//! |");
            if comment.starts_with("//") && !is_table && line.chars().count() > 100 {
                long.push(format!("{}:{}", file.display(), index + 1));
            }
        }
    }
    assert!(long.is_empty(), "over 100 characters:\n{}", long.join("\n"));
}

#[test]
fn uses_are_found() {
    let text = "use crate::{a::b, c::{d, e}, f};\nlet x = crate::g::h(); // crate::i\nmod tests {\nuse crate::j;";
    let expected = ["a", "c", "f", "g"].map(str::to_owned);
    assert_eq!(used(text), expected.into());
}
