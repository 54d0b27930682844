#!/usr/bin/env bash
# Builds containerd with Go from the versions pinned in 1.7/ and 2/: about a minute each on 2 cores the first time,
# nothing after that. Prints the binaries that tests run against, Debian's 1.6 first, with colons between them.
set -euo pipefail
# shellcheck source=hack/testbed/lib.sh
. "$(dirname "$0")/../lib.sh"
here=$testbed/containerd
list=$(command -v containerd)
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
for version in 1.7 2; do
  cd "$here/$version"
  hash=$(cat go.mod go.sum | sha256sum | cut -c1-12)
  binary=$cache/containerd/$hash/containerd
  mkdir -p "$(dirname "$binary")"
  # Two builds at once would do the work twice.
  exec 9> "$(dirname "$binary")/lock"
  flock 9
  if [ ! -x "$binary" ]; then
    say "building containerd $version"
    package=$(sed -n 's/^tool //p' go.mod)
    go build -trimpath -ldflags "-s -w" -o "$binary.new" "$package"
    mv "$binary.new" "$binary"
  fi
  list=$list:$binary
done
echo "$list"
