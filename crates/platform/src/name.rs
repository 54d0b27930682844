//! A short name that needs no allocation when it is common.

use std::borrow::Cow;

/// Nearly all images have only these names. Static strings keep a cache of many images small.
const COMMON: &[&str] = &[
    "linux", "windows", "darwin", "freebsd", "amd64", "arm64", "arm", "386", "ppc64le", "s390x",
    "riscv64", "loong64", "mips64le", "mips64", "mipsle", "mips", "ppc64", "wasm", "wasip1", "v5",
    "v6", "v7", "v8", "v9", "v2", "v3", "v4",
];

pub(super) type Name = Cow<'static, str>;

pub(super) fn name(text: &str) -> Name {
    let common = COMMON.iter().find(|common| **common == text);
    common.map_or_else(|| text.to_owned().into(), |common| (*common).into())
}
