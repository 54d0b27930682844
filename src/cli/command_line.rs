//! The command line for clap, with examples and the name that the user typed.

use std::path::Path;

use clap::{Command, CommandFactory};

use super::{Cli, cluster::NAME};

/// The name of the program as a plugin of kubectl: it is called for `kubectl archaware`.
const PLUGIN: &str = "kubectl-archaware";

/// Two examples for each command.
const EXAMPLES: [(&str, [(&str, &str); 2]); 11] = [
    (
        "run",
        [
            (
                "run --config archaware.yaml",
                "with the kubeconfig's cluster",
            ),
            (
                "run --listen 127.0.0.1:8080 --log-format text",
                "metrics and probes on loopback",
            ),
        ],
    ),
    (
        "plan",
        [
            ("plan", "before the installation, with the defaults"),
            ("plan --config archaware.yaml -o json", "for programs"),
        ],
    ),
    (
        "clean",
        [
            ("clean --dry-run", "what would be removed"),
            (
                "clean --stop-controller",
                "stop the controller, then remove everything",
            ),
        ],
    ),
    (
        "explain",
        [
            (
                "explain deployment/web -n shop",
                "one of its pods, best one that waits",
            ),
            ("explain -f deployment.yaml", "before it is created"),
        ],
    ),
    (
        "report",
        [
            (
                "report -A -o html > report.html",
                "a page for a browser, to be sent around",
            ),
            (
                "report -f - --for arm64 --fail-on missing",
                "a check in CI: helm template … | archaware report -f - …",
            ),
        ],
    ),
    (
        "inspect",
        [
            ("inspect nginx:1.29 redis", "the platforms of two images"),
            (
                "inspect --trace registry.example/app:1",
                "each request that it takes",
            ),
        ],
    ),
    (
        "selection",
        [
            (
                "selection check solver.json --node example.com/memory=64",
                "the entry that is chosen for a node with this label",
            ),
            (
                "selection check solver.json --nodes nodes.json",
                "the same for all nodes: kubectl get nodes -o json > nodes.json",
            ),
        ],
    ),
    (
        "config",
        [
            (
                "config check --config archaware.yaml",
                "before it is applied",
            ),
            ("config print", "every key with its default"),
        ],
    ),
    (
        "content-proxy",
        [
            (
                "content-proxy --from /run/containerd/containerd.sock --listen /run/archaware/containerd.sock",
                "as in the manifests",
            ),
            (
                "content-proxy --from /run/k3s/containerd/containerd.sock --listen /tmp/door.sock",
                "of K3s",
            ),
        ],
    ),
    (
        "version",
        [
            ("version", "for people"),
            ("version -o json", "for programs"),
        ],
    ),
    (
        "completions",
        [
            (
                "completions bash > /etc/bash_completion.d/archaware",
                "for all users",
            ),
            ("completions zsh > \"${fpath[1]}/_archaware\"", "for one"),
        ],
    ),
];

/// How the program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgramName {
    /// `archaware`
    Own,
    /// `kubectl archaware`
    Plugin,
}

impl ProgramName {
    /// Derives the name from the program's file name.
    pub(super) fn from_path(program: Option<&Path>) -> Self {
        let name = program.and_then(Path::file_stem);
        if name.is_some_and(|name| name == PLUGIN) {
            Self::Plugin
        } else {
            Self::Own
        }
    }

    /// By the name of this process's file.
    pub(super) fn current() -> Self {
        let program = std::env::args_os().next();
        Self::from_path(program.as_deref().map(Path::new))
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Own => NAME,
            Self::Plugin => "kubectl archaware",
        }
    }
}

/// The command line under this name.
pub(super) fn command(program: ProgramName) -> Command {
    let name = program.as_str();
    let mut command = Cli::command().bin_name(name);
    for (subcommand, examples) in EXAMPLES {
        let lines = examples.map(|(line, what)| format!("  {name} {line}\n      {what}\n"));
        let text = format!("Examples:\n{}", lines.concat());
        command = command.mut_subcommand(subcommand, |subcommand| subcommand.after_help(text));
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command(ProgramName::Own).debug_assert();
    }

    #[test]
    fn every_command_has_examples_that_are_valid() {
        let program = command(ProgramName::Own);
        let visible = program
            .get_subcommands()
            .filter(|command| !command.is_hide_set());
        let names: Vec<&str> = visible.map(Command::get_name).collect();
        assert_eq!(names, EXAMPLES.map(|(name, _)| name));
        for (name, examples) in EXAMPLES {
            for (line, _) in examples {
                let words = line.split(" > ").next().unwrap().split(' ');
                let parsed = command(ProgramName::Own)
                    .try_get_matches_from(std::iter::once(NAME).chain(words));
                let parsed = parsed.unwrap_or_else(|error| panic!("{line}: {error}"));
                assert_eq!(parsed.subcommand_name(), Some(name));
            }
        }
    }

    #[test]
    fn a_plugin_has_the_name_that_its_users_type() {
        for (path, expected) in [
            ("/usr/bin/archaware", ProgramName::Own),
            ("kubectl-archaware", ProgramName::Plugin),
            ("/home/me/.krew/bin/kubectl-archaware", ProgramName::Plugin),
            ("kubectl-archaware.exe", ProgramName::Plugin),
        ] {
            assert_eq!(ProgramName::from_path(Some(Path::new(path))), expected);
        }
        let help = command(ProgramName::Plugin).try_get_matches_from(["x", "explain", "--help"]);
        let help = help.unwrap_err().to_string();
        assert!(
            help.contains("Usage: kubectl archaware explain [OPTIONS]"),
            "{help}"
        );
        assert!(help.contains("\n  kubectl archaware explain -f"), "{help}");
    }
}
