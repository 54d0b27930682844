#!/usr/bin/env bash
# The figures of the README, each beside its floor from the same run.   hack/bench.sh [cold restart warm cache selection hung memory latency admission rollout scale bound autoscaling ...]
set -euo pipefail
cd "$(dirname "$0")/.."
hack/install.sh
. hack/testbed/lib.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/archaware-bench.XXXXXX")
finish() {
  trap - EXIT
  # Some benches start a control plane of their own beside the shared one, and cannot end it when they are killed.
  hack/testbed/down.sh "$work"/*/
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
hack/testbed/build.sh
cargo build --quiet --locked -p testimg
# Another version can be measured with ARCHAWARE_BIN.
if [ -z "${ARCHAWARE_BIN-}" ]; then
    cargo build --quiet --locked --release
    ARCHAWARE_BIN=$work/archaware
    cp target/release/archaware "$ARCHAWARE_BIN"
fi
export ARCHAWARE_BIN
ARCHAWARE_TEST_CONTAINERDS=$(hack/testbed/containerd/build.sh)
ARCHAWARE_TEST_KARPENTER=$(hack/testbed/go-tool.sh karpenter)
ARCHAWARE_TEST_DESCHEDULER=$(hack/testbed/go-tool.sh descheduler)
export ARCHAWARE_TEST_CONTAINERDS ARCHAWARE_TEST_KARPENTER ARCHAWARE_TEST_DESCHEDULER
cargo bench --quiet --locked --no-run --benches
OWNER=$$ hack/testbed/up.sh "$work/bed" > /dev/null
hack/testbed/registry.sh "$work/bed" > /dev/null
target/debug/testimg push "$(cat "$work/bed/registry/address")" > /dev/null
export ARCHAWARE_TEST_BEDS=$work/bed ARCHAWARE_KUBECTL=$bin/kubectl
echo "$(nproc) cores, load before: $(cut -d' ' -f1-3 /proc/loadavg)"
cargo bench --quiet --locked --bench images -- "$@"
cargo bench --quiet --locked --bench cluster -- "$@"
