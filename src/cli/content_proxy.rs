//! `archaware content-proxy`: a filtering proxy for a node's containerd.

use std::path::PathBuf;

use clap::Args;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    content_proxy::{self, Forwarding},
    tasks,
};

use super::{CommandStatus, Global, run::stop_on_signal};

#[derive(Debug, Args)]
pub(super) struct ContentProxyCommand {
    /// containerd's socket. A connection is made when it is needed, and again when it breaks
    #[arg(long, env = "ARCHAWARE_FROM", value_name = "SOCKET")]
    from: PathBuf,
    /// Socket to create; set the controller's containerd.socket to it
    #[arg(long, env = "ARCHAWARE_LISTEN", value_name = "SOCKET")]
    listen: PathBuf,
}

impl ContentProxyCommand {
    /// The namespaces come from the configuration, so that both processes use the same namespaces.
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        let containerd = global.load_config()?.containerd;
        let forwarding = Forwarding {
            read: containerd.read_namespaces,
            own: Some(containerd.cache_namespace).filter(|name| !name.is_empty()),
        };
        let stop = CancellationToken::new();
        let _signals =
            AbortOnDropHandle::new(tasks::spawn("signals", stop_on_signal(stop.clone())?));
        content_proxy::run(&self.from.to_string_lossy(), &self.listen, forwarding, stop).await?;
        Ok(CommandStatus::Done)
    }
}
