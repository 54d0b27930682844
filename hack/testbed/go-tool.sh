#!/usr/bin/env bash
# Builds a program that tests run beside archaware, from the version pinned in hack/testbed/NAME/go.mod: minutes on 2 cores the
# first time, nothing after that. Prints the folder with the binary.        hack/testbed/go-tool.sh karpenter|descheduler|referrers|helm|nfd
set -euo pipefail
# shellcheck source=hack/testbed/lib.sh
. "$(dirname "$0")/lib.sh"
name=${1:?which program?}
cd "$testbed/$name"
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
shopt -s nullglob
hash=$(cat go.mod go.sum ./*.go | sha256sum | cut -c1-12)
folder=$cache/$name/$hash
mkdir -p "$folder"
# Two builds at once would do the work twice.
exec 9> "$folder/lock"
flock 9
if [ ! -x "$folder/$name" ]; then
  say "building $name"
  package=$(sed -n 's/^tool //p' go.mod)
  source_of() {
    # Without its source in the module cache, `go list` prints no folder.
    go mod download "$1"
    go list -m -f '{{.Dir}}' "$1"
  }
  case $name in
    karpenter)
      module=$(source_of sigs.k8s.io/karpenter)
      mkdir -p "$folder/crds"
      install -m 644 "$module"/pkg/apis/crds/*.yaml "$module"/kwok/apis/crds/*.yaml "$folder/crds/"
      ;;
    descheduler)
      module=$(source_of sigs.k8s.io/descheduler)
      install -m 644 "$module/charts/descheduler/values.yaml" "$folder/values.yaml"
      ;;
    referrers | nfd) package=. ;;
  esac
  go build -trimpath -ldflags "-s -w" -o "$folder/$name.new" "$package"
  mv "$folder/$name.new" "$folder/$name"
fi
echo "$folder"
