//! What archaware's HTTP servers have in common: how many connections they accept, and when they close them.

use std::{
    collections::HashMap,
    net::IpAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hyper_util::server::graceful::GracefulConnection;
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::CancellationToken;

/// Idle timeout. Longer than the API server's own (90 s), so that the API server closes the connection first and
/// never sends a request to a closed one. Also the limit for receiving the headers of a request.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_mins(2);
/// Timeout until the first request over TCP. Connections are limited, so unused ones are closed.
pub(crate) const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a request's headers.
pub(crate) const MAX_HEADERS: usize = 16 << 10;

/// Bounds the connections of a server.
pub(crate) struct ConnectionSlots {
    total: Arc<Semaphore>,
    per_peer: usize,
    peers: Arc<Peers>,
}

/// Connections of each address.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

/// The place of one connection.
pub(crate) struct ConnectionSlot {
    peers: Arc<Peers>,
    peer: IpAddr,
    _total: OwnedSemaphorePermit,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut peers = self.peers.0.lock();
        match peers.get_mut(&self.peer) {
            Some(number) if *number > 1 => *number -= 1,
            _ => {
                peers.remove(&self.peer);
            }
        }
    }
}

impl ConnectionSlots {
    /// At most `total` connections, and `per_peer` from one address.
    pub(crate) fn new(total: usize, per_peer: usize) -> Self {
        Self {
            total: Arc::new(Semaphore::new(total)),
            per_peer,
            peers: Arc::default(),
        }
    }

    fn enter(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let total = self.total.clone().try_acquire_owned().ok()?;
        let mut peers = self.peers.0.lock();
        let number = peers.entry(peer).or_default();
        if *number >= self.per_peer {
            return None;
        }
        *number += 1;
        Some(ConnectionSlot {
            peers: self.peers.clone(),
            peer,
            _total: total,
        })
    }

    /// Accepts connections for ever. One that gets no slot is closed at once: a refused connection fails immediately,
    /// a hanging one after the client's timeout.
    pub(crate) async fn accept(
        &self,
        listener: &TcpListener,
        refused: impl Fn(),
        serve: impl Fn(TcpStream, std::net::SocketAddr, ConnectionSlot),
    ) {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => match self.enter(peer.ip().to_canonical()) {
                    Some(slot) => serve(stream, peer, slot),
                    None => refused(),
                },
                Err(error) => {
                    // Most likely out of file descriptors, which other connections will release.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// Whether a connection has had its first request.
#[derive(Clone, Default)]
pub(crate) struct Asked(Arc<AtomicBool>);

/// How long a connection lives.
pub(crate) struct Lifetime {
    /// Timeout until its first request.
    pub(crate) first_request: Duration,
    /// When it is closed gracefully at the latest.
    pub(crate) until: Option<Instant>,
}

impl Asked {
    /// A request has arrived.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Serves until the client closes the connection, its lifetime ends, or `drain` is cancelled. Requests in progress may
/// finish, within the idle timeout.
pub(crate) async fn serve_until_the_end<C: GracefulConnection>(
    serving: C,
    drain: CancellationToken,
    asked: Asked,
    life: Lifetime,
) {
    let mut serving = pin!(serving);
    let unused = async {
        tokio::time::sleep(life.first_request).await;
        if asked.0.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let lifetime = async {
        match life.until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = serving.as_mut() => return,
        () = unused => return,
        () = drain.cancelled() => {}
        () = lifetime => {}
    }
    serving.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(IDLE_TIMEOUT, serving).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_does_not_take_all_connections() {
        let slots = ConnectionSlots::new(3, 2);
        let [a, b] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        let held = [slots.enter(a), slots.enter(a)];
        assert!(held.iter().all(Option::is_some));
        assert!(slots.enter(a).is_none());
        let other = slots.enter(b);
        assert!(other.is_some());
        assert!(slots.enter(b).is_none(), "three in total");
        drop(held);
        drop(other);
        assert!(slots.peers.0.lock().is_empty());
        assert!(slots.enter(a).is_some());
    }
}
