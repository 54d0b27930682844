#!/usr/bin/env bash
# down.sh FOLDER: ends what up.sh, registry.sh and node/up.sh started there, by the pids they wrote down, and removes
# the folder.
set -uo pipefail
. "$(dirname "$0")/lib.sh"
run=$(realpath -m "${1:?usage: down.sh FOLDER}")
[ -d "$run/pid" ] || exit 0
stop "$run" watchdog.sh
[ ! -d "$run/node" ] || "$testbed/node/down.sh" "$run"
for name in docker-registry kube-scheduler kube-controller-manager kube-apiserver etcd; do stop "$run" "$name"; done
rm -rf "$run"
