#!/usr/bin/env bash
# watchdog.sh PID FOLDER: ends the test bed in FOLDER when the process PID is gone, even if that was killed.
while [ -d "/proc/$1" ]; do sleep 1; done
rm -f "$2/pid/watchdog.sh"
exec "$(dirname "$0")/down.sh" "$2"
