#!/usr/bin/env bash
# A real node beside the control plane of ../up.sh: the kubelet, Debian's containerd and runc, on loopback, as root.
#   hack/testbed/node/up.sh FOLDER REGISTRY      REGISTRY (plain http) is reg.local for the node
# Its pods have to use hostNetwork: the CNI has only a loopback. Running it again restarts processes that have ended.
set -euo pipefail
# shellcheck source=hack/testbed/lib.sh
. "$(dirname "$0")/../lib.sh"
here=$testbed/node
run=$(realpath -m "${1:?usage: node/up.sh FOLDER REGISTRY}") registry=${2:?usage: node/up.sh FOLDER REGISTRY}
node=$run/node
[ -s "$run/ports" ] || die "no control plane in $run: run up.sh first"
mkdir -p "$node"/{containerd,cni,certs.d/reg.local,opt,podlogs,manifests,volplugins,kubelet/pki}
[ -s "$node/ports" ] || free_ports 2 > "$node/ports"
{ read -r kubelet; read -r healthz; } < "$node/ports"
# A cgroup of its own, so that two kubelets do not end each other's containers.
group=archaware-$(echo "$run" | sha256sum | cut -c1-12)
echo "$group" > "$node/cgroup"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mkdir -p "/sys/fs/cgroup/$group"
  sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control || true
else
  for controller in /sys/fs/cgroup/*/; do
    mkdir -p "$controller$group" 2> /dev/null || continue
    for file in cpuset.cpus cpuset.mems; do
      [ ! -e "$controller$file" ] || cat "$controller$file" > "$controller$group/$file"
    done
  done
fi
fill() { sed -e "s#@NODE@#$node#g; s#@RUN@#$run#g; s#@KUBELET@#$kubelet#g; s#@HEALTHZ@#$healthz#g; s#@CGROUP@#/$group#g" "$here/$1"; }
fill containerd.toml > "$node/containerd.toml"
fill kubelet.yaml > "$node/kubelet.yaml"
echo '{"cniVersion":"0.4.0","name":"lo","plugins":[{"type":"loopback"}]}' > "$node/cni/10-lo.conflist"
printf 'server = "http://%s"\n[host."http://%s"]\n  capabilities = ["pull", "resolve"]\n' "$registry" "$registry" \
  > "$node/certs.d/reg.local/hosts.toml"
alive "$run" containerd || start "$run" containerd containerd -c "$node/containerd.toml"
wait_for 30 "containerd's socket" ctr -a "$node/containerd/containerd.sock" version
alive "$run" kubelet || start "$run" kubelet "$bin/kubelet" --config="$node/kubelet.yaml" \
  --kubeconfig="$run/kubeconfig/kubelet" --hostname-override=localhost --root-dir="$node/kubelet" \
  --cert-dir="$node/kubelet/pki" -v=2
ready() {
  "$bin/kubectl" --kubeconfig "$run/kubeconfig/admin" get node localhost \
    -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -q True
}
wait_for 60 "a ready node (see $run/log/kubelet.log)" ready
echo "$node/containerd/containerd.sock"
