//! Completion scripts, completion candidates for kubectl, and man pages.

use std::{ffi::OsString, path::Path};

use anyhow::Context;

use super::{
    CommandStatus,
    cluster::NAME,
    command_line::{self, ProgramName},
    output,
};

/// `ShellCompDirectiveNoFileComp` of cobra: the shell adds no file names to the candidates. kubectl
/// uses cobra's protocol to ask plugins for candidates.
const NO_MORE: u8 = 4;
/// `ShellCompDirectiveNoSpace` of cobra: the shell adds no space after a folder, because the path
/// may go on.
const NO_SPACE: u8 = 2;

/// Prints a completion script.
pub(super) fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<CommandStatus> {
    let mut command = command_line::command(ProgramName::Own);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, NAME, &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(CommandStatus::Done)
}

/// Prints the completion candidates of the last word for the plugin's file
/// `kubectl_complete-archaware`: one per line, with its description after a tab, and cobra's
/// directive in the last line.
pub(super) fn print_candidates(words: Vec<OsString>) -> anyhow::Result<CommandStatus> {
    let mut command = command_line::command(ProgramName::Plugin);
    let mut arguments = vec![OsString::from(NAME)];
    arguments.extend(words);
    let last = arguments.len() - 1;
    let folder = std::env::current_dir().ok();
    let candidates =
        clap_complete::engine::complete(&mut command, arguments, last, folder.as_deref());
    let candidates = candidates.context("cannot complete these words")?;
    let visible = candidates.iter().filter(|command| !command.is_hide_set());
    let lines: Vec<String> = visible
        .map(|candidate| {
            let value = candidate.get_value().to_string_lossy();
            let help = candidate.get_help().map(ToString::to_string);
            let help = help.and_then(|help| Some(format!("\t{}", help.lines().next()?)));
            format!("{value}{}\n", help.unwrap_or_default())
        })
        .collect();
    let is_folder = matches!(&*lines, [only] if only.trim_end().ends_with('/'));
    let directive = if is_folder {
        NO_MORE | NO_SPACE
    } else {
        NO_MORE
    };
    output::print(&format!("{}:{directive}\n", lines.concat()))?;
    Ok(CommandStatus::Done)
}

/// Writes a man page for the program and one for each command.
pub(super) fn write_man_pages(folder: &Path) -> anyhow::Result<CommandStatus> {
    let command = command_line::command(ProgramName::Own);
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command, folder))
        .with_context(|| format!("cannot write man pages to {}", folder.display()))?;
    Ok(CommandStatus::Done)
}
