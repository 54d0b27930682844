# Shared by the scripts of the test bed; to be sourced.
# shellcheck shell=bash

testbed=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Binaries survive the checkout: the second run starts in seconds.
cache=${ARCHAWARE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/archaware}
# One folder of binaries per set of versions.
versions=$(cat "$testbed/go.mod" "$testbed/go.sum" | sha256sum | cut -c1-12)
# shellcheck disable=SC2034
bin=${KUBEBUILDER_ASSETS:-$cache/testbed/$versions}

say() { echo "$*" >&2; }
die() { say "error: $*"; exit 1; }

# free_ports N: that many free ports of loopback, each on a line. Below 32768, or an outgoing connection could take one before the
# server listens.
free_ports() {
  python3 - "$1" <<'PY'
import random, socket, sys
held = []
while len(held) < int(sys.argv[1]):
    s = socket.socket()
    try:
        s.bind(("127.0.0.1", random.randrange(10000, 20000)))
        held.append(s)
    except OSError:
        s.close()
print("\n".join(str(s.getsockname()[1]) for s in held))
PY
}

# start RUN NAME COMMAND...: runs it in the background, its output in RUN/log, its pid in RUN/pid.
start() {
  local run=$1 name=$2
  shift 2
  mkdir -p "$run/log" "$run/pid"
  # Without the lock of .ci/run (descriptor 8).
  setsid nohup "$@" >> "$run/log/$name.log" 2>&1 < /dev/null 8>&- &
  echo $! > "$run/pid/$name"
}

# alive RUN NAME: whether the process that start recorded still runs (and not another process with its pid).
alive() {
  local pid
  pid=$(cat "$1/pid/$2" 2> /dev/null) || return 1
  [ -d "/proc/$pid" ] && tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null | grep -q -- "$2"
}

# stop RUN NAME: asks it to end, then insists.
stop() {
  local run=$1 name=$2 pid
  if alive "$run" "$name"; then
    pid=$(cat "$run/pid/$name")
    kill "$pid" 2> /dev/null
    for _ in $(seq 100); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
    [ ! -d "/proc/$pid" ] || kill -9 "$pid" 2> /dev/null
  fi
  rm -f "$run/pid/$name"
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what did not happen in time"
    sleep 0.1
  done
}
