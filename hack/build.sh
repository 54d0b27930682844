#!/usr/bin/env bash
# Builds archaware's image for linux/amd64 and linux/arm64 as an OCI image layout, and can push it. Needs no daemon and no root: zig
# compiles and links static programs for both, and skopeo pushes.
#   hack/build.sh [--out FOLDER] [--push REFERENCE] [--plain-http] [--check] [--quick]
#
# --out FOLDER      where the layout goes (default: target/image)
# --push REFERENCE  pushes it there too, with the credentials of `skopeo login` or `docker login`
# --plain-http      that registry speaks no TLS
# --check           builds everything a second time from nothing, in another folder; both have to be the same, bit by bit
# --quick           for tests: of another architecture than this machine's, the program is not optimised
#
# Prints the digest of the image. rust-toolchain.toml, Cargo.lock and hack/image/requirements.txt name the versions of
# the compilers and libraries. protoc, tar and gzip are those of the machine.
set -euo pipefail
# Or a step that fails inside $(…) would be passed over.
shopt -s inherit_errexit
# Modes of files go into the image.
umask 022
from=$PWD
cd "$(dirname "$0")/.."
. hack/testbed/lib.sh
. hack/image/platforms.sh
out=target/image push='' plain=() check='' quick=''
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$(cd "$from" && realpath -m "${2:?--out takes a folder}"); shift ;;
    --push) push=${2:?--push takes a reference}; shift ;;
    --plain-http) plain=(--dest-tls-verify=false) ;;
    --check) check=yes ;;
    --quick) quick=yes ;;
    *) sed -n '2,13s/^# \?//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
# Removes the previous output of this script, and nothing else.
[ ! -e "$out" ] || [ -e "$out/oci-layout" ] || die "$out is there and holds no image"
hack/install.sh rustup gcc protoc ensurepip jq ${push:+skopeo}

home=$cache/image/$(cat hack/image/{toolchain.sh,platforms.sh,requirements.txt} rust-toolchain.toml | sha256sum | cut -c1-12)
mkdir -p "$home" "$(dirname "$out")"
# One build at a time: they share a folder.
exec 9> "$home.lock"
flock 9
# Of one that was killed.
rm -rf "$home"/work.*
hack/image/toolchain.sh "$home/toolchain" >&2

# Root may build in a checkout of another user.
git() { command git -c safe.directory="$PWD" "$@"; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
revision=$(git rev-parse HEAD)
created=$(git log -1 --format=%ct)
[ -z "$(git status --porcelain)" ] || revision=$revision-changed
work=$(mktemp -d "$home/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
# A copy, so that an edit during the build does not get in. Its path never changes, or cargo would compile every dependency again.
sources=$home/sources
rm -rf "$sources"
mkdir "$sources"
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read 2> /dev/null \
  | tar --extract --touch --directory="$sources"

# build SOURCES TARGET LAYOUT: compiles for every platform; the digest of the layout goes to stdout.
build() {
  local sources=$1 target=$2 layout=$3 images=() profile
  for architecture in $(printf '%s\n' "${!targets[@]}" | sort); do
    profile=release
    [ -z "$quick" ] || [[ ${targets[$architecture]} == "$(uname -m)"-* ]] || profile=quick
    CARGO_TARGET_DIR=$target ARCHAWARE_COMMIT=$revision PROFILE=$profile \
      "$sources/hack/image/compile.sh" "$home/toolchain" "$architecture" "$layout-$architecture" >&2
    images+=("$architecture=$layout-$architecture")
  done
  VERSION=$version REVISION=$revision CREATED=$created "$sources/hack/image/layout.sh" "$layout" "${images[@]}"
}

digest=$(build "$sources" "$home/target" "$work/layout")
blob() { cat "$work/layout/blobs/${1/://}"; }
for manifest in $(blob "$digest" | jq -r '.manifests[].digest'); do
  say "$(blob "$(blob "$manifest" | jq -r .config.digest)" | jq -r .architecture): $(blob "$manifest" | jq '[.layers[].size] | add / 1024 | floor') KiB to download"
done
if [ -n "$check" ]; then
  cp -r "$sources" "$work/sources"
  again=$(build "$work/sources" "$work/target" "$work/again")
  [ "$again" = "$digest" ] || die "a second build from nothing gave $again instead of $digest"
  diff -r "$work/layout" "$work/again" || die "the second build differs"
  say "a second build from nothing is the same, bit by bit"
fi
rm -rf "$out"
mv "$work/layout" "$out"
say "archaware $version is in $out"
[ -z "$push" ] || skopeo copy --all --quiet "${plain[@]}" "oci:$out:$version" "docker://$push" >&2
echo "$digest"
