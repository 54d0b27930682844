//! Within a layer, too, modules do not use each other in a circle. A module and the modules inside
//! of it are one thing here: a child may use its parent, and the parent names its children. A path
//! through an imported module counts as a use of that module only.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The names of a path, from the root of the crate.
type Module = Vec<String>;
/// What each module uses.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// The paths that a use tree names, for example `a::{b, c::d}`.
fn expand(tree: &str, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let names = |text: &str| -> Vec<String> {
        let parts = text.split("::").map(str::trim);
        let parts = parts.filter(|part| !part.is_empty());
        prefix
            .iter()
            .cloned()
            .chain(parts.map(str::to_owned))
            .collect()
    };
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap();
        if !path.is_empty() {
            found.push(names(path));
        }
        return;
    };
    let (prefix, inner) = (names(head), rest.trim_end().strip_suffix('}').unwrap());
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&inner[start..at], &prefix, found);
                start = at + 1;
            }
            _ => {}
        }
    }
    expand(&inner[start..], &prefix, found);
}

/// A source text without comments and tests.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap());
    let lines = lines.take_while(|line| line.trim() != "mod tests {");
    lines.collect::<Vec<_>>().join("\n")
}

/// The use trees of a source text, and whether each is public.
fn uses(code: &str) -> Vec<(bool, &str)> {
    let items = code.split(';').filter_map(|item| {
        let (before, tree) = item.rsplit_once("use ")?;
        let visibility = before.rsplit('\n').next().unwrap().trim();
        let is_use = visibility.is_empty() || visibility.starts_with("pub");
        is_use.then_some((!visibility.is_empty(), tree))
    });
    items.collect()
}

/// The paths with `crate`, `self` or `super` in the middle of code.
fn inline(code: &str) -> Vec<Vec<String>> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = code.split(|c| !is_path(c));
    let roots = ["crate::", "super::", "self::"];
    let paths = words.filter(|word| roots.iter().any(|root| word.starts_with(root)));
    paths
        .map(|path| path.split("::").map(str::to_owned).collect())
        .collect()
}

/// A path as seen from a module, from the root of the crate.
fn absolute(path: &[String], from: &Module) -> Vec<String> {
    let mut base = from.clone();
    for (at, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" => base.clear(),
            "self" => {}
            "super" => drop(base.pop()),
            _ => return base.into_iter().chain(path[at..].iter().cloned()).collect(),
        }
    }
    base
}

/// Which module uses which, by the texts of all modules.
fn graph(texts: &BTreeMap<Module, String>) -> Graph {
    // The longest part of a path that is a module, and the name in it.
    let locate = |path: &[String]| -> Option<(Module, Option<String>)> {
        let lengths = (0..=path.len()).rev();
        let mut parts = lengths.map(|length| path.split_at(length));
        let (module, rest) = parts.find(|(module, _)| texts.contains_key(*module))?;
        Some((module.to_vec(), rest.first().cloned()))
    };
    let mut found: Vec<(&Module, bool, Vec<String>)> = Vec::new();
    for (module, text) in texts {
        for (is_public, tree) in uses(text) {
            let mut paths = Vec::new();
            expand(tree, &[], &mut paths);
            let paths = paths
                .iter()
                .map(|path| (module, is_public, absolute(path, module)));
            found.extend(paths);
        }
        let paths = inline(text).into_iter();
        found.extend(paths.map(|path| (module, false, absolute(&path, module))));
    }
    let mut exported: BTreeMap<(Module, String), Module> = BTreeMap::new();
    for (module, is_public, path) in &found {
        if let (true, Some((target, Some(name)))) = (is_public, locate(path))
            && target != **module
        {
            exported.insert(((*module).clone(), name), target);
        }
    }
    let mut graph = Graph::new();
    for (module, _, path) in &found {
        let Some((mut target, name)) = locate(path) else {
            continue;
        };
        while let Some(name) = &name
            && let Some(origin) = exported.get(&(target.clone(), name.clone()))
        {
            target.clone_from(origin);
        }
        let is_inside = target.starts_with(module) || module.starts_with(&target);
        if !is_inside {
            graph.entry((*module).clone()).or_default().insert(target);
        }
    }
    graph
}

/// The uses that are part of a circle, or lead from one circle to another.
fn circles(mut graph: Graph) -> Graph {
    loop {
        let used: BTreeSet<Module> = graph.values().flatten().cloned().collect();
        let using: BTreeSet<Module> = graph.keys().cloned().collect();
        let before = graph.values().map(BTreeSet::len).sum::<usize>();
        graph.retain(|module, uses| {
            uses.retain(|one| using.contains(one));
            used.contains(module) && !uses.is_empty()
        });
        if graph.values().map(BTreeSet::len).sum::<usize>() == before {
            return graph;
        }
    }
}

/// The modules of a crate with their code. The root of the crate has the empty path.
fn modules(root: &Path) -> BTreeMap<Module, String> {
    let mut files = Vec::new();
    super::sources(root, &mut files);
    let modules = files.iter().map(|file| {
        let relative = file.strip_prefix(root).unwrap().with_extension("");
        let names = relative
            .iter()
            .map(|name| name.to_str().unwrap().to_owned());
        let module = names
            .filter(|name| name != "mod" && name != "lib")
            .collect();
        (module, code(&fs::read_to_string(file).unwrap()))
    });
    modules.collect()
}

#[test]
fn no_modules_use_each_other_in_a_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(root.join("crates")).unwrap();
    let crates = crates.map(|entry| entry.unwrap().path());
    let (mut uses, mut found) = (0, Vec::new());
    for package in crates.chain([root.to_owned()]) {
        let graph = graph(&modules(&package.join("src")));
        uses += graph.values().map(BTreeSet::len).sum::<usize>();
        for (module, uses) in circles(graph) {
            let uses: Vec<String> = uses.iter().map(|one| one.join("::")).collect();
            let (package, module) = (package.display(), module.join("::"));
            found.push(format!("{package}: {module} uses {}", uses.join(", ")));
        }
    }
    assert!(uses > 500, "only {uses} uses are found");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn circles_are_found() {
    let module = |name: &str| -> Module { name.split("::").map(str::to_owned).collect() };
    let of = |all: &[(&str, &str)]| {
        let texts = all.iter().map(|(name, text)| (module(name), code(text)));
        let circles = circles(graph(&texts.collect()));
        circles.keys().map(|one| one.join("::")).collect::<Vec<_>>()
    };
    let parent = (
        "room",
        "mod a;\nmod b;\npub use a::One;\nuse b::{Two, Three};",
    );
    let a = ("room::a", "use super::b::{Two, Three as Four};");
    assert_eq!(of(&[parent, a, ("room::b", "")]), Vec::<String>::new());
    // By the name that the parent exports, within code, and not in a comment or a test.
    for (b, is_circle) in [
        ("use super::One;", true),
        ("use crate::room::{self, One};", true),
        ("fn f() -> super::a::One {}", true),
        ("// super::One", false),
        ("mod tests {\nuse super::super::One;", false),
        ("use super::Other;", false),
    ] {
        let found = of(&[parent, a, ("room::b", b)]);
        assert_eq!(!found.is_empty(), is_circle, "{b}: {found:?}");
    }
}
