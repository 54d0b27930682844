#!/usr/bin/env bash
# Run as root inside Debian (a container, or the folder that hack/build.sh makes): installs what compiles archaware for
# the machine's own architecture and for the others of the image.
set -euo pipefail
# shellcheck source=hack/image/platforms.sh
. "$(dirname "$0")/platforms.sh"
export DEBIAN_FRONTEND=noninteractive
# The compiler of stable is too old; its backport is built for the same C library.
. /etc/os-release
suite=${VERSION_CODENAME:?not Debian}-backports
# Which mirror it is, only the lists say.
apt-get update -qq
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(SITE)' "Codename: $VERSION_CODENAME" | head -1)
mirror=${mirror%/}
[ -n "$mirror" ]
echo "deb $mirror $suite main" > /etc/apt/sources.list.d/backports.list
# What debootstrap makes has no security updates yet. Mirrors keep them beside the archive.
if ! grep -rqs "$VERSION_CODENAME-security" /etc/apt/sources.list /etc/apt/sources.list.d; then
  echo "deb $mirror-security $VERSION_CODENAME-security main" > /etc/apt/sources.list.d/security.list
fi
own=$(dpkg --print-architecture)
cross=()
for platform in "${!triplets[@]}"; do
  architecture=${debian[$platform]}
  [ "$architecture" != "$own" ] || continue
  dpkg --add-architecture "$architecture"
  # Beside the compiler, these bring the libraries that go into the image.
  cross+=("gcc-${triplets[$platform]//_/-}" "libc6-dev-$architecture-cross" "libstd-rust-dev:$architecture")
done
apt-get update -qq
apt-get upgrade -y -qq
apt-get install -y -qq --no-install-recommends -t "$suite" \
  rustc cargo gcc libc6-dev protobuf-compiler ca-certificates jq "${cross[@]}"
apt-get clean
