//! Variants of an architecture: which node runs images of which variant. The order is that of
//! containerd's `platforms` package (`platformVector`). For riscv64, which that package does not
//! order, it is that of the RISC-V profiles.

use super::{Architecture, Platform};

/// The variants of nodes that suffice for an image, e.g. `v3` and `v4` of amd64: one bit for each
/// variant of the architecture's list. All bits: every variant suffices, also one that is not in
/// the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Variants(u32);

/// The variants of one architecture.
struct Family {
    architecture: &'static str,
    /// From the lowest to the highest. A node runs images of its own variant, and of some or all
    /// variants before it.
    names: &'static [&'static str],
    /// The presumed variant of nodes whose variant is unknown: the one that the architecture's name
    /// means without variant (v1 of amd64, v7 of arm).
    presumed: &'static str,
}

const FAMILIES: [Family; 4] = [
    Family {
        architecture: "amd64",
        names: &["v1", "v2", "v3", "v4"],
        presumed: "v1",
    },
    Family {
        architecture: "arm",
        names: &["v5", "v6", "v7", "v8"],
        presumed: "v7",
    },
    Family {
        architecture: "arm64",
        names: &[
            "v8", "v8.1", "v8.2", "v8.3", "v8.4", "v8.5", "v8.6", "v8.7", "v8.8", "v8.9", "v9",
            "v9.1", "v9.2", "v9.3", "v9.4", "v9.5", "v9.6", "v9.7",
        ],
        presumed: "v8",
    },
    Family {
        architecture: "riscv64",
        names: &["rva20u64", "rva22u64", "rva23u64"],
        presumed: "rva20u64",
    },
];

/// An architecture with its variant, if that is known, as platforms are written: `amd64/v3`.
pub fn with_variant(architecture: &str, variant: Option<&str>) -> String {
    variant.map_or_else(
        || architecture.to_owned(),
        |variant| format!("{architecture}/{variant}"),
    )
}

impl Family {
    fn find(architecture: &Architecture) -> Option<&'static Self> {
        let name = architecture.as_str();
        FAMILIES.iter().find(|family| family.architecture == name)
    }

    /// The bits of all variants in the list.
    fn all_variants(&self) -> u32 {
        (1 << self.names.len()) - 1
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| *known == name)
    }

    /// Whether a node of the variant at index `node` runs images of the variant at `image`. Armv9.m
    /// includes Armv8.(5+m), and Armv8 ends with 8.9.
    fn runs(&self, node: usize, image: usize) -> bool {
        const V9: usize = 10;
        if self.architecture == "arm64" && node >= V9 && image < V9 {
            return image <= node - V9 + 5;
        }
        image <= node
    }

    fn indexes(&self, set: Variants) -> impl Iterator<Item = usize> {
        (0..self.names.len()).filter(move |index| set.0 & (1 << index) != 0)
    }
}

impl Variants {
    /// Every variant.
    pub const ANY: Self = Self(u32::MAX);

    /// The variants of nodes that run images of a platform.
    pub fn that_run_platform(platform: &Platform) -> Self {
        Self::that_run(platform.architecture(), platform.variant())
    }

    /// The variants of nodes that run images of the variant `image`. If `image` is empty or not
    /// listed, every variant does.
    pub fn that_run(architecture: &Architecture, image: &str) -> Self {
        let Some(family) = Family::find(architecture) else {
            return Self::ANY;
        };
        let Some(image) = family.index(image) else {
            return Self::ANY;
        };
        let nodes = (0..family.names.len()).filter(|node| family.runs(*node, image));
        let set = nodes.fold(0, |bits, node| bits | 1 << node);
        if set == family.all_variants() {
            Self::ANY
        } else {
            Self(set)
        }
    }

    /// Whether every variant suffices.
    pub fn is_any(self) -> bool {
        self == Self::ANY
    }

    /// The variants that suffice for both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The variants that suffice for at least one of the two.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether a node of the variant `node` suffices. A variant that is not in the list suffices if
    /// every variant does.
    pub fn contains(self, architecture: &Architecture, node: &str) -> bool {
        let index = Family::find(architecture).and_then(|family| family.index(node));
        index.map_or(self.is_any(), |index| self.0 & (1 << index) != 0)
    }

    /// Whether a node of unknown variant suffices.
    pub fn contains_presumed(self, architecture: &Architecture) -> bool {
        let presumed = Family::find(architecture).map(|family| family.presumed);
        presumed.is_none_or(|presumed| self.contains(architecture, presumed))
    }

    /// Whether a node of unknown variant is presumed to have this variant.
    pub fn is_presumed(architecture: &Architecture, variant: &str) -> bool {
        Family::find(architecture).is_some_and(|family| family.presumed == variant)
    }

    /// The names of the variants that suffice.
    pub fn names(self, architecture: &Architecture) -> impl Iterator<Item = &'static str> {
        let family = Family::find(architecture);
        family.into_iter().flat_map(move |family| {
            let indexes = family.indexes(self);
            indexes.filter_map(|index| family.names.get(index).copied())
        })
    }

    /// The names of the insufficient variants.
    pub fn insufficient(self, architecture: &Architecture) -> impl Iterator<Item = &'static str> {
        Self(!self.0).names(architecture)
    }

    /// The lowest variants that suffice, usually one. Empty if every variant suffices.
    pub fn lowest(self, architecture: &Architecture) -> impl Iterator<Item = &'static str> {
        let family = Family::find(architecture).filter(|_| !self.is_any());
        family.into_iter().flat_map(move |family| {
            let is_lowest = move |node: &usize| {
                let mut others = family.indexes(self);
                !others.any(|other| other != *node && family.runs(*node, other))
            };
            let lowest = family.indexes(self).filter(is_lowest);
            lowest.filter_map(|index| family.names.get(index).copied())
        })
    }
}

/// The variant's name as in the list; `None` if the list does not have it. The empty name, to which
/// the lowest variants of amd64 and arm64 are normalised, is not in the list.
pub fn known_variant(architecture: &Architecture, name: &str) -> Option<&'static str> {
    let family = Family::find(architecture)?;
    family.names.get(family.index(name)?).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn architecture(name: &str) -> Architecture {
        name.parse().unwrap()
    }

    /// containerd's `platformVector`.
    #[test]
    fn what_runs_what() {
        for (name, image, nodes) in [
            ("amd64", "v3", "v3 v4"),
            ("amd64", "v4", "v4"),
            ("arm", "v6", "v6 v7 v8"),
            (
                "arm64",
                "v8.6",
                "v8.6 v8.7 v8.8 v8.9 v9.1 v9.2 v9.3 v9.4 v9.5 v9.6 v9.7",
            ),
            ("arm64", "v8.9", "v8.9 v9.4 v9.5 v9.6 v9.7"),
            ("arm64", "v9", "v9 v9.1 v9.2 v9.3 v9.4 v9.5 v9.6 v9.7"),
            ("riscv64", "rva22u64", "rva22u64 rva23u64"),
        ] {
            let architecture = architecture(name);
            let set = Variants::that_run(&architecture, image);
            let found: Vec<_> = set.names(&architecture).collect();
            assert_eq!(found.join(" "), nodes, "{name}/{image}");
            assert_eq!(set.lowest(&architecture).collect::<Vec<_>>(), [image]);
            assert!(!set.contains_presumed(&architecture) || name == "arm");
        }
        for (name, image) in [
            ("amd64", ""),
            ("amd64", "v1"),
            ("amd64", "v9"),
            ("arm64", "v8"),
            ("arm", "v5"),
            ("s390x", "z14"),
        ] {
            let architecture = architecture(name);
            let set = Variants::that_run(&architecture, image);
            assert!(
                set.is_any() && set.lowest(&architecture).next().is_none(),
                "{name}/{image}"
            );
        }
        let arm64 = architecture("arm64");
        let both = Variants::that_run(&arm64, "v8.6").and(Variants::that_run(&arm64, "v9"));
        assert_eq!(both.lowest(&arm64).collect::<Vec<_>>(), ["v9.1"]);
        let either = Variants::that_run(&arm64, "v8.6").or(Variants::that_run(&arm64, "v9"));
        assert_eq!(either.lowest(&arm64).collect::<Vec<_>>(), ["v8.6", "v9"]);
        assert_eq!(either.insufficient(&arm64).count(), 6);
    }

    proptest! {
        /// `Family::runs` is a partial order: reflexive, transitive and antisymmetric.
        #[test]
        fn the_order_is_one(a in 0_usize..18, b in 0_usize..18, c in 0_usize..18) {
            for family in &FAMILIES {
                let count = family.names.len();
                let (a, b, c) = (a % count, b % count, c % count);
                prop_assert!(family.runs(a, a));
                prop_assert!(!(family.runs(a, b) && family.runs(b, c)) || family.runs(a, c));
                prop_assert!(!(family.runs(a, b) && family.runs(b, a)) || a == b);
            }
        }
    }
}
