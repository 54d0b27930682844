#!/usr/bin/env bash
# testimg/update.sh [REGISTRY]: pushes the test images to a registry that speaks plain http (default 127.0.0.1:5000).
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo run --quiet --locked -p testimg -- push "${1:-127.0.0.1:5000}"
