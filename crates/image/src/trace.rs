//! Debug log events that show how an image is resolved: each request to a registry, a token server,
//! a credential program and containerd, and each answer from a cache. `archaware inspect --trace`
//! prints the same events. They hold no secret: paths have no query, and credentials appear only as
//! their kind.

use std::{fmt::Display, time::Instant};

/// Target of the events. It is part of the interface (docs/metrics.md), so it stays the same when a
/// crate is renamed.
pub const TARGET: &str = "archaware::image::trace";

/// The receiver of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Peer {
    Registry,
    #[strum(serialize = "token server")]
    TokenServer,
    /// A credential helper or a credential provider plugin.
    Program,
    Containerd,
    /// This process's caches.
    Memory,
}

impl Peer {
    /// The name in the log.
    fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One request, to be reported when it ends.
pub(crate) struct Call<'a> {
    pub(crate) peer: Peer,
    /// HTTP method, gRPC method, or the kind of the lookup.
    pub(crate) method: &'a str,
    /// `host[:port]`, the name of a program, or the namespace in containerd.
    pub(crate) host: &'a str,
    /// URL path without its query, or an image or digest.
    pub(crate) path: &'a str,
    /// Counts from 1.
    pub(crate) attempt: u32,
    /// Kind of credential.
    pub(crate) credential: &'static str,
}

/// No credential was sent.
pub(crate) const NO_CREDENTIAL: &str = "none";

/// Whether events are enabled. If not, callers need not format the parts of an event.
pub(crate) fn is_enabled() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

impl Call<'_> {
    /// Reports the end of the call: its status or the kind of failure.
    pub(crate) fn ended(&self, started: Instant, status: impl Display) {
        let milliseconds = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::debug!(
            target: TARGET,
            peer = self.peer.as_str(),
            method = self.method,
            host = self.host,
            path = self.path,
            status = %status,
            milliseconds,
            attempt = self.attempt,
            credential = self.credential,
            "call"
        );
    }
}

/// Reports an answer from one of this process's caches.
pub(crate) fn cached(cache: &'static str, subject: impl Display, answer: impl Display) {
    if !is_enabled() {
        return;
    }
    let call = Call {
        peer: Peer::Memory,
        method: cache,
        host: "",
        path: &subject.to_string(),
        attempt: 1,
        credential: NO_CREDENTIAL,
    };
    call.ended(Instant::now(), answer);
}
