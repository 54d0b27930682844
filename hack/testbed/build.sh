#!/usr/bin/env bash
# Builds etcd and Kubernetes' binaries with Go from the versions pinned in go.mod: about 7 min on 2 cores the first
# time, nothing after that.   hack/testbed/build.sh [kubectl kubelet ...]
set -euo pipefail
. "$(dirname "$0")/lib.sh"
[ -z "${KUBEBUILDER_ASSETS:-}" ] || exit 0
mkdir -p "$bin"
# Two builds at once would do the work twice.
exec 9> "$bin.lock"
flock 9
cd "$testbed"
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly
stamp=k8s.io/component-base/version
for component in "${@:-etcd}" $([ $# -gt 0 ] || echo kube-apiserver kube-scheduler kube-controller-manager kubectl kubelet); do
  [ ! -x "$bin/$component" ] || continue
  version=${version:-$(go list -m -f '{{.Version}}' k8s.io/kubernetes)}
  IFS=. read -r major minor _ <<< "${version#v}"
  case $component in etcd) package=go.etcd.io/etcd/server/v3 ;; *) package=k8s.io/kubernetes/cmd/$component ;; esac
  say "building $component"
  go build -trimpath -o "$bin/$component.new" \
    -ldflags "-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor" "$package"
  mv "$bin/$component.new" "$bin/$component"
done
