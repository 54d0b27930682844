# Steps with their times, and the tests that were repeated: for .ci/run and hack/test.sh; to be sourced.
# shellcheck shell=bash

# The folder where steps are collected. The script that made it prints the report.
if [ -z "${STEPS:-}" ]; then
  STEPS=$(mktemp -d "${TMPDIR:-/tmp}/archaware-steps.XXXXXX")
  touch "$STEPS/times"
  export STEPS
  steps_owner=$$
fi

# step NAME: begins a step; the step before ends.
step() {
  printf '%s\t%s\n' "$(date +%s)" "$*" >> "$STEPS/times"
  echo "== $*" >&2
}

# report_steps: prints the times and the repeated tests, then removes the folder. Only in the script that made the folder.
report_steps() {
  [ "${steps_owner:-}" = $$ ] || return 0
  {
    echo
    printf '%s\t%s\n' "$(date +%s)" '' | cat "$STEPS/times" - | awk -F '\t' '
      NR == 1 { first = $1 }
      NR > 1 { printf "%5d s  %s\n", $1 - start, name }
      { start = $1; name = $2 }
      END { printf "%5d s  in all\n", start - first }'
    if [ -s "$STEPS/repeated" ]; then
      echo
      echo "FAILED AT FIRST, then repeated on an emptied control plane:"
      sed 's/^/  /' "$STEPS/repeated"
      # A test also prints the state of its cluster, which can be megabytes. The whole output stands further up.
      awk '/^---- .* stdout ----$/ { line = 0 } line++ < 60 { print substr($0, 1, 300) }' "$STEPS/output"
    fi
  } >&2
  rm -rf "$STEPS"
}
