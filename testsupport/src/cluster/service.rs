//! One address for several replicas, as a Service gives it.

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};

/// Forwards each connection to the first of its ports that accepts one, beginning with another one
/// each time. Stops on drop.
pub struct Service {
    port: u16,
    reachable: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Service {
    /// Forwards to these ports of the loopback address.
    pub async fn start(ports: Vec<u16>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (reachable, is_reachable) = watch::channel(true);
        Self {
            port,
            reachable,
            task: tokio::spawn(forward(listener, ports, is_reachable)),
        }
    }

    /// Closes all connections, and new ones at once, until it is reachable again.
    pub fn set_reachable(&self, reachable: bool) {
        self.reachable.send_replace(reachable);
    }

    /// The `admission:` section of the replica that listens on `port`; `more` are additional keys.
    pub fn admission_config(&self, port: u16, more: &str) -> String {
        let own = self.port;
        format!(
            "admission: {{enabled: true, listen: \"127.0.0.1:{port}\", url: \"https://127.0.0.1:{own}\", {more}}}\n"
        )
    }
}

async fn forward(listener: TcpListener, ports: Vec<u16>, mut reachable: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let mut next = 0;
    loop {
        let mut client = tokio::select! {
            accepted = listener.accept() => accepted.unwrap().0,
            Ok(()) = reachable.changed() => {
                connections.abort_all();
                continue;
            }
        };
        if !*reachable.borrow() {
            continue;
        }
        next += 1;
        let order: Vec<u16> = (0..ports.len())
            .map(|n| ports[(next + n) % ports.len()])
            .collect();
        connections.spawn(async move {
            for port in order {
                if let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await {
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                    return;
                }
            }
        });
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}
