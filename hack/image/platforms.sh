# The platforms of the image, and what Rust calls them; to be sourced.
# shellcheck shell=bash disable=SC2034
declare -A targets=([amd64]=x86_64-unknown-linux-musl [arm64]=aarch64-unknown-linux-musl)
