# The platforms of the image, and what Debian and Rust call them; to be sourced.
# shellcheck shell=bash disable=SC2034
declare -A triplets=([amd64]=x86_64-linux-gnu [arm64]=aarch64-linux-gnu)
declare -A debian=([amd64]=amd64 [arm64]=arm64)
declare -A targets=([amd64]=x86_64-unknown-linux-gnu [arm64]=aarch64-unknown-linux-gnu)
# Where a program of that architecture looks for its dynamic linker (psABI).
declare -A loaders=([amd64]=/lib64/ld-linux-x86-64.so.2 [arm64]=/lib/ld-linux-aarch64.so.1)
