#!/usr/bin/env bash
# Every test: pure, in process, on real control planes with a real registry, on a real node with real containerd. Ends
# everything that it started.      hack/test.sh [ARGUMENTS OF cargo test]
#
# IMAGE=yes                           builds archaware's image and tests it, as a run without arguments does
# CLUSTERS=3                          control planes side by side: as many tests run at once
# KUBEBUILDER_ASSETS=folder           these binaries of etcd and Kubernetes instead of building them
# ARCHAWARE_TEST_EXISTING_CLUSTER=yes uses the cluster of KUBECONFIG. Tests DELETE ITS NODES AND PODS: throw-away clusters only
set -euo pipefail
cd "$(dirname "$0")/.."
hack/install.sh
. hack/testbed/lib.sh
. hack/steps.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/archaware-test.XXXXXX")
# Some processes run as an unprivileged user and need to read their files.
chmod 711 "$work"
image=''
finish() {
  trap - EXIT
  [ -z "$image" ] || kill -- "-$image" 2> /dev/null || true
  hack/testbed/down.sh "$work"/*/
  rm -rf "$work" "$work.image"
  report_steps
}
trap finish EXIT
trap 'exit 130' INT TERM

if [ $# -eq 0 ] || [ "${IMAGE:-}" = yes ]; then
  # It takes minutes: beside everything else, and only the tests that need it wait for it.
  export ARCHAWARE_TEST_IMAGE=$work.image
  mkdir -p "$ARCHAWARE_TEST_IMAGE"
  # shellcheck disable=SC2016
  setsid nice bash -c 'hack/build.sh --quick --out "$0/layout" > "$0/digest.new" 2> "$0/log" \
    && mv "$0/digest.new" "$0/digest" || { touch "$0/failed"; cat "$0/log" >&2; }' "$ARCHAWARE_TEST_IMAGE" &
  image=$!
fi
step "building the tests"
hack/testbed/build.sh
ARCHAWARE_TEST_CONTAINERDS=$(hack/testbed/containerd/build.sh)
ARCHAWARE_TEST_KARPENTER=$(hack/testbed/go-tool.sh karpenter)
ARCHAWARE_TEST_DESCHEDULER=$(hack/testbed/go-tool.sh descheduler)
ARCHAWARE_TEST_REFERRERS=$(hack/testbed/go-tool.sh referrers)
ARCHAWARE_TEST_HELM=$(hack/testbed/go-tool.sh helm)
ARCHAWARE_TEST_NFD=$(hack/testbed/go-tool.sh nfd)
# Benches are only checked, by the lints.
cargo build --locked --workspace --all-features --lib --bins --tests
beds=()
if [ -n "${ARCHAWARE_TEST_EXISTING_CLUSTER:-}" ]; then
  [ "$ARCHAWARE_TEST_EXISTING_CLUSTER" = yes ] || die "ARCHAWARE_TEST_EXISTING_CLUSTER has to be yes or empty"
  bed=$work/existing
  mkdir -p "$bed/kubeconfig" "$bed/pid"
  cp "${KUBECONFIG:?which cluster?}" "$bed/kubeconfig/admin"
  touch "$bed/existing"
  beds+=("$bed")
else
  step "starting control planes"
  for n in $(seq "${CLUSTERS:-3}"); do
    bed=$work/bed$n
    OWNER=$$ hack/testbed/up.sh "$bed" > /dev/null
    beds+=("$bed")
  done
  # One more with a real node, for the tests that need one.
  bed=$work/bed-node
  OWNER=$$ hack/testbed/up.sh "$bed" > /dev/null
  hack/testbed/registry.sh "$bed" > /dev/null
  target/debug/testimg push "$(cat "$bed/registry/address")" > /dev/null
  hack/testbed/node/up.sh "$bed" "$(cat "$bed/registry/address")" > /dev/null
  beds+=("$bed")
fi
for bed in "${beds[@]}"; do
  hack/testbed/registry.sh "$bed" > /dev/null
  target/debug/testimg push "$(cat "$bed/registry/address")" > /dev/null
done

export ARCHAWARE_TEST_BEDS ARCHAWARE_TEST_CONTAINERDS ARCHAWARE_TEST_KARPENTER ARCHAWARE_TEST_DESCHEDULER \
  ARCHAWARE_TEST_REFERRERS ARCHAWARE_TEST_HELM ARCHAWARE_TEST_NFD
export ARCHAWARE_KUBECTL=$bin/kubectl
# Test programs may be in another folder than archaware (build.build-dir of cargo).
export ARCHAWARE_BIN=${ARCHAWARE_BIN:-$(realpath "${CARGO_TARGET_DIR:-target}/debug/archaware")}
ARCHAWARE_TEST_BEDS=$(IFS=:; echo "${beds[*]}")
# A test takes a free control plane and waits while there is none.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((${#beds[@]} + 1))}
# Without arguments nothing may be left out: tests/tiers.rs sees to it.
[ $# -gt 0 ] || export ARCHAWARE_TEST_TIERS=all
# One failure must not hide those of the targets after it.
tests=(cargo test --locked --workspace --all-features --no-fail-fast)
if [ $# -gt 0 ]; then
  step "testing"
  "${tests[@]}" "$@"
  exit
fi
failed=''
step "unit tests, tests in process"
# Every test target but those that have a step of their own: a new target must not be left out.
mapfile -t targets < <(cargo metadata --locked --no-deps --format-version 1 \
  | jq -r '.packages[].targets[] | select(.kind[0] == "test").name' | grep -vxE 'cluster|installed|servers|tiers')
"${tests[@]}" --lib --bins "${targets[@]/#/--test=}" || failed=yes
step "tests on control planes"
# One unlucky moment does not fail a run, and no flaky test stays hidden: a failed test is repeated once, and reported.
if ! "${tests[@]}" --test cluster 2>&1 | tee "$STEPS/output"; then
  sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$STEPS/output" > "$STEPS/repeated"
  # Only the output of the failed tests.
  sed -i -n '/^---- .* stdout ----$/,/^test result: /p' "$STEPS/output"
  mapfile -t names < "$STEPS/repeated"
  step "repeating ${#names[@]} failed tests"
  # Without names the test program did not compile or was killed, so nothing can be repeated.
  if [ ${#names[@]} -eq 0 ] || ! "${tests[@]}" --test cluster -- --exact "${names[@]}"; then failed=yes; fi
fi
step "tests with registries and containerds"
"${tests[@]}" --test servers || failed=yes
step "tests of the image, after its build"
"${tests[@]}" --test installed --test tiers || failed=yes
[ -z "$failed" ]
