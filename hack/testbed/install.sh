#!/usr/bin/env bash
# Installs with apt what the test bed and the build need and the machine lacks. Root only where something is missing.
set -euo pipefail
declare -A packages=(
  [protoc]=protobuf-compiler [containerd]=containerd [runc]=runc [docker-registry]=docker-registry
  [gcc]=gcc [openssl]=openssl [curl]=curl [jq]=jq [python3]=python3 [shellcheck]=shellcheck
)
missing=()
for tool in "${!packages[@]}"; do
  command -v "$tool" > /dev/null || missing+=("${packages[$tool]}")
done
[ -x /usr/lib/cni/loopback ] || missing+=(containernetworking-plugins)
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
[ ${#missing[@]} -gt 0 ] || exit 0
echo "installing ${missing[*]}" >&2
apt-get update -qq
# Services are started by the test bed itself, where and when it needs them.
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
