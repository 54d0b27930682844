#!/usr/bin/env bash
# Installs what compiles archaware for the platforms of its image, beside rustup, python3 and protoc.
#   hack/image/toolchain.sh FOLDER       FOLDER gets the programs of requirements.txt; rustup gets the standard libraries
set -euo pipefail
folder=$(realpath -m "${1:?usage: toolchain.sh FOLDER}")
cd "$(dirname "$0")"
. ./platforms.sh
# rustup installs the compiler that rust-toolchain.toml names when it is first called.
cargo --version > /dev/null
rustup --quiet target add "${targets[@]}"
[ ! -e "$folder/complete" ] || exit 0
rm -rf "$folder"
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --require-hashes --only-binary=:all: -r requirements.txt
touch "$folder/complete"
