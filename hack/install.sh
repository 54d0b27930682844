#!/usr/bin/env bash
# Installs with apt those of these tools that the machine lacks. Root only where something is missing.
#   hack/install.sh [TOOL...]       without a name: what the test bed and its tests need
set -euo pipefail
declare -A packages=(
  [containerd]=containerd [runc]=runc [docker-registry]=docker-registry
  [protoc]=protobuf-compiler [gcc]=gcc [openssl]=openssl [curl]=curl [jq]=jq [python3]=python3 [shellcheck]=shellcheck
  [promtool]=prometheus [faketime]=faketime [loopback]=containernetworking-plugins [stdio.h]=libc6-dev
  [skopeo]=skopeo [cmark-gfm]=cmark-gfm [xmllint]=libxml2-utils [script]=bsdutils [qemu-aarch64-static]=qemu-user-static [chromium]=chromium [chromedriver]=chromium-driver
)
# Of hack/build.sh.
declare -A others=([rustup]=rustup [ensurepip]=python3-venv)
has() {
  case $1 in
    loopback) [ -x /usr/lib/cni/loopback ] ;;
    stdio.h) [ -e /usr/include/stdio.h ] ;;
    ensurepip) python3 -c 'import ensurepip' 2> /dev/null ;;
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
# Services are started by the test bed itself, where and when it needs them (invoke-rc.d(8)).
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod +x $policy
fi
apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@"; }
apt update
apt install -y --no-install-recommends "${missing[@]}" > /dev/null
