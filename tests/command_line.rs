//! The program as its users call it, without a cluster.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::{
    collections::BTreeSet,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output},
};

use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_archaware");

fn run(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

fn printed(program: &Path, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The program under the name by which kubectl finds its plugins.
fn plugin(folder: &Path) -> std::path::PathBuf {
    let plugin = folder.join("kubectl-archaware");
    symlink(PROGRAM, &plugin).unwrap();
    plugin
}

#[test]
fn the_version_is_for_people_and_for_programs() {
    let own = Path::new(PROGRAM);
    let text = printed(own, &["version"]);
    assert!(text.starts_with("archaware 0.1.0"), "{text}");
    assert_eq!(printed(own, &["--version"]), "archaware 0.1.0\n");
    let json: Value = serde_json::from_str(&printed(own, &["version", "-o", "json"])).unwrap();
    assert_eq!(json["version"], "0.1.0");
    assert_eq!(json["configuration"], "archaware.dev/v1alpha1");
    let keys: BTreeSet<&str> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        ["commit", "configuration", "platform", "version"].into()
    );
}

#[test]
fn global_options_do_not_bury_those_of_a_command() {
    let short = printed(Path::new(PROGRAM), &["explain", "-h"]);
    assert!(!short.contains("--log-format"), "{short}");
    let long = printed(Path::new(PROGRAM), &["explain", "--help"]);
    let at = |text: &str| long.find(text).unwrap_or_else(|| panic!("{text}: {long}"));
    assert!(at("--filename") < at("Global options:") && at("Global options:") < at("--log-format"));
    for help in [short, long] {
        assert!(
            help.contains("Examples:\n  archaware explain deployment/web -n shop\n"),
            "{help}"
        );
    }
}

#[test]
fn a_plugin_of_kubectl_says_what_its_users_type() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = plugin(folder.path());
    let help = printed(&plugin, &["report", "--help"]);
    assert!(
        help.contains("Usage: kubectl archaware report [OPTIONS]"),
        "{help}"
    );
    let wrong = run(&plugin, &["repot"]);
    let wrong = String::from_utf8(wrong.stderr).unwrap();
    assert!(wrong.contains("Usage: kubectl archaware"), "{wrong}");
    assert!(
        wrong.contains("a similar subcommand exists: 'report'"),
        "{wrong}"
    );
}

/// The protocol of cobra: candidates with their descriptions, and a directive.
#[test]
fn kubectl_completes_the_words_of_its_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = plugin(folder.path());
    let candidates = |words: &[&str]| printed(&plugin, &[&["__complete"], words].concat());
    let commands = candidates(&[""]);
    assert!(
        commands.contains("explain\tExplain why pods are pending"),
        "{commands}"
    );
    assert!(
        !commands.contains("__complete") && !commands.contains("man\t"),
        "{commands}"
    );
    assert!(commands.ends_with("\n:4\n"), "{commands}");
    assert!(candidates(&["report", "--fo"]).starts_with("--for\t"));
    let formats = candidates(&["report", "-o", ""]);
    for format in ["table", "json", "html", "junit"] {
        assert!(formats.contains(format), "{formats}");
    }
    assert_eq!(candidates(&["nothing", "--like-this"]), ":4\n");
}

#[test]
fn man_pages_and_completions_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man");
    printed(Path::new(PROGRAM), &["man", pages.to_str().unwrap()]);
    let all = std::fs::read_dir(&pages).unwrap();
    let names: BTreeSet<String> = all
        .map(|one| one.unwrap().file_name().into_string().unwrap())
        .collect();
    for page in [
        "archaware.1",
        "archaware-explain.1",
        "archaware-report.1",
        "archaware-config-check.1",
    ] {
        assert!(names.contains(page), "{names:?}");
    }
    assert!(
        !names.iter().any(|name| name.contains("__complete")),
        "{names:?}"
    );
    let page = std::fs::read_to_string(pages.join("archaware-explain.1")).unwrap();
    assert!(
        page.contains(".SH SYNOPSIS") && page.contains("explain deployment/web"),
        "{page}"
    );
    for (shell, part) in [
        ("bash", "complete -F _archaware"),
        ("zsh", "#compdef archaware"),
        ("fish", "complete -c archaware"),
    ] {
        let script = printed(Path::new(PROGRAM), &["completions", shell]);
        assert!(script.contains(part), "{shell}");
    }
    let folder = json!(folder.path());
    let status = run(
        Path::new(PROGRAM),
        &[
            "man",
            &format!("{}/man/archaware.1/x", folder.as_str().unwrap()),
        ],
    )
    .status;
    assert_eq!(status.code(), Some(1));
}

/// docs/commands.md has every command and every global option.
#[test]
fn commands_are_documented() {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/commands.md")).unwrap();
    let help = printed(Path::new(PROGRAM), &["--help"]);
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let names = commands
        .lines()
        .map_while(|line| line.split_whitespace().next());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        assert!(
            page.contains(&format!("`archaware {name}")),
            "{name} is not in docs/commands.md"
        );
    }
    let options = help
        .split_whitespace()
        .filter(|word| word.starts_with("--"));
    for option in options.filter(|option| !["--help", "--version"].contains(option)) {
        assert!(
            page.contains(&format!("`{option} ")),
            "{option} is not in docs/commands.md"
        );
    }
}

/// The commands that the documentation shows, without what a shell does with them.
fn documented_commands() -> Vec<(String, Vec<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = std::fs::read_dir(root.join("docs")).unwrap();
    let pages = pages
        .map(|page| page.unwrap().path())
        .filter(|page| page.is_file());
    let mut found = Vec::new();
    for page in pages.chain([root.join("README.md")]) {
        let text = std::fs::read_to_string(&page).unwrap();
        for line in text.lines().filter_map(|line| line.strip_prefix("    ")) {
            let line = line.strip_prefix("$ ").unwrap_or(line);
            let line = line.split(" #").next().unwrap();
            for part in line.split(" | ").flat_map(|part| part.split(" -- ")) {
                let Some(arguments) = part.strip_prefix("archaware ") else {
                    continue;
                };
                let arguments = arguments.split(" > ").next().unwrap().trim_end_matches('&');
                let arguments = arguments.split_whitespace().map(str::to_owned);
                found.push((format!("{}: {line}", page.display()), arguments.collect()));
            }
        }
    }
    found
}

#[test]
fn commands_in_the_documentation_are_understood() {
    let commands = documented_commands();
    assert!(commands.len() > 30, "{}", commands.len());
    for (place, arguments) in commands {
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        // It is understood, and nothing is done.
        arguments.push("--help");
        let output = run(Path::new(PROGRAM), &arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{place}: {error}");
    }
}

/// What programs read is stable: a field is added here on purpose, and none is renamed or removed.
#[test]
fn schemas_are_stable() {
    for command in ["explain", "report"] {
        let printed = printed(Path::new(PROGRAM), &[command, "--schema"]);
        let name = format!("tests/schemas/{command}.json");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&name);
        if std::env::var_os("ARCHAWARE_UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &printed).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            printed == expected,
            "`archaware {command} --schema` differs from {name}; if that is meant, ARCHAWARE_UPDATE_GOLDEN=1 writes it"
        );
    }
}
