#!/usr/bin/env bash
# Builds archaware's image for linux/amd64 and linux/arm64 as an OCI image layout, and can push it. No daemon: Debian's compilers
# in a folder of their own (made with debootstrap, so root is needed), tar, and skopeo for the push.
#   hack/build.sh [--out FOLDER] [--push REFERENCE] [--plain-http] [--check] [--platform PLATFORM]
#
# --out FOLDER      where the layout goes (default: target/image)
# --push REFERENCE  pushes it there too, with the credentials of `skopeo login` or `docker login`
# --plain-http      that registry speaks no TLS
# --check           builds everything a second time from nothing; both have to be the same, bit by bit
# --platform …      for example linux/amd64: the image is for this platform only. That archaware compiles for the other platform is checked
#                   without making machine code, in a fraction of the time
#
# Prints the digest of the image. The same commit with the same versions of Debian's packages gives the same digest.
# DEBIAN_MIRROR=address    another mirror than debootstrap's own
set -euo pipefail
# Or a step that fails inside $(…) would be passed over.
shopt -s inherit_errexit
# Modes of files go into the image.
umask 022
from=$PWD
cd "$(dirname "$0")/.."
. hack/testbed/lib.sh
. hack/image/platforms.sh
out=target/image push='' plain=() check='' only=''
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$(cd "$from" && realpath -m "${2:?--out takes a folder}"); shift ;;
    --push) push=${2:?--push takes a reference}; shift ;;
    --plain-http) plain=(--dest-tls-verify=false) ;;
    --check) check=yes ;;
    --platform)
      only=${2:?--platform takes a platform, for example linux/amd64}
      [[ $only == linux/* && -n ${triplets[${only#linux/}]:-} ]] || die "--platform takes one of: $(printf 'linux/%s ' "${!triplets[@]}")"
      shift
      ;;
    *) sed -n '2,14s/^# \?//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
# What is there goes: only what this script has made.
[ ! -e "$out" ] || [ -e "$out/oci-layout" ] || die "$out is there and holds no image"
[ "$(id -u)" = 0 ] || die "root is needed, for debootstrap and chroot; with buildx or podman use the Containerfile"
hack/install.sh debootstrap debian-archive-keyring jq ${push:+skopeo}

suite=trixie
home=$cache/image/$({ cat hack/image/toolchain.sh hack/image/platforms.sh; echo $suite; } | sha256sum | cut -c1-12)
mkdir -p "$home"/{cargo,target} "$(dirname "$out")"
# One build at a time: they share a folder.
exec 9> "$home.lock"
flock 9
# Of one that was killed.
rm -rf "$home"/work.*

# How names are resolved is the machine's matter, today's.
network() { cp /etc/resolv.conf /etc/hosts "$1/etc/"; }
if [ ! -d "$home/debian" ]; then
  say "installing Debian's compilers in a folder of their own"
  rm -rf "$home/debian.new"
  debootstrap --force-check-gpg --keyring=/usr/share/keyrings/debian-archive-keyring.gpg --variant=minbase \
    --include=ca-certificates $suite "$home/debian.new" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} \
    > "$home/debootstrap.log" || { tail "$home/debootstrap.log" >&2; die "debootstrap failed"; }
  mkdir -p "$home/debian.new"/{archaware,cargo,target,image}
  cp -r hack "$home/debian.new/tmp/hack"
  network "$home/debian.new"
  chroot "$home/debian.new" /tmp/hack/image/toolchain.sh > "$home/toolchain.log" 2>&1 \
    || { tail "$home/toolchain.log" >&2; die "the compilers cannot be installed"; }
  rm -rf "$home/debian.new/tmp/hack"
  mv "$home/debian.new" "$home/debian"
elif [ -n "$(find "$home/toolchain.log" -mtime +0)" ]; then
  say "updating Debian's packages"
  network "$home/debian"
  chroot "$home/debian" sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get upgrade -y -qq' \
    > "$home/toolchain.log" 2>&1 || { tail "$home/toolchain.log" >&2; die "Debian's packages cannot be updated"; }
fi

# Root may build in a checkout of another user.
git() { command git -c safe.directory="$PWD" "$@"; }
work=$(mktemp -d "$home/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{target,sources}
# What is compiled is one state of the sources, whatever happens to them meanwhile; cargo goes by the times of files, and
# these are new.
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read 2> /dev/null \
  | tar --extract --touch --directory="$work/sources"

# inside TARGET COMMAND...: runs it in Debian, with the sources at a path that is the same everywhere. The mounts end with it.
inside() {
  local target=$1
  shift
  # cargo fetches through whatever this machine trusts; the image gets Debian's own bundle.
  local trusted=/etc/ssl/certs/ca-certificates.crt
  [ ! -e $trusted ] || cp $trusted "$home/cargo/trusted.crt"
  network "$home/debian"
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child bash -euc '
    home=$1 work=$2 target=$3
    shift 3
    root=$home/debian
    mount --bind -o ro "$work/sources" "$root/archaware"
    mount --bind "$home/cargo" "$root/cargo"
    mount --bind "$target" "$root/target"
    mount --bind "$work" "$root/image"
    mount -t proc proc "$root/proc"
    mount --bind /dev "$root/dev"
    [ ! -e "$home/cargo/trusted.crt" ] || trusted=CARGO_HTTP_CAINFO=/cargo/trusted.crt
    exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root CARGO_HOME=/cargo CARGO_TARGET_DIR=/target \
      ${trusted:+"$trusted"} ${https_proxy:+https_proxy="$https_proxy"} "$@"
  ' inside "$home" "$work" "$target" "$@" 9>&-
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
revision=$(git rev-parse HEAD)
created=$(git log -1 --format=%ct)
[ -z "$(git status --porcelain)" ] || revision=$revision-changed

# build TARGET NAME: compiles for every platform; the layout is "$work/NAME", its digest goes to stdout.
build() {
  local target=$1 name=$2 images=()
  for architecture in $(printf '%s\n' "${!triplets[@]}" | sort); do
    if [ "linux/$architecture" != "${only:-linux/$architecture}" ]; then
      inside "$target" /archaware/hack/image/compile.sh "$architecture" >&2
      continue
    fi
    inside "$target" env ARCHAWARE_COMMIT="$revision" \
      /archaware/hack/image/compile.sh "$architecture" "/image/$name-$architecture" >&2
    images+=("$architecture=/image/$name-$architecture")
  done
  inside "$target" env VERSION="$version" REVISION="$revision" CREATED="$created" \
    /archaware/hack/image/layout.sh "/image/$name" "${images[@]}"
}

digest=$(build "$home/target" layout)
for root in "$work"/layout-*; do
  program=$(stat --format=%s "$root/archaware")
  whole=$(find "$root" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
  say "$(basename "$root" | cut -d- -f2): $((whole / 1024)) KiB, of which the program $((program / 1024))"
done
if [ -n "$check" ]; then
  again=$(build "$work/target" again)
  [ "$again" = "$digest" ] || die "a second build from nothing gave $again instead of $digest"
  diff -r "$work/layout" "$work/again" || die "the second build differs"
  say "a second build from nothing is the same, bit by bit"
fi
rm -rf "$out"
mv "$work/layout" "$out"
say "archaware $version is in $out"
[ -z "$push" ] || skopeo copy --all --quiet "${plain[@]}" "oci:$out:$version" "docker://$push" >&2
echo "$digest"
