//! Sets of architectures, each with the variants that suffice.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use super::{Architecture, Platform, UnknownName, Variants, known_variant};

/// The architectures of nodes that can run something, each with the variants that suffice.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architectures(BTreeMap<Architecture, Variants>);

impl Architectures {
    /// The set of these architectures. An architecture that occurs several times gets the union of
    /// its variants.
    pub fn from_variants(
        architectures: impl IntoIterator<Item = (Architecture, Variants)>,
    ) -> Self {
        let mut set = BTreeMap::new();
        for (name, variants) in architectures {
            let known = set.entry(name).or_insert(variants);
            *known = known.or(variants);
        }
        Self(set)
    }

    /// The architectures.
    pub fn names(&self) -> impl Iterator<Item = &Architecture> {
        self.0.keys()
    }

    /// The architectures, with the variants that suffice.
    pub fn iter(&self) -> impl Iterator<Item = (&Architecture, Variants)> {
        self.0.iter().map(|(name, variants)| (name, *variants))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many architectures there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set contains this architecture, with any variants.
    pub fn contains(&self, name: &str) -> bool {
        self.0
            .keys()
            .any(|architecture| architecture.as_str() == name)
    }

    /// Keeps only the architectures that are in `names`.
    #[must_use]
    pub fn within(mut self, names: &BTreeSet<Architecture>) -> Self {
        self.0.retain(|name, _| names.contains(name));
        self
    }

    /// The architectures in both sets, each with the variants that suffice for both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let both = self.0.iter().filter_map(|(name, variants)| {
            let shared = variants.and(*other.0.get(name)?);
            Some((name.clone(), shared))
        });
        Self(both.collect())
    }

    /// These architectures, each with all variants.
    #[must_use]
    pub fn without_variants(&self) -> Self {
        self.names().cloned().collect()
    }

    /// Keeps only the architectures of which every variant suffices.
    #[must_use]
    pub fn of_any_variant(mut self) -> Self {
        self.0.retain(|_, variants| variants.is_any());
        self
    }
}

/// The architectures of an image, each with the variants that suffice. Nodes of other architectures
/// may run the image, too; an [`Architectures`] is the set of all architectures that can.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageArchitectures(Architectures);

impl ImageArchitectures {
    /// The set of these architectures. An architecture that occurs several times gets the union of
    /// its variants.
    pub fn from_variants(
        architectures: impl IntoIterator<Item = (Architecture, Variants)>,
    ) -> Self {
        Self(Architectures::from_variants(architectures))
    }

    /// The architectures, with the variants that suffice.
    pub fn iter(&self) -> impl Iterator<Item = (&Architecture, Variants)> {
        self.0.iter()
    }

    /// Applies `change`, which sets other variants or removes architectures.
    #[must_use]
    pub fn map(self, change: impl FnOnce(Architectures) -> Architectures) -> Self {
        Self(change(self.0))
    }

    /// Whether there is none: the image is for another OS.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the image is built for this architecture, with any variants.
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// These architectures with every variant.
    #[must_use]
    pub fn without_variants(&self) -> Self {
        Self(self.0.without_variants())
    }

    /// Each with the lowest variant that suffices, if not every one does: `amd64/v3, arm64`.
    pub fn join(&self, separator: &str) -> String {
        self.0.join(separator)
    }

    /// The architectures, each with the lowest variant that suffices.
    pub fn to_strings(&self) -> Vec<String> {
        self.0.to_strings()
    }
}

/// A comma-separated list: `amd64/v3,arm64`.
impl FromStr for ImageArchitectures {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        text.parse().map(Self)
    }
}

impl FromIterator<Architecture> for Architectures {
    fn from_iter<I: IntoIterator<Item = Architecture>>(names: I) -> Self {
        Self::from_variants(names.into_iter().map(|name| (name, Variants::ANY)))
    }
}

/// A comma-separated list: `amd64/v3,arm64`.
impl FromStr for Architectures {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let entries: Result<Vec<_>, _> = text.split(',').map(parse_entry).collect();
        Ok(Self::from_variants(entries?))
    }
}

/// Rejects an unknown variant. Without a variant, every variant suffices, also for `arm`, which
/// containerd reads as `arm/v7`.
fn parse_entry(text: &str) -> Result<(Architecture, Variants), UnknownName> {
    let text = text.trim();
    let unknown = || UnknownName(text.to_owned());
    let (name, variant) = text
        .split_once('/')
        .map_or((text, None), |(a, b)| (a, Some(b)));
    let platform = Platform::new("", name, variant.unwrap_or_default()).ok_or_else(unknown)?;
    let architecture = platform.architecture().clone();
    let variants = match variant {
        None if name.eq_ignore_ascii_case("arm") => Variants::ANY,
        // `armhf` means `arm/v7`.
        None => Variants::that_run_platform(&platform),
        Some("") => return Err(unknown()),
        Some(_) => {
            let normalised = platform.variant();
            // Normalisation empties the lowest variant, but also any text that cannot be a name.
            // Only the former is meant here.
            let lowest = ["v1", "v8", "8", "v8.0", "8.0"];
            let is_lowest = normalised.is_empty()
                && lowest.contains(&&*variant.unwrap_or_default().to_ascii_lowercase());
            if !is_lowest && known_variant(&architecture, normalised).is_none() {
                return Err(unknown());
            }
            Variants::that_run_platform(&platform)
        }
    };
    Ok((architecture, variants))
}

impl fmt::Display for Architectures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.join(","))
    }
}

impl Architectures {
    /// Each with the lowest variant that suffices, if not every one does: `amd64/v3, arm64`.
    pub fn join(&self, separator: &str) -> String {
        self.to_strings().join(separator)
    }

    /// The architectures, each with the lowest variant that suffices.
    pub fn to_strings(&self) -> Vec<String> {
        let mut texts = Vec::new();
        for (name, variants) in self.iter() {
            let before = texts.len();
            let lowest = variants.lowest(name);
            texts.extend(lowest.map(|variant| format!("{name}/{variant}")));
            if texts.len() == before {
                texts.push(name.to_string());
            }
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_architectures() {
        for (text, expected) in [
            ("amd64", Some("amd64")),
            ("amd64/v1, aarch64/v8", Some("amd64,arm64")),
            ("amd64/v3,arm64", Some("amd64/v3,arm64")),
            ("amd64/v3,amd64/v2", Some("amd64/v2")),
            ("amd64/v3,amd64", Some("amd64")),
            ("x86_64/V3", Some("amd64/v3")),
            ("arm", Some("arm")),
            ("arm/v7", Some("arm/v7")),
            ("armhf", Some("arm/v7")),
            ("armel", Some("arm/v6")),
            ("arm64/v8.6,arm64/v9", Some("arm64/v8.6,arm64/v9")),
            ("s390x", Some("s390x")),
            ("amd64/", None),
            ("arm/", None),
            ("amd64/fast", None),
            ("s390x/z14", None),
            ("amd64/v3/x", None),
            ("", None),
            ("any", Some("any")),
        ] {
            let found = text.parse::<Architectures>().ok();
            assert_eq!(
                found.map(|set| set.to_string()).as_deref(),
                expected,
                "{text}"
            );
        }
        let (both, one): (Architectures, Architectures) = (
            "amd64/v2,arm64".parse().unwrap(),
            "amd64/v3,s390x".parse().unwrap(),
        );
        assert_eq!(both.and(&one).to_string(), "amd64/v3");
    }
}
