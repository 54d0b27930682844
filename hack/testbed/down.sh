#!/usr/bin/env bash
# down.sh FOLDER...: ends what up.sh, registry.sh and node/up.sh started there, by the pids they wrote down, and removes
# the folders. Several test beds end side by side.
set -uo pipefail
. "$(dirname "$0")/lib.sh"
[ $# -gt 0 ] || die "usage: down.sh FOLDER..."
down() {
  local run=$1 name
  [ -d "$run/pid" ] || return 0
  stop "$run" watchdog.sh
  [ ! -d "$run/node" ] || "$testbed/node/down.sh" "$run"
  for name in docker-registry kube-scheduler kube-controller-manager kube-apiserver etcd; do stop "$run" "$name"; done
  rm -rf "$run"
}
for run; do down "$(realpath -m "$run")" & done
wait
