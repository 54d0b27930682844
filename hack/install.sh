#!/usr/bin/env bash
# Installs with apt those of these tools that the machine lacks. Root only where something is missing.
#   hack/install.sh [TOOL...]       without a name: what the test bed and its tests need
set -euo pipefail
declare -A packages=(
  [protoc]=protobuf-compiler [containerd]=containerd [runc]=runc [docker-registry]=docker-registry
  [gcc]=gcc [openssl]=openssl [curl]=curl [jq]=jq [python3]=python3 [shellcheck]=shellcheck
  [promtool]=prometheus [faketime]=faketime [loopback]=containernetworking-plugins [stdio.h]=libc6-dev
)
# Of the image: hack/build.sh and hack/image/.
declare -A others=([debootstrap]=debootstrap [skopeo]=skopeo [qemu-aarch64-static]=qemu-user-static)
has() {
  case $1 in
    loopback) [ -x /usr/lib/cni/loopback ] ;;
    stdio.h) [ -e /usr/include/stdio.h ] ;;
    *) command -v "$1" > /dev/null ;;
  esac
}
[ $# -gt 0 ] || set -- "${!packages[@]}"
missing=()
for tool; do
  has "$tool" || missing+=("${packages[$tool]:-${others[$tool]:?no package is known for $tool}}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
echo "installing ${missing[*]}" >&2
apt-get update -qq
# Services are started by the test bed itself, where and when it needs them.
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
