#!/usr/bin/env bash
# Run inside Debian, after toolchain.sh: compiles archaware and puts together everything that its image holds.
#   hack/image/compile.sh ARCHITECTURE FOLDER
#   hack/image/compile.sh ARCHITECTURE          only checks that archaware compiles, without making machine code
# ARCHAWARE_COMMIT=revision    what `archaware version` says of the sources
# The same sources at the same path with the same packages of Debian give the same bits.
set -euo pipefail
umask 022
cd "$(dirname "$0")/../.."
. hack/image/platforms.sh
architecture=${1:?usage: compile.sh ARCHITECTURE [FOLDER]} root=${2:-}
triplet=${triplets[$architecture]:?unknown architecture $architecture} target=${targets[$architecture]}
libraries=/usr/lib/$triplet
export CARGO_HOME=${CARGO_HOME:-/usr/local/cargo} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-/tmp/target}
export "CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<< "$target")_LINKER=$triplet-gcc"
# Messages of a panic name files: not those of the machine that it was built on.
export RUSTFLAGS="--remap-path-prefix=$PWD=archaware --remap-path-prefix=$CARGO_HOME/registry/src="
# Packed relocations (DT_RELR, glibc 2.36): 0.7 MB less.
RUSTFLAGS+=" -Clink-arg=-Wl,-z,pack-relative-relocs"
if [ -z "$root" ]; then
  exec cargo check --quiet --locked --release --target "$target" --bin archaware
fi
cargo build --quiet --locked --release --target "$target" --bin archaware
program=$CARGO_TARGET_DIR/$target/release/archaware

rm -rf "$root"
mkdir -p "$root"/{etc/ssl/certs,usr/share/doc,var/lib/dpkg/status.d,tmp}
chmod 1777 "$root/tmp"
install -m 755 "$program" "$root/archaware"
# What the program needs, and what that needs.
needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }
loader=${loaders[$architecture]}
install -D -m 755 "$libraries/$(basename "$loader")" "$root$loader"
queue=("$program")
while [ ${#queue[@]} -gt 0 ]; do
  file=${queue[0]}
  queue=("${queue[@]:1}")
  for name in $(needed "$file"); do
    [ "$name" != "$(basename "$loader")" ] || continue
    [ ! -e "$root/usr/lib/$triplet/$name" ] || continue
    install -D -m 644 "$libraries/$name" "$root/usr/lib/$triplet/$name"
    queue+=("$libraries/$name")
  done
done
[ -s /etc/ssl/certs/ca-certificates.crt ]
install -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
echo 'archaware:x:65532:65532::/:/sbin/nologin' > "$root/etc/passwd"
echo 'archaware:x:65532:' > "$root/etc/group"
# Whose these files are, for people and for scanners.
for package in "libc6:${debian[$architecture]}" "libgcc-s1:${debian[$architecture]}" ca-certificates; do
  name=${package%:*}
  dpkg-query --status "$package" | sed '/^Conffiles:/,/^[A-Z]/{/^Conffiles:/d;/^ /d}' > "$root/var/lib/dpkg/status.d/$name"
  # libgcc-s1's is a link into the package of gcc.
  install -D -m 644 "$(realpath "/usr/share/doc/$name/copyright")" "$root/usr/share/doc/$name/copyright"
done
install -D -m 644 LICENSE "$root/usr/share/doc/archaware/copyright"
