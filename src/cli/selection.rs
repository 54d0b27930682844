//! `archaware selection`: compatibility documents, without a cluster.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    names::{is_label_value, is_qualified_name},
    selection::{
        check::{self, Checked, CheckedNode},
        compatibility::RuleKeys,
    },
};

use super::{CommandStatus, manifests, output};

#[derive(Debug, Subcommand)]
pub(super) enum SelectionCommand {
    /// Check a compatibility document, and show which entry is chosen for given nodes
    Check(CheckCommand),
}

#[derive(Debug, Args)]
pub(super) struct CheckCommand {
    /// The document: a file, or - for stdin
    #[arg(value_name = "FILE")]
    document: PathBuf,
    /// The format [default: nfd if a rule names a feature, otherwise images]
    #[arg(long, value_enum)]
    format: Option<DocumentFormat>,
    /// A node by its labels, for example zone=a,memory=64; may be repeated
    #[arg(long, value_name = "LABELS", value_parser = labels)]
    node: Vec<BTreeMap<String, String>>,
    /// Nodes as `kubectl get nodes -o json` prints them; a file, or - for stdin
    #[arg(long, value_name = "FILE")]
    nodes: Option<PathBuf>,
}

/// The formats of documents with rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum DocumentFormat {
    /// A list of images, as ocifit-k8s defines it.
    Images,
    /// Rules of Node Feature Discovery.
    Nfd,
}

impl SelectionCommand {
    pub(super) fn execute(&self) -> anyhow::Result<CommandStatus> {
        match self {
            Self::Check(command) => command.execute(),
        }
    }
}

impl CheckCommand {
    fn execute(&self) -> anyhow::Result<CommandStatus> {
        let text = manifests::text(&self.document)?;
        let keys = match self.format {
            Some(DocumentFormat::Images) => RuleKeys::Labels,
            Some(DocumentFormat::Nfd) => RuleKeys::Features,
            None => check::guess_keys(text.as_bytes()),
        };
        let mut nodes: Vec<CheckedNode> = Vec::new();
        let given = self.node.iter().enumerate();
        nodes.extend(given.map(|(index, labels)| CheckedNode {
            name: format!("--node {}", index + 1),
            labels: labels.clone(),
        }));
        if let Some(file) = &self.nodes {
            nodes.extend(read_nodes(file)?);
        }
        let name = self.document.display();
        let checked = check::check(keys, text.as_bytes(), &nodes);
        let checked = checked.with_context(|| format!("{name} is not a compatibility document"))?;
        output::print(&print(&checked))?;
        Ok(if checked.invalid.is_empty() {
            CommandStatus::Done
        } else {
            CommandStatus::Failed
        })
    }
}

fn print(checked: &Checked) -> String {
    let mut text = format!("{}\n", checked.summary);
    for invalid in &checked.invalid {
        text += &format!("invalid: {invalid}\n");
    }
    for node in &checked.nodes {
        text += &format!("\n{}\n", node.name);
        let rows = node.entries.iter().map(|entry| {
            vec![
                if entry.chosen { "chosen" } else { "" }.to_owned(),
                entry.tag.clone(),
                entry.weight.to_string(),
                entry.outcome.clone(),
            ]
        });
        text += &output::table(&["", "IMAGE OR GROUP", "WEIGHT", "WHY"], rows);
    }
    text
}

/// Parses `key=value,key=value`. A key without `=` has an empty value.
fn labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    let pairs = text
        .split(',')
        .map(str::trim)
        .filter(|pair| !pair.is_empty());
    let parsed = pairs.map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if !is_qualified_name(key) || !is_label_value(value) {
            return Err(format!("{pair:?} is not a label like zone=a"));
        }
        Ok((key.to_owned(), value.to_owned()))
    });
    parsed.collect()
}

/// The names and labels of nodes.
fn read_nodes(file: &std::path::Path) -> anyhow::Result<Vec<CheckedNode>> {
    #[derive(Deserialize)]
    struct Node {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        name: String,
        #[serde(default)]
        labels: BTreeMap<String, String>,
    }
    let mut nodes = Vec::new();
    for (name, object) in manifests::read(file)?.objects {
        if object.get("kind").and_then(Value::as_str) != Some("Node") {
            continue;
        }
        let node = Node::deserialize(object).with_context(|| format!("cannot read {name}"))?;
        nodes.push(CheckedNode {
            name: format!("node {}", node.metadata.name),
            labels: node.metadata.labels,
        });
    }
    anyhow::ensure!(!nodes.is_empty(), "{} has no nodes", file.display());
    Ok(nodes)
}
