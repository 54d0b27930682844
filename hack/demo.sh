#!/usr/bin/env bash
# Types the commands of docs/tutorial.md and shows their output. Ends everything that they start.
set -euo pipefail
cd "$(dirname "$0")/.."
hack/install.sh
. hack/testbed/lib.sh
say "== Building what is missing (the first time: Kubernetes from its Go modules, about 7 minutes on 2 cores)"
hack/testbed/build.sh
cargo build --quiet --locked --workspace
work=$(mktemp -d "${TMPDIR:-/tmp}/archaware-demo.XXXXXX")
typing=''
finish() {
  trap - EXIT
  # Including its background processes.
  [ -z "$typing" ] || kill -- "-$typing" 2> /dev/null || true
  hack/testbed/down.sh "$work"/*/
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
sed -n 's/^    [$>] //p' docs/tutorial.md > "$work/commands"
TMPDIR=$work OWNER=$$ setsid bash -ev "$work/commands" &
typing=$!
wait "$typing"
say "== Done; everything that was started is being ended"
