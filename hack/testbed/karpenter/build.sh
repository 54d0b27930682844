#!/usr/bin/env bash
# Builds Karpenter with its kwok provider, from the version pinned in go.mod: about 4 min on 2 cores the first time, nothing
# after that. Prints the folder with the binary and its custom resource definitions.
set -euo pipefail
# shellcheck source=hack/testbed/lib.sh
. "$(dirname "$0")/../lib.sh"
cd "$testbed/karpenter"
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
hash=$(cat go.mod go.sum | sha256sum | cut -c1-12)
folder=$cache/karpenter/$hash
mkdir -p "$folder"
# Two builds at once would do the work twice.
exec 9> "$folder/lock"
flock 9
if [ ! -x "$folder/karpenter" ]; then
  say "building karpenter"
  package=$(sed -n 's/^tool //p' go.mod)
  module=$(go list -m -f '{{.Dir}}' sigs.k8s.io/karpenter)
  mkdir -p "$folder/crds"
  cp "$module"/pkg/apis/crds/*.yaml "$module"/kwok/apis/crds/*.yaml "$folder/crds/"
  chmod -R u+w "$folder/crds"
  go build -trimpath -ldflags "-s -w" -o "$folder/karpenter.new" "$package"
  mv "$folder/karpenter.new" "$folder/karpenter"
fi
echo "$folder"
