//! The documentation is true as far as a program can tell: its links lead somewhere, sources that
//! it names exist, outputs that it shows are printed, and its tables are complete.
//! `tests/cluster/tutorial.rs` types the commands of the tutorial.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use archaware::cluster::events::EventReason;
use regex::Regex;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Every page, by its path.
fn pages() -> BTreeMap<PathBuf, String> {
    let folder = fs::read_dir(root().join("docs")).unwrap();
    let pages = folder.map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
    pages
        .chain([root().join("README.md")])
        .map(|path| (path.clone(), read(path)))
        .collect()
}

/// The anchors of a page, made from its headings as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let link = Regex::new(r"\[([^\]]*)\]\([^)]*\)").unwrap();
    let mut is_code = false;
    let headings = page.lines().filter(|line| {
        is_code ^= line.starts_with("```");
        !is_code && line.starts_with('#')
    });
    headings
        .map(|line| {
            let text = link.replace_all(line.trim_start_matches('#').trim(), "$1");
            let kept = text.chars().filter_map(|c| match c {
                ' ' => Some('-'),
                '-' | '_' => Some(c),
                _ => c.is_alphanumeric().then(|| c.to_ascii_lowercase()),
            });
            kept.collect()
        })
        .collect()
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let mut checked = 0;
    for (path, text) in &pages {
        for link in link.captures_iter(text) {
            let target = link.get(1).unwrap().as_str();
            if target.starts_with("https://") {
                continue;
            }
            checked += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let named = path.parent().unwrap().join(file);
            let file = if file.is_empty() { path } else { &named };
            let file = file.canonicalize();
            let file = file.unwrap_or_else(|_| panic!("{}: {target}", path.display()));
            if anchor.is_empty() {
                continue;
            }
            let known = pages
                .get(&file)
                .is_some_and(|page| anchors(page).contains(anchor));
            assert!(known, "{}: {target}", path.display());
        }
    }
    assert!(checked > 100, "{checked}");
}

/// Each page begins with a title, and the index lists it.
#[test]
fn pages_are_found() {
    let index = read("docs/README.md");
    for (path, text) in pages() {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(text.starts_with("# "), "{name} has no title");
        assert!(
            name == "README.md" || index.contains(&format!("]({name})")),
            "docs/README.md does not list {name}"
        );
    }
}

/// A claim in the documentation names the tests that show it.
#[test]
fn sources_that_the_documentation_names_exist() {
    let mut all = Vec::new();
    for folder in [
        "src",
        "crates",
        "tests",
        "testimg",
        "testsupport",
        "benches",
    ] {
        every_source(&root().join(folder), &mut all);
    }
    // As docs/development.md writes them.
    let short = |path: &PathBuf| path.iter().filter(|name| *name != "src").collect();
    let short: Vec<PathBuf> = all.iter().map(short).collect();
    all.extend(short);
    let mut named = 0;
    for (page, text) in pages() {
        let quoted = text.split('`').skip(1).step_by(2);
        let is_source = |name: &&str| {
            !name.contains(' ') && Path::new(name).extension().is_some_and(|end| end == "rs")
        };
        for name in quoted.filter(is_source) {
            named += 1;
            let known = all.iter().any(|source| source.ends_with(name));
            assert!(known, "{}: {name} does not exist", page.display());
        }
    }
    assert!(named > 50, "{named}");
}

/// Every YAML block is YAML, and every configuration is one.
#[test]
fn yaml_is_valid() {
    let mut configurations = 0;
    for (path, text) in pages() {
        let blocks = text.split("```yaml\n").skip(1);
        let blocks = blocks.map(|block| block.split("```").next().unwrap());
        for document in blocks.flat_map(|block| block.split("\n---\n")) {
            let value: Result<serde_json::Value, _> = serde_saphyr::from_str(document);
            let value = value.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            if value["kind"] == "Configuration" {
                configurations += 1;
                let parsed = archaware::config::parse("docs", document);
                parsed.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
        }
    }
    assert!(configurations > 4, "{configurations}");
}

/// What a page shows as printed by a command: the indented lines after it.
fn shown<'a>(page: &'a str, command: &str) -> Vec<&'a str> {
    let mut lines = page
        .lines()
        .skip_while(|line| !line.trim().starts_with(command));
    assert!(lines.next().is_some(), "there is no {command}");
    let code = lines.map_while(|line| {
        let is_empty = line.is_empty().then_some("");
        is_empty.or_else(|| line.strip_prefix("    "))
    });
    code.collect()
}

/// What the documentation shows is what is printed. README.md shows parts of it, after `…`.
#[test]
fn outputs_in_the_documentation_are_real() {
    for (page, command, output) in [
        (
            "docs/explain.md",
            "$ archaware explain",
            "explain/web-80.txt",
        ),
        (
            "docs/report.md",
            "$ archaware report",
            "report/cluster-80.txt",
        ),
        ("README.md", "$ archaware explain", "explain/web-80.txt"),
        ("README.md", "$ archaware report", "report/cluster-80.txt"),
    ] {
        let text = read(page);
        let shown = shown(&text, command).join("\n");
        let output = read(Path::new("tests/cluster").join(output));
        let (shown, output) = (shown.trim(), output.trim());
        let is_real = match shown.strip_prefix("…\n") {
            Some(part) => output.contains(part),
            None => shown.ends_with(output),
        };
        assert!(is_real, "{page} shows:\n{shown}\nprinted is:\n{output}");
    }
}

/// The names in the first column of the tables of docs/annotations.md, or after the kind of object
/// in the second.
fn documented(section: &str) -> BTreeSet<String> {
    let page = read("docs/annotations.md");
    let section = page
        .split("\n## ")
        .find(|part| part.starts_with(section))
        .unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let name = Regex::new("`([^`]+)`").unwrap();
    rows.filter_map(|row| Some(name.captures(row)?.get(1)?.as_str().to_owned()))
        .collect()
}

#[test]
fn every_annotation_and_event_is_documented() {
    let known = |file: &str, pattern: &str| -> BTreeSet<String> {
        let text = read(file);
        let pattern = Regex::new(pattern).unwrap();
        pattern
            .captures_iter(&text)
            .map(|found| found.get(1).unwrap().as_str().to_owned())
            .collect()
    };
    let events = <EventReason as strum::VariantNames>::VARIANTS;
    let events: BTreeSet<String> = events.iter().map(|name| (*name).to_owned()).collect();
    assert!(events.len() > 10, "{events:?}");
    assert_eq!(documented("Events"), events);
    let names = known(
        "crates/placement/src/lib.rs",
        r#"const [A-Z_]+: &str = "(archaware\.dev/[a-z-]+)";"#,
    );
    assert!(names.len() > 10, "{names:?}");
    let documented: BTreeSet<String> = [
        documented("What you can write"),
        documented("What archaware writes"),
    ]
    .into_iter()
    .flatten()
    .filter(|name| !name.contains('<'))
    .collect();
    assert_eq!(documented, names);
}

fn every_source(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            every_source(&path, found);
        } else {
            found.push(path);
        }
    }
}
