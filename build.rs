//! Generates containerd's gRPC API from the files of `proto/`, without `protoc`.

use std::error::Error;

/// The services that archaware calls (or passes on, in `content-proxy`), of containerd's API.
const SERVICES: [&str; 5] = [
    "content/v1/content",
    "images/v1/images",
    "leases/v1/leases",
    "namespaces/v1/namespace",
    "version/v1/version",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = SERVICES
        .map(|service| format!("github.com/containerd/containerd/api/services/{service}.proto"));
    let mut descriptors = protox::compile(files, ["proto"])?;
    for file in &mut descriptors.file {
        // Comments: some are no Markdown.
        file.source_code_info = None;
    }
    tonic_prost_build::configure()
        .build_server(false)
        .include_file("containerd.rs")
        .compile_fds(descriptors)?;
    Ok(())
}
