//! Shared by tests and benches: control planes that `hack/test.sh` started, and real registries and
//! containerds per test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    clippy::default_trait_access,
    reason = "for tests: what cannot go on has failed"
)]

pub mod cluster;
mod executable;
mod mutation;
mod port;
pub mod servers;

pub use executable::{copy_program, write_script};
pub use mutation::mutated;
pub use port::free_port;

use std::path::PathBuf;

/// The program under test: the one that cargo built beside this test, or `ARCHAWARE_BIN` (a release
/// build for benches).
pub fn program() -> PathBuf {
    std::env::var_os("ARCHAWARE_BIN").map_or_else(
        || {
            // target/debug/deps/TEST-HASH
            let test = std::env::current_exe().unwrap();
            let folder = test.parent().and_then(|deps| deps.parent()).unwrap();
            let program = folder.join("archaware");
            assert!(program.is_file(), "cargo build has to come first");
            program
        },
        PathBuf::from,
    )
}
