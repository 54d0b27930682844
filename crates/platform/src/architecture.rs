//! Operating systems, architectures and platforms, normalised as containerd does (`normalizeOS` and
//! `normalizeArch` of `github.com/containerd/platforms`).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};

use archaware_base::names::is_label_value;

use super::name::{Name, name};

/// A CPU architecture by its GOARCH name: `amd64`, `arm64`, `386`, … Always a valid label value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Architecture(Name);

/// An operating system by its GOOS name: `linux`, `windows`, …
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Os(Name);

/// `os/architecture[/variant]`, normalised.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Platform {
    os: Option<Os>,
    architecture: Architecture,
    variant: Option<Name>,
}

/// Text that names no architecture or operating system.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the name of an architecture or operating system")]
pub struct UnknownName(pub(super) String);

impl Architecture {
    /// The GOARCH name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The names of all architectures of Go's tools.
    pub fn known_names() -> impl Iterator<Item = &'static str> {
        KNOWN.into_iter()
    }

    /// Whether it is a GOARCH of Go's tools. An image can contain any other text.
    pub fn is_known(&self) -> bool {
        KNOWN.contains(&self.as_str())
    }
}

impl FromStr for Architecture {
    type Err = UnknownName;

    /// Accepts every spelling that containerd accepts (`x86_64`, `aarch64`, `armhf`, …).
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let (architecture, _) = normalise_architecture(text, "");
        named(&architecture)
            .map(Self)
            .ok_or_else(|| UnknownName(text.to_owned()))
    }
}

impl Os {
    /// The GOOS name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `linux`, the OS of pods that do not specify one.
    pub fn linux() -> Self {
        Self(name("linux"))
    }

    /// `windows`, the other OS of Kubernetes' nodes.
    pub fn windows() -> Self {
        Self(name("windows"))
    }
}

impl FromStr for Os {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let lower = text.to_ascii_lowercase();
        let os = if lower == "macos" { "darwin" } else { &lower };
        named(os)
            .map(Self)
            .ok_or_else(|| UnknownName(text.to_owned()))
    }
}

impl Platform {
    /// Returns `None` when the architecture is empty, or when the architecture or OS is `unknown`
    /// or not a valid label value. A platform without OS applies to every OS.
    pub fn new(os: &str, architecture: &str, variant: &str) -> Option<Self> {
        let (architecture, variant) = normalise_architecture(architecture, variant);
        let architecture = Architecture(named(&architecture)?);
        let os = if os.is_empty() {
            None
        } else {
            Some(os.parse().ok()?)
        };
        let variant = named(&variant);
        Some(Self {
            os,
            architecture,
            variant,
        })
    }

    /// The operating system; `None` for any.
    pub fn os(&self) -> Option<&Os> {
        self.os.as_ref()
    }

    /// The CPU architecture.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The variant, normalised as in containerd: empty for amd64/v1 and arm64/v8, never empty for
    /// arm (arm without variant is v7).
    pub fn variant(&self) -> &str {
        self.variant.as_ref().map_or("", |variant| variant)
    }

    /// Whether the platform applies to pods of `os`.
    pub fn is_for(&self, os: &Os) -> bool {
        self.os.as_ref().is_none_or(|stated| stated == os)
    }
}

/// Accepts valid label values only (at most 63 of `[A-Za-z0-9_.-]`, alphanumeric at both ends),
/// because names become label values. Rejects `unknown`, which BuildKit writes into attestation
/// entries.
fn named(text: &str) -> Option<Name> {
    let is_usable = !text.is_empty() && is_label_value(text) && text != "unknown";
    is_usable.then(|| name(text))
}

fn normalise_architecture(architecture: &str, variant: &str) -> (String, String) {
    let (architecture, variant) = (
        architecture.to_ascii_lowercase(),
        variant.to_ascii_lowercase(),
    );
    let (name, variant) = match architecture.as_str() {
        "i386" => ("386", ""),
        "x86_64" | "x86-64" | "amd64" => ("amd64", if variant == "v1" { "" } else { &*variant }),
        "aarch64" | "arm64" => (
            "arm64",
            match variant.as_str() {
                "8" | "v8" | "8.0" | "v8.0" => "",
                "9" | "9.0" | "v9.0" => "v9",
                other => other,
            },
        ),
        "armhf" => ("arm", "v7"),
        "armel" => ("arm", "v6"),
        "arm" => (
            "arm",
            match variant.as_str() {
                "" | "7" => "v7",
                "5" => "v5",
                "6" => "v6",
                "8" => "v8",
                other => other,
            },
        ),
        other => (other, &*variant),
    };
    (name.to_owned(), variant.to_owned())
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Os {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}",
            self.os.as_ref().map_or("*", Os::as_str),
            self.architecture
        )?;
        self.variant
            .as_ref()
            .map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

/// The architectures of Go's tools (`go/build`, `knownArch`). The kubelet and container runtimes
/// are built with Go, so no node has another architecture.
const KNOWN: [&str; 26] = [
    "386",
    "amd64",
    "amd64p32",
    "arm",
    "arm64",
    "arm64be",
    "armbe",
    "loong64",
    "mips",
    "mips64",
    "mips64le",
    "mips64p32",
    "mips64p32le",
    "mipsle",
    "ppc",
    "ppc64",
    "ppc64le",
    "riscv",
    "riscv64",
    "s390",
    "s390x",
    "sparc",
    "sparc64",
    "wasm",
    "wasm32",
    "wasm64",
];

/// For the configuration, where an unknown name is rejected as a spelling mistake. Names in images
/// and nodes are read with `FromStr`, which accepts unknown names.
impl<'de> Deserialize<'de> for Architecture {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let unknown = || {
            let names = "amd64, arm64, arm, 386, ppc64le, riscv64, s390x, …";
            serde::de::Error::custom(format!(
                "{text:?} is no architecture that Go knows ({names})"
            ))
        };
        let parsed = text.parse::<Self>().ok();
        parsed.filter(Self::is_known).ok_or_else(unknown)
    }
}

/// Other spellings that are accepted, in lower case.
const SPELLINGS: [&str; 6] = ["aarch64", "armel", "armhf", "i386", "x86-64", "x86_64"];

impl schemars::JsonSchema for Architecture {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Architecture".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "description": "a GOARCH name, e.g. amd64, arm64, 386, or another spelling that containerd knows",
            "enum": KNOWN.iter().chain(&SPELLINGS).collect::<Vec<_>>()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The table of containerd's `platforms.Normalize`.
    #[test]
    fn normalises_as_containerd_does() {
        for (os, architecture, variant, expected) in [
            ("linux", "amd64", "", Some("linux/amd64")),
            ("linux", "amd64", "v1", Some("linux/amd64")),
            ("linux", "amd64", "v3", Some("linux/amd64/v3")),
            ("Linux", "X86_64", "", Some("linux/amd64")),
            ("linux", "x86-64", "", Some("linux/amd64")),
            ("linux", "i386", "v1", Some("linux/386")),
            ("linux", "aarch64", "", Some("linux/arm64")),
            ("linux", "arm64", "v8", Some("linux/arm64")),
            ("linux", "arm64", "8", Some("linux/arm64")),
            ("linux", "arm64", "9", Some("linux/arm64/v9")),
            ("linux", "armhf", "", Some("linux/arm/v7")),
            ("linux", "armel", "", Some("linux/arm/v6")),
            ("linux", "arm", "", Some("linux/arm/v7")),
            ("linux", "arm", "6", Some("linux/arm/v6")),
            ("linux", "arm", "v5", Some("linux/arm/v5")),
            ("macos", "arm64", "", Some("darwin/arm64")),
            ("windows", "amd64", "", Some("windows/amd64")),
            ("linux", "loong64", "", Some("linux/loong64")),
            ("", "arm64", "", Some("*/arm64")),
            ("linux", "", "", None),
            ("linux", "unknown", "", None),
            ("unknown", "amd64", "", None),
            ("linux", "a b", "", None),
            ("linux", "-amd64", "", None),
        ] {
            let platform = Platform::new(os, architecture, variant).map(|p| p.to_string());
            assert_eq!(
                platform.as_deref(),
                expected,
                "{os}/{architecture}/{variant}"
            );
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_can_be_a_label_value(text in "\\PC{0,80}") {
            if let Ok(architecture) = text.parse::<Architecture>() {
                let name = architecture.as_str();
                prop_assert!((1..=63).contains(&name.len()));
                prop_assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)));
                prop_assert_eq!(name.parse::<Architecture>().unwrap(), architecture);
            }
        }
    }
}
