//! `archaware version`.

use clap::Args;
use serde::Serialize;

use super::{
    CommandStatus,
    cluster::NAME,
    output::{self, Output},
};

#[derive(Debug, Args)]
pub(super) struct VersionCommand {
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// `version -o json`
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Build {
    version: &'static str,
    /// The commit that was built; null if `ARCHAWARE_COMMIT` was not set during the build.
    commit: Option<&'static str>,
    /// `linux/amd64`, as images name it.
    platform: String,
    /// `apiVersion` of its configuration.
    configuration: serde_json::Value,
}

impl VersionCommand {
    pub(super) fn execute(&self) -> anyhow::Result<CommandStatus> {
        let build = Build {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("ARCHAWARE_COMMIT").filter(|commit| !commit.is_empty()),
            platform: platform(),
            configuration: serde_json::to_value(crate::config::ApiVersion::V1Alpha1)?,
        };
        let text = match self.output {
            Output::Json => output::json(&build)?,
            Output::Table => {
                let commit = build.commit.map(|commit| format!(" ({commit})"));
                let commit = commit.unwrap_or_default();
                format!("{NAME} {}{commit} {}\n", build.version, build.platform)
            }
        };
        output::print(&text)?;
        Ok(CommandStatus::Done)
    }
}

/// The platform of this program, by the names of Go.
fn platform() -> String {
    let os = match std::env::consts::OS {
        "macos" => "darwin",
        other => other,
    };
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{os}/{architecture}")
}
