#!/usr/bin/env bash
# nodes.sh ARCHITECTURE...: a fake Ready node fake-ARCHITECTURE for each, in the cluster of KUBECONFIG.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
for arch in "$@"; do
  # Unlike for pods, the API server keeps the status of a node that is created.
  "$bin/kubectl" create -f - > /dev/null <<EOF
apiVersion: v1
kind: Node
metadata:
  name: fake-$arch
  labels: {kubernetes.io/arch: $arch, kubernetes.io/os: linux, kubernetes.io/hostname: fake-$arch}
status:
  nodeInfo: {architecture: $arch, operatingSystem: linux, kubeletVersion: v1.36.3, kernelVersion: fake, osImage: fake,
    containerRuntimeVersion: "fake://1", bootID: x, machineID: x, systemUUID: x, kubeProxyVersion: ""}
  capacity: {cpu: "64", memory: 256Gi, pods: "500"}
  allocatable: {cpu: "64", memory: 256Gi, pods: "500"}
  addresses: [{type: Hostname, address: fake-$arch}]
  conditions: [{type: Ready, status: "True", reason: KubeletReady, lastHeartbeatTime: "$(date -u +%FT%TZ)", lastTransitionTime: "$(date -u +%FT%TZ)"}]
EOF
done
