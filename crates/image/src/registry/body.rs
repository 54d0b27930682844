//! Reads response bodies within a limit per body and a budget for all bodies.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::error::ImageError;

use super::exchange_error::ExchangeError;

/// Bodies up to this size need no part of the budget, because nearly all documents are smaller. The
/// limit on concurrent image fetches bounds the sum of these bodies to 8 MiB.
const SMALL: u64 = 64 << 10;
/// Maximum bytes of all larger bodies in memory, while they are received and until they are
/// dropped. Fourteen documents of the maximum size.
const MAX_LARGE: usize = 56 << 20;
/// The budget of all bodies. Cheap to clone.
#[derive(Clone)]
pub(super) struct Bodies(Arc<Semaphore>);

/// A body that holds its part of the budget until it is dropped.
struct Held {
    bytes: Bytes,
    _part: Part,
}

/// A part of the budget, and of the host's share of it.
struct Part {
    total_permits: OwnedSemaphorePermit,
    host_permits: OwnedSemaphorePermit,
}

impl Part {
    /// Gives back the bytes above `size`.
    fn shrink(&mut self, size: usize) {
        for part in [&mut self.total_permits, &mut self.host_permits] {
            drop(part.split(part.num_permits().saturating_sub(size)));
        }
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Bodies {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LARGE)))
    }

    /// Reads a decompressed body and stops at `limit`. Before a body grows beyond [`SMALL`], takes
    /// its whole size from the budget, so that bodies that stall never exceed the budget. Waits
    /// until the budget has room.
    pub(super) async fn read(
        &self,
        what: &str,
        mut response: reqwest::Response,
        limit: u64,
        share: &Arc<Semaphore>,
        deadline: Instant,
    ) -> Result<Bytes, ExchangeError> {
        let too_large = |size| Err(ExchangeError::Other(ImageError::too_large(what, size)));
        let announced = response.content_length();
        if let Some(length) = announced.filter(|length| *length > limit) {
            return too_large(length);
        }
        let needed = announced.unwrap_or(limit);
        let mut part = None;
        let mut body = BytesMut::new();
        loop {
            let chunk = timeout_at(deadline, response.chunk()).await;
            let Some(chunk) = chunk.map_err(|_| ExchangeError::TimedOut)?? else {
                break;
            };
            let size = (body.len() + chunk.len()) as u64;
            if size > limit {
                return too_large(size);
            }
            if size > SMALL && part.is_none() {
                part = Some(self.take(needed, share, deadline).await?);
            }
            body.extend_from_slice(&chunk);
        }
        let bytes = body.freeze();
        Ok(match part {
            Some(mut part) => {
                part.shrink(bytes.len());
                Bytes::from_owner(Held { bytes, _part: part })
            }
            None => bytes,
        })
    }

    async fn take(
        &self,
        size: u64,
        share: &Arc<Semaphore>,
        deadline: Instant,
    ) -> Result<Part, ExchangeError> {
        let size = u32::try_from(size).map_err(|_| ExchangeError::Busy)?;
        let taking = async {
            let host_permits = share.clone().acquire_many_owned(size).await;
            let total_permits = self.0.clone().acquire_many_owned(size).await;
            host_permits.ok().zip(total_permits.ok())
        };
        // Not `TimedOut`, because a wait for the budget does not count as a timeout of the host.
        let taken = timeout_at(deadline, taking).await.ok().flatten();
        let (host_permits, total_permits) = taken.ok_or(ExchangeError::Busy)?;
        Ok(Part {
            total_permits,
            host_permits,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use futures::{StreamExt, future::join_all, stream};
    use http_body_util::StreamBody;
    use hyper::body::Frame;

    use super::super::host_limiter::MAX_OF_HOST;
    use super::*;
    use archaware_platform::MAX_DOCUMENT;

    const CHUNK: usize = 64 << 10;

    /// A response that stalls after `chunks` chunks. Adds the number of sent bytes to `read`.
    fn stalling(chunks: usize, read: &Arc<AtomicUsize>) -> reqwest::Response {
        let read = read.clone();
        let body = stream::iter(0..chunks).map(move |_| {
            read.fetch_add(CHUNK, Ordering::SeqCst);
            Ok::<_, io::Error>(Frame::data(Bytes::from(vec![b' '; CHUNK])))
        });
        let body = StreamBody::new(body.chain(stream::pending()));
        let body = reqwest::Body::wrap(body);
        http::Response::new(body).into()
    }

    fn without_length(chunks: usize) -> reqwest::Response {
        let chunk = Bytes::from(vec![b' '; CHUNK]);
        let frames =
            std::iter::repeat_n(chunk, chunks).map(|chunk| Ok::<_, io::Error>(Frame::data(chunk)));
        let body = StreamBody::new(stream::iter(frames));
        http::Response::new(reqwest::Body::wrap(body)).into()
    }

    fn share() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(MAX_OF_HOST))
    }

    #[tokio::test(start_paused = true)]
    async fn one_host_leaves_most_of_the_budget() {
        let (bodies, read, host) = (Bodies::new(), Arc::new(AtomicUsize::new(0)), share());
        let deadline = Instant::now() + Duration::from_secs(5);
        let stalled =
            (0..50).map(|_| bodies.read("x", stalling(63, &read), MAX_DOCUMENT, &host, deadline));
        let stalled = join_all(stalled);
        tokio::pin!(stalled);
        let soon = tokio::time::timeout(Duration::from_secs(1), &mut stalled).await;
        assert!(soon.is_err());
        let other = bodies
            .read("x", whole(3 << 20), MAX_DOCUMENT, &share(), deadline)
            .await;
        assert_eq!(other.ok().map(|bytes| bytes.len()), Some(3 << 20));
    }

    fn whole(size: usize) -> reqwest::Response {
        http::Response::new(reqwest::Body::from(vec![b' '; size])).into()
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_stall_near_their_end_hold_no_more_than_the_budget() {
        let (bodies, read) = (Bodies::new(), Arc::new(AtomicUsize::new(0)));
        let deadline = Instant::now() + Duration::from_secs(5);
        let hosts: Vec<_> = (0..20).map(|_| share()).collect();
        let reading = (0..200).map(|number| {
            let host = &hosts[number % hosts.len()];
            bodies.read("x", stalling(63, &read), MAX_DOCUMENT, host, deadline)
        });
        let reading = join_all(reading);
        tokio::pin!(reading);
        let soon = tokio::time::timeout(Duration::from_secs(1), &mut reading).await;
        assert!(soon.is_err(), "none of them ends");
        let held = read.load(Ordering::SeqCst);
        assert!(held <= MAX_LARGE + 200 * 2 * CHUNK, "{held} bytes");
        // Small documents need no part of the budget.
        let small = bodies
            .read("x", whole(CHUNK), MAX_DOCUMENT, &hosts[0], deadline)
            .await;
        assert_eq!(small.ok().map(|bytes| bytes.len()), Some(CHUNK));
        for ended in reading.await {
            assert!(matches!(
                ended,
                Err(ExchangeError::TimedOut | ExchangeError::Busy)
            ));
        }
        assert_eq!(bodies.0.available_permits(), MAX_LARGE);
    }

    #[tokio::test]
    async fn a_large_body_holds_its_part_until_it_is_dropped() {
        let bodies = Bodies::new();
        let deadline = Instant::now() + Duration::from_secs(5);
        // Without a Content-Length, a body takes the whole limit and gives back the rest at its
        // end.
        for response in [whole(1 << 20), without_length(16)] {
            let host = share();
            let body = bodies.read("x", response, MAX_DOCUMENT, &host, deadline);
            let copy = body.await.ok().unwrap().clone();
            assert_eq!(copy.len(), 1 << 20);
            assert_eq!(bodies.0.available_permits(), MAX_LARGE - (1 << 20));
            drop(copy);
            assert_eq!(bodies.0.available_permits(), MAX_LARGE);
        }
    }
}
