//! What archaware's HTTP servers have in common: how many connections they accept, and when they
//! close them.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hyper::rt::Executor;
use hyper_util::server::graceful::GracefulConnection;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::tasks;

/// Idle timeout. Longer than the API server's own (90 s), so that the API server closes the
/// connection first and never sends a request to a closed connection. Also the limit for receiving
/// the headers of a request.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_mins(2);
/// Timeout until the first request over TCP. Connections are limited, so unused connections are
/// closed.
pub(crate) const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a request's headers.
pub(crate) const MAX_HEADERS: usize = 16 << 10;

/// Which connections are closed for new connections when slots get scarce.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evict {
    /// Those that have had no request.
    Unused,
    /// Those without a request that is being answered.
    Idle,
}

/// Bounds the connections of a server. When seven eighths of the slots are taken, each new
/// connection makes the oldest evictable connection close, so that half-open and idle connections
/// do not keep clients out.
pub(crate) struct ConnectionSlots {
    evict: Evict,
    total: usize,
    per_peer: usize,
    slots: Arc<Mutex<Slots>>,
}

#[derive(Default)]
struct Slots {
    used: usize,
    /// Connections of each address.
    peers: HashMap<IpAddr, usize>,
    /// Connections in the order of their arrival, including some that ended or cannot be evicted.
    arrivals: VecDeque<Weak<ConnectionState>>,
}

/// The place of one connection.
pub(crate) struct ConnectionSlot {
    slots: Arc<Mutex<Slots>>,
    peer: IpAddr,
    state: Arc<ConnectionState>,
}

/// The requests of a connection so far, and whether it is evicted.
#[derive(Default)]
pub(crate) struct ConnectionState {
    is_used: AtomicBool,
    /// Requests that are being answered.
    busy: AtomicUsize,
    evicted: CancellationToken,
}

/// A request that is being answered.
pub(crate) struct Answering(Arc<ConnectionState>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ConnectionState {
    /// Records that a request has arrived. It counts as being answered until the result is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Answering {
        self.is_used.store(true, Ordering::Relaxed);
        self.busy.fetch_add(1, Ordering::Relaxed);
        Answering(self.clone())
    }

    fn may_be_evicted(&self, evict: Evict) -> bool {
        match evict {
            Evict::Unused => !self.is_used(),
            Evict::Idle => self.busy.load(Ordering::Relaxed) == 0,
        }
    }

    fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut slots = self.slots.lock();
        slots.used -= 1;
        match slots.peers.get_mut(&self.peer) {
            Some(number) if *number > 1 => *number -= 1,
            _ => {
                slots.peers.remove(&self.peer);
            }
        }
    }
}

impl ConnectionSlot {
    pub(crate) fn state(&self) -> &Arc<ConnectionState> {
        &self.state
    }

    /// Serves the connection until it ends or is evicted.
    pub(crate) async fn hold(self, serving: impl Future<Output = ()>) {
        self.state.evicted.run_until_cancelled(serving).await;
    }
}

impl ConnectionSlots {
    /// At most `total` connections, and `per_peer` from one address.
    pub(crate) fn new(total: usize, per_peer: usize, evict: Evict) -> Self {
        Self {
            evict,
            total,
            per_peer,
            slots: Arc::default(),
        }
    }

    fn enter(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let mut slots = self.slots.lock();
        let of_peer = slots.peers.get(&peer).copied().unwrap_or_default();
        if slots.used >= self.total || of_peer >= self.per_peer {
            return None;
        }
        if slots.used >= self.total / 8 * 7 {
            slots.evict_one(self.evict);
        }
        let state = Arc::new(ConnectionState::default());
        slots.used += 1;
        slots.peers.insert(peer, of_peer + 1);
        slots.arrivals.push_back(Arc::downgrade(&state));
        if slots.arrivals.len() > self.total * 2 {
            slots.arrivals.retain(|state| state.strong_count() > 0);
        }
        Some(ConnectionSlot {
            slots: self.slots.clone(),
            peer,
            state,
        })
    }

    /// Accepts connections for ever. A connection without a slot is closed at once: its client then
    /// fails immediately, instead of after its timeout.
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

impl Slots {
    fn evict_one(&mut self, evict: Evict) {
        let may_go = |state: &Arc<ConnectionState>| state.may_be_evicted(evict);
        let place = self.arrivals.iter().position(|state| {
            state
                .upgrade()
                .is_some_and(|state| !state.evicted.is_cancelled() && may_go(&state))
        });
        let oldest = place.and_then(|place| self.arrivals.remove(place)?.upgrade());
        if let Some(state) = oldest {
            state.evicted.cancel();
        }
    }
}

/// How long a connection lives.
pub(crate) struct Lifetime {
    /// Timeout until its first request.
    pub(crate) first_request: Duration,
    /// When it is closed gracefully at the latest.
    pub(crate) until: Option<Instant>,
}

/// Serves until the client closes the connection, its lifetime ends, or `drain` is cancelled.
/// Requests in progress may finish, within the idle timeout.
pub(crate) async fn serve_until_the_end<C: GracefulConnection>(
    serving: C,
    drain: CancellationToken,
    state: &ConnectionState,
    life: Lifetime,
) {
    let mut serving = pin!(serving);
    let unused = async {
        tokio::time::sleep(life.first_request).await;
        if state.is_used() {
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

/// Runs the streams of HTTP/2 connections as tasks of this name, with timed polls.
#[derive(Clone, Copy)]
pub(crate) struct TimedExecutor(pub(crate) &'static str);

impl<F> Executor<F> for TimedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, stream: F) {
        drop(tasks::spawn(self.0, stream));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers<const N: usize>() -> [IpAddr; N] {
        std::array::from_fn(|number| IpAddr::from([192, 0, 2, u8::try_from(number).unwrap()]))
    }

    #[test]
    fn one_peer_does_not_take_all_connections() {
        let slots = ConnectionSlots::new(3, 2, Evict::Unused);
        let [a, b] = peers();
        let held = [slots.enter(a), slots.enter(a)];
        assert!(held.iter().all(Option::is_some));
        assert!(slots.enter(a).is_none());
        let slot_of_b = slots.enter(b);
        assert!(slot_of_b.is_some());
        assert!(slots.enter(b).is_none(), "three in total");
        drop(held);
        drop(slot_of_b);
        let state = slots.slots.lock();
        assert!(state.used == 0 && state.peers.is_empty());
        drop(state);
        assert!(slots.enter(a).is_some());
    }

    #[test]
    fn the_oldest_connection_that_may_go_gives_its_place_away() {
        for (evict, expected) in [(Evict::Unused, 2), (Evict::Idle, 1)] {
            let slots = ConnectionSlots::new(8, 8, evict);
            let held: Vec<_> = peers::<7>()
                .into_iter()
                .map(|peer| slots.enter(peer).unwrap())
                .collect();
            let _answering = held[0].state.begin();
            drop(held[1].state.begin());
            let _new = slots.enter("192.0.2.99".parse().unwrap()).unwrap();
            let evicted = |slot: &ConnectionSlot| slot.state.evicted.is_cancelled();
            assert_eq!(held.iter().position(evicted), Some(expected));
            assert_eq!(held.iter().filter(|slot| evicted(slot)).count(), 1);
        }
    }

    #[test]
    fn arrivals_are_forgotten() {
        let slots = ConnectionSlots::new(8, 8, Evict::Unused);
        let [peer] = peers();
        for _ in 0..1000 {
            drop(slots.enter(peer).unwrap().state.begin());
        }
        assert!(slots.slots.lock().arrivals.len() <= 17);
    }
}
