//! `archaware config`: the configuration file.

use clap::Subcommand;

use crate::config::without_effect;

use super::{CommandStatus, Global, output};

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Check a file
    Check,
    /// Print the configuration in force: the file, and the defaults of all other keys
    Print {
        /// Print the meaning of each key beside it
        #[arg(long)]
        comments: bool,
    },
    /// Print the JSON schema, for editors and CI
    Schema,
}

impl ConfigCommand {
    pub(super) fn execute(&self, global: &Global) -> anyhow::Result<CommandStatus> {
        match self {
            Self::Check => {
                for sentence in without_effect(&global.load_config()?) {
                    tracing::warn!("{sentence}");
                }
                match &global.config {
                    Some(path) => output::print(&format!("{} is valid\n", path.display()))?,
                    None => output::print("no file given (--config): the defaults are valid\n")?,
                }
            }
            Self::Print { comments: true } => {
                output::print(&crate::config::commented(&global.load_config()?)?)?;
            }
            Self::Print { comments: false } => {
                output::print(&output::yaml(&global.load_config()?)?)?;
            }
            Self::Schema => output::print(&output::json(&crate::config::schema())?)?,
        }
        Ok(CommandStatus::Done)
    }
}
