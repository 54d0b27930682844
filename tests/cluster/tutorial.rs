//! docs/tutorial.md does what it says: its commands are typed into a shell, and print what the page
//! shows.

use std::process::Stdio;

use tokio::{io::AsyncWriteExt, process::Command};

use super::*;

/// Printed after the output of each command.
const END: &str = "--- end of command ---";

/// A command of the page, and what it should print; `…` stands for anything.
#[derive(Debug, PartialEq)]
struct Step {
    command: String,
    output: Vec<String>,
}

/// Commands begin with `$` and continue with `>`; what follows, as far as it is indented, is their
/// output.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut in_block = false;
    for line in page.lines() {
        let text = line.strip_prefix("    ");
        if let Some(command) = text.and_then(|text| text.strip_prefix("$ ")) {
            steps.push(Step {
                command: command.to_owned(),
                output: Vec::new(),
            });
            in_block = true;
        } else if let Some(step) = steps.last_mut().filter(|_| in_block) {
            match text {
                Some(text) if text.starts_with("> ") => {
                    step.command.push('\n');
                    step.command.push_str(&text[2..]);
                }
                Some(text) => step.output.push(text.to_owned()),
                None if line.is_empty() => step.output.push(String::new()),
                None => in_block = false,
            }
        }
    }
    for step in &mut steps {
        while step.output.last().is_some_and(String::is_empty) {
            step.output.pop();
        }
    }
    steps
}

/// Whether a line is as the page shows it. Widths of columns depend on names, so spaces do not
/// count.
fn matches_line(shown: &str, printed: &str) -> bool {
    let printed = printed.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut parts = shown.split('…');
    let Some(mut rest) = printed.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts = parts.peekable();
    let is_open = parts.peek().is_some();
    while let Some(part) = parts.next() {
        let at = if parts.peek().is_none() {
            rest.ends_with(part).then(|| rest.len() - part.len())
        } else {
            rest.find(part)
        };
        let Some(at) = at else { return false };
        rest = &rest[at + part.len()..];
    }
    is_open || rest.is_empty()
}

/// Whether an output is as the page shows it; a line `…` stands for any number of lines.
fn matches(shown: &[String], printed: &[&str]) -> bool {
    match shown.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first.trim() == "…" => {
            (0..=printed.len()).any(|skipped| matches(rest, &printed[skipped..]))
        }
        Some((first, rest)) => printed
            .split_first()
            .is_some_and(|(line, others)| matches_line(first, line) && matches(rest, others)),
    }
}

/// Types the commands into a shell and returns what each printed.
async fn type_in(steps: &[Step]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut script = "trap 'kill $(jobs -p) 2> /dev/null' EXIT\nset -e\nexec 2>&1\n".to_owned();
    // The port may be taken.
    let port = free_port().to_string();
    for step in steps {
        let command = step.command.replace("8443", &port);
        script += &format!("{command}\necho '{END}'\n");
    }
    let mut shell = Command::new("bash")
        .env("TMPDIR", folder.path())
        .env("OWNER", std::process::id().to_string())
        // The page shows no wrapped rows.
        .env("COLUMNS", "200")
        .env_remove("KUBECONFIG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut input = shell.stdin.take().unwrap();
    input.write_all(script.as_bytes()).await.unwrap();
    drop(input);
    let output = tokio::time::timeout(5 * DEADLINE, shell.wait_with_output())
        .await
        .expect("the tutorial takes too long")
        .unwrap();
    for bed in std::fs::read_dir(folder.path()).unwrap() {
        let down = Command::new("hack/testbed/down.sh")
            .arg(bed.unwrap().path())
            .status();
        assert!(down.await.unwrap().success());
    }
    let printed = String::from_utf8(output.stdout).unwrap();
    printed.split(END).map(str::to_owned).collect()
}

#[tokio::test]
async fn the_tutorial_is_true() {
    let page = std::fs::read_to_string("docs/tutorial.md").unwrap();
    let steps = steps(&page);
    let printed = type_in(&steps).await;
    for (step, printed) in steps.iter().zip(&printed) {
        let lines: Vec<&str> = printed.trim_matches('\n').lines().collect();
        assert!(
            matches(&step.output, &lines),
            "$ {}\nprinted:\n{}\nthe page shows:\n{}",
            step.command,
            lines.join("\n"),
            step.output.join("\n")
        );
    }
    assert!(
        printed.len() > steps.len(),
        "the last command that ran: {:?}",
        steps.get(printed.len().saturating_sub(1))
    );
}

#[test]
fn outputs_are_compared() {
    let shown = |lines: &[&str]| {
        lines
            .iter()
            .map(|line| (*line).to_owned())
            .collect::<Vec<_>>()
    };
    let page = "text\n\n    $ a\n    one\n\n    two\n\ntext\n\n    $ b <<END\n    > c\n    > END\n";
    let expected = [
        Step {
            command: "a".to_owned(),
            output: shown(&["one", "", "two"]),
        },
        Step {
            command: "b <<END\nc\nEND".to_owned(),
            output: Vec::new(),
        },
    ];
    assert_eq!(steps(page), expected);
    for (line, printed, is_same) in [
        ("a   b", "a b", true),
        ("a … b", "a x y b", true),
        ("a …", "a x y", true),
        ("…/image", "127.0.0.1:5/image", true),
        ("a … b", "a x y", false),
        ("a", "a b", false),
        ("", "a", false),
    ] {
        assert_eq!(matches_line(line, printed), is_same, "{line} {printed}");
    }
    assert!(matches(&shown(&["a", "…", "d"]), &["a", "b", "c", "d"]));
    assert!(!matches(&shown(&["a", "…", "d"]), &["a", "b", "c"]));
    assert!(!matches(&[], &["a"]));
}
