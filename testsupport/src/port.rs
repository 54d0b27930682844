//! Ports of loopback for servers that tests start.

use std::{
    net::TcpListener,
    sync::atomic::{AtomicU32, Ordering},
};

/// Below the ports that the kernel gives to outgoing connections (32768 to 60999 by default), and
/// above those of `hack/testbed/lib.sh`.
const FIRST: u16 = 20_000;
const COUNT: u32 = 12_000;

/// A port of loopback that no server listens on. An outgoing connection cannot take it before the
/// server listens, and this process gives it to no other test.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes side by side begin at different ports.
    let own = std::process::id().wrapping_mul(97);
    for _ in 0..COUNT {
        let number = own.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = FIRST + u16::try_from(number).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port of loopback is free")
}
