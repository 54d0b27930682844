#!/usr/bin/env bash
# registry.sh FOLDER: Debian's docker-registry on a free port of loopback, its data in FOLDER. Prints its address.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
run=$(realpath -m "${1:?usage: registry.sh FOLDER}")
mkdir -p "$run/registry"
[ -s "$run/registry/address" ] || echo "127.0.0.1:$(free_ports 1)" > "$run/registry/address"
address=$(cat "$run/registry/address")
cat > "$run/registry/config.yml" <<EOF
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $run/registry/data}, delete: {enabled: true}}
http: {addr: "$address"}
EOF
alive "$run" docker-registry || start "$run" docker-registry docker-registry serve "$run/registry/config.yml"
wait_for 20 "a registry on $address" curl -fsS "http://$address/v2/"
echo "$address"
