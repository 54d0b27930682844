#!/usr/bin/env bash
# Shows archaware at work on this machine: a real control plane with nodes of three architectures, a real registry with
# test images, archaware, then workloads. Prints where each pod landed and why. Ends everything that it started.
set -euo pipefail
cd "$(dirname "$0")/.."
hack/install.sh
. hack/testbed/lib.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/archaware-demo.XXXXXX")
bed=$work/bed
trap 'trap - EXIT; [ ! -d "$bed" ] || { stop "$bed" archaware; hack/testbed/down.sh "$bed"; }; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

say "== Building what is missing (the first time: Kubernetes from its Go modules, about 7 minutes on 2 cores)"
hack/testbed/build.sh
cargo build --quiet --locked --workspace
began=$SECONDS

say "== A control plane, nodes of three architectures, and a registry with test images"
OWNER=$$ hack/testbed/up.sh "$bed" > /dev/null
export KUBECONFIG=$bed/kubeconfig/admin PATH=$bin:$PATH
hack/testbed/nodes.sh amd64 arm64 s390x
registry=$(hack/testbed/registry.sh "$bed")
target/debug/testimg push "$registry" > /dev/null
image() { echo "$registry/testimg/$1"; }

say "== archaware, with the permissions of manifests/archaware.yaml"
kubectl apply -f manifests/archaware.yaml -l app.kubernetes.io/component=access > /dev/null
sed "s#{client-certificate.*key}}#{token: $(kubectl -n archaware create token archaware)}}#" "$KUBECONFIG" > "$bed/kubeconfig/archaware"
start "$bed" archaware target/debug/archaware run --kubeconfig "$bed/kubeconfig/archaware" --listen 127.0.0.1:0
tainted() { [ "$(kubectl get nodes -o jsonpath='{.items[*].metadata.annotations.archaware\.dev/taint}' | wc -w)" = 3 ]; }
wait_for 30 "taints on the nodes (see $bed/log/archaware.log)" tainted
kubectl get nodes -o custom-columns='NODE:.metadata.name,TAINT:.metadata.annotations.archaware\.dev/taint'
echo

say "== Workloads that know nothing of architectures"
for app in multi amd64 arm64-s390x docker-list; do
  kubectl create deployment "$app" --image="$(image "$app")" > /dev/null
done
workload() { # NAME IMAGE...: a Deployment of several containers
  local name=$1
  shift
  printf 'apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: %s}\nspec:\n  selector: {matchLabels: {app: %s}}\n  template:\n    metadata: {labels: {app: %s}}\n    spec:\n      containers:\n' "$name" "$name" "$name"
  for i in "$@"; do printf '      - {name: %s, image: "%s"}\n' "$i" "$(image "$i")"; done
}
workload two-images amd64-arm64 arm64-s390x | kubectl apply -f - > /dev/null
workload torn amd64 arm64 | kubectl apply -f - > /dev/null
kubectl apply -f - > /dev/null <<EOF
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {containers: [{name: agent, image: "$(image arm64-s390x)"}]}
EOF
bound() { kubectl get pods -l "app in ($1)" -o jsonpath='{range .items[*]}{.spec.nodeName}{"\n"}{end}' | grep -c fake-; }
placed() { [ "$(bound 'multi,amd64,arm64-s390x,docker-list,two-images')" = 5 ] && [ "$(bound agent)" = 2 ]; }
wait_for 30 "the placement of the pods" placed
wait_for 30 "the event on the pod that fits nowhere" \
  sh -c 'kubectl get events --field-selector reason=NoCommonArchitecture -o name | grep -q event'

echo "Where each pod landed, and which architectures its images share:"
kubectl get pods --sort-by=.metadata.labels.app \
  -o custom-columns='WORKLOAD:.metadata.labels.app,NODE:.spec.nodeName,DECISION:.metadata.annotations.archaware\.dev/decision'
echo
echo "The pods of the DaemonSet need no decision of their own: its template was given their tolerations."
echo "Why torn could not be placed:"
kubectl get events --field-selector reason=NoCommonArchitecture -o jsonpath='{range .items[*]}  {.message}{"\n"}{end}' | head -1
echo
echo "What archaware sees in the images:"
target/debug/archaware inspect "$(image multi)" "$(image docker-list)" "$(image helm)"
echo
echo "Leaving again:"
stop "$bed" archaware
target/debug/archaware clean
say "== Done in $((SECONDS - began)) s; everything that was started is being ended"
