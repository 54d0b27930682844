#!/usr/bin/env bash
# Packs archives for people: the program, which is a plugin of kubectl under the name kubectl-archaware, its man pages and completion
# scripts. Writes checksums and a manifest for krew. krew takes no links in archives.
#   hack/release.sh [--out FOLDER] [--layout FOLDER] [--program OS/ARCHITECTURE=FILE]...
#
# --out FOLDER     where they go (default: target/release-archives)
# --layout FOLDER  the image that hack/build.sh made (default: target/image, made if it is not there): the programs for linux
# --program …      a program that was built elsewhere, for example darwin/arm64=target/aarch64-apple-darwin/release/archaware
#
# Programs for darwin need Apple's SDK: on a Mac, `cargo build --release --target aarch64-apple-darwin` (and x86_64-apple-darwin).
# Equal programs give equal archives.
set -euo pipefail
shopt -s inherit_errexit
umask 022
from=$PWD
cd "$(dirname "$0")/.."
. hack/testbed/lib.sh
absolute() { (cd "$from" && realpath -m "$1"); }
out=target/release-archives layout=target/image
declare -A programs=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$(absolute "${2:?--out takes a folder}"); shift ;;
    --layout) layout=$(absolute "${2:?--layout takes a folder}"); shift ;;
    --program)
      [[ ${2:-} =~ ^(linux|darwin)/(amd64|arm64)=. ]] || die "--program takes OS/ARCHITECTURE=FILE"
      programs[${2%%=*}]=$(absolute "${2#*=}")
      shift
      ;;
    *) sed -n '2,12s/^# \?//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
hack/install.sh jq
[ -e "$layout/oci-layout" ] || hack/build.sh --out "$layout" > /dev/null
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
created=$(git -c safe.directory="$PWD" log -1 --format=%ct)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The programs of the image.
blob() { cat "$layout/blobs/${1/://}"; }
index=$(jq -r '.manifests[0].digest' "$layout/index.json")
while read -r architecture digest; do
  layer=$(blob "$digest" | jq -r '.layers[0].digest')
  mkdir -p "$work/linux-$architecture"
  blob "$layer" | tar --extract --gzip --directory="$work/linux-$architecture"
  # One that was named wins.
  programs[linux/$architecture]=${programs[linux/$architecture]:-$work/linux-$architecture/archaware}
done < <(blob "$index" | jq -r '.manifests[] | "\(.platform.architecture) \(.digest)"')

# Man pages and completion scripts do not depend on the platform.
own=$(uname -m)
case $own in x86_64) own=amd64 ;; aarch64) own=arm64 ;; esac
program=${programs[linux/$own]:-}
[ -x "$program" ] || die "there is no program for this machine (linux/$own), which has to print man pages and completion scripts"
mkdir -p "$work/common/completions"
"$program" man "$work/common/man"
for shell in bash zsh fish; do "$program" completions "$shell" > "$work/common/completions/archaware.$shell"; done
cp LICENSE README.md "$work/common/"
# kubectl runs this file to complete `kubectl archaware …`.
# shellcheck disable=SC2016
printf '#!/bin/sh\nexec "$(dirname "$0")/kubectl-archaware" __complete "$@"\n' > "$work/kubectl_complete-archaware"

rm -rf "$out"
mkdir -p "$out"
krew=()
for platform in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64; do
  program=${programs[$platform]:-}
  if [ -z "$program" ]; then
    say "NOT PACKED: $platform, of which there is no program (--program)"
    continue
  fi
  name=archaware_${version}_${platform/\//_}
  mkdir -p "$work/$name"
  cp -r "$work/common/." "$work/$name/"
  install -m 755 "$program" "$work/$name/archaware"
  install -m 755 "$work/kubectl_complete-archaware" "$work/$name/"
  tar --create --directory="$work/$name" --sort=name --mtime="@$created" --owner=0 --group=0 --numeric-owner \
    --format=gnu . | gzip --no-name --best > "$out/$name.tar.gz"
  sum=$(sha256sum "$out/$name.tar.gz" | cut -d' ' -f1)
  echo "$sum  $name.tar.gz" >> "$out/SHA256SUMS"
  krew+=("$(jq -nc --arg os "${platform%/*}" --arg architecture "${platform#*/}" --arg sum "$sum" --arg name "$name" --arg version "$version" '{
    selector: {matchLabels: {os: $os, arch: $architecture}},
    uri: "https://github.com/archaware/archaware/releases/download/v\($version)/\($name).tar.gz",
    sha256: $sum,
    files: [{from: "archaware", to: "kubectl-archaware"}, {from: "LICENSE", to: "."}],
    bin: "kubectl-archaware"
  }')")
done
# JSON is YAML.
printf '%s\n' "${krew[@]}" | jq -s --arg version "v$version" '{
  apiVersion: "krew.googlecontainertools.github.com/v1alpha2", kind: "Plugin", metadata: {name: "archaware"},
  spec: {
    version: $version, homepage: "https://github.com/archaware/archaware",
    shortDescription: "Explain pending pods, report what runs on Arm",
    description: "Keeps pods off nodes whose CPU architecture their images cannot run on. `kubectl archaware explain` says why pods are pending or fail, `kubectl archaware report` what could run on another architecture.",
    platforms: .
  }
}' > "$out/archaware.krew.yaml"
say "archives for $version are in $out"
