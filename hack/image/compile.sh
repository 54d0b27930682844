#!/usr/bin/env bash
# After toolchain.sh: compiles archaware as a static program, and puts together everything that its image holds.
#   hack/image/compile.sh TOOLCHAIN ARCHITECTURE FOLDER       TOOLCHAIN is the folder that toolchain.sh made
# PROFILE=release              a profile of Cargo.toml
# ARCHAWARE_COMMIT=revision    what `archaware version` says of the sources
set -euo pipefail
umask 022
toolchain=$(realpath "${1:?usage: compile.sh TOOLCHAIN ARCHITECTURE FOLDER}") architecture=${2:?which architecture?} root=$(realpath -m "${3:?which folder?}")
cd "$(dirname "$0")/../.."
. hack/image/platforms.sh
target=${targets[$architecture]:?unknown architecture $architecture}
# The target folder holds everything that is compiled, also if the environment names a build directory of cargo.
unset CARGO_BUILD_BUILD_DIR
export PATH=$toolchain/bin:$PATH CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/image-build}
# Messages of a panic name files: not those of the machine that it was built on.
export RUSTFLAGS="--remap-path-prefix=$PWD=archaware --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}/registry/src="
# Otherwise zig links a program with fixed addresses, which gives up address space layout randomisation.
RUSTFLAGS+=" -C link-arg=-pie"
cargo zigbuild --quiet --locked --profile "${PROFILE:=release}" --target "$target" --bin archaware

rm -rf "$root"
mkdir -p "$root"/{etc/ssl/certs,usr/share/doc/{archaware,certifi},tmp}
chmod 1777 "$root/tmp"
install -m 755 "$CARGO_TARGET_DIR/$target/$PROFILE/archaware" "$root/archaware"
install -m 644 LICENSE "$root/usr/share/doc/archaware/copyright"
# Not the machine's own bundle, which may trust more.
certificates=$("$toolchain/bin/python" -m certifi)
[ -s "$certificates" ]
install -m 644 "$certificates" "$root/etc/ssl/certs/ca-certificates.crt"
install -m 644 "$(dirname "$certificates")"-*.dist-info/licenses/LICENSE "$root/usr/share/doc/certifi/copyright"
echo 'archaware:x:65532:65532::/:/sbin/nologin' > "$root/etc/passwd"
echo 'archaware:x:65532:' > "$root/etc/group"
