#!/usr/bin/env bash
# node/down.sh FOLDER: ends the node of node/up.sh: the kubelet, every container, containerd; unmounts their mounts.
set -uo pipefail
# shellcheck source=hack/testbed/lib.sh
. "$(dirname "$0")/../lib.sh"
run=$(realpath -m "${1:?usage: node/down.sh FOLDER}")
node=$run/node
stop "$run" kubelet
if alive "$run" containerd; then
  ctr=(timeout 10 ctr -a "$node/containerd/containerd.sock" -n k8s.io)
  for task in $("${ctr[@]}" tasks ls -q 2> /dev/null); do
    "${ctr[@]}" tasks kill -s SIGKILL "$task" > /dev/null 2>&1
    "${ctr[@]}" tasks rm -f "$task" > /dev/null 2>&1
  done
  for container in $("${ctr[@]}" containers ls -q 2> /dev/null); do
    "${ctr[@]}" containers rm "$container" > /dev/null 2>&1
  done
fi
stop "$run" containerd
# A shim outlives a containerd that was killed; it names its containerd's socket.
for pid in $(pgrep -f "containerd-shim.* -address $node/containerd/containerd.sock"); do kill -9 "$pid" 2> /dev/null; done
awk -v n="$node/" 'index($2, n) == 1 {print $2}' /proc/mounts | sort -r | while read -r mount; do umount "$mount"; done
group=$(cat "$node/cgroup" 2> /dev/null) &&
  find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} + 2> /dev/null
rm -rf "$node"
