//! Proofs of CPU variants by labels of Node Feature Discovery (NFD).

use std::collections::{BTreeMap, BTreeSet};

use crate::requirement::{Operator, Requirement};
use archaware_platform::{Architecture, Variants};

/// The labels for CPU features have this prefix and the value `true`.
pub(super) const CPUID: &str = "feature.node.kubernetes.io/cpu-cpuid.";
/// The vendor of the CPU, as NFD's library names it.
pub(super) const VENDOR: &str = "feature.node.kubernetes.io/cpu-model.vendor_id";
/// The model of the CPU, a number. On arm64: bits 15 to 0 of `MIDR_EL1`, which are the part number
/// and the revision.
pub(super) const MODEL: &str = "feature.node.kubernetes.io/cpu-model.id";

/// The level that NFD publishes for every amd64 CPU since version 0.19, together with the higher
/// levels of the CPU.
const LOWEST_LEVEL: &str = "X86_64_V1";

/// What proves a variant: the level, all of the features, or one of the models.
pub(super) struct Proof {
    pub(super) architecture: &'static str,
    pub(super) variant: &'static str,
    /// The level, as NFD names it; empty if there is none. Where NFD publishes levels, the features
    /// do not count: a hypervisor may hide a feature for which NFD has no label.
    pub(super) level: &'static str,
    /// The lower variant whose features this variant includes; empty if there is none.
    pub(super) and_of: &'static str,
    /// Features that the variant needs in addition to those of `and_of`, as NFD names them.
    pub(super) features: &'static [&'static str],
    /// CPU models that have this variant.
    pub(super) models: &'static [Models],
}

/// CPUs of one vendor with successive part numbers.
pub(super) struct Models {
    pub(super) vendor: &'static str,
    /// The first part number.
    pub(super) first: u16,
    /// The last part number, inclusive.
    pub(super) last: u16,
}

const fn proof(
    architecture: &'static str,
    variant: &'static str,
    and_of: &'static str,
    features: &'static [&'static str],
) -> Proof {
    Proof {
        architecture,
        variant,
        level: "",
        and_of,
        features,
        models: &[],
    }
}

const fn level(
    variant: &'static str,
    level: &'static str,
    and_of: &'static str,
    features: &'static [&'static str],
) -> Proof {
    Proof {
        level,
        ..proof("amd64", variant, and_of, features)
    }
}

/// From the lowest variant to the highest.
///
/// amd64: the levels of the System V ABI. NFD publishes them since version 0.19. Earlier versions
/// have no labels for most of their features (`attributeBlacklist`: SSE3 to SSE4.2, POPCNT, CX16,
/// BMI1, BMI2, LZCNT, F16C). But every CPU with AVX has the features of v2, and every CPU with AVX2
/// and FMA3 has those of v3. A model proves nothing: Intel sold CPUs of one model with and without
/// AVX2, and hypervisors hide features.
///
/// arm64: features that the versions of the architecture make mandatory, and that Linux reports
/// (HWCAP). Armv9.m is Armv8.(5+m) with SVE2.
pub(super) const PROOFS: &[Proof] = &[
    level("v2", "X86_64_V2", "", &["AVX"]),
    level("v3", "X86_64_V3", "v2", &["AVX2", "FMA3"]),
    level(
        "v4",
        "X86_64_V4",
        "v3",
        &["AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"],
    ),
    proof("arm64", "v8.1", "", &["ATOMICS", "ASIMDRDM", "CRC32"]),
    Proof {
        models: ARMV8_2,
        ..proof("arm64", "v8.2", "v8.1", &["DCPOP"])
    },
    proof("arm64", "v8.3", "v8.2", &["JSCVT", "FCMA", "LRCPC", "PACA"]),
    proof(
        "arm64",
        "v8.4",
        "v8.3",
        &["ASIMDDP", "FLAGM", "USCAT", "ILRCPC", "DIT"],
    ),
    proof(
        "arm64",
        "v8.5",
        "v8.4",
        &["DCPODP", "FLAGM2", "FRINT", "SB"],
    ),
    proof("arm64", "v8.6", "v8.5", &["I8MM", "BF16"]),
    proof("arm64", "v9", "v8.5", &["SVE2"]),
    proof("arm64", "v9.1", "v8.6", &["SVE2"]),
];

/// CPUs with Armv8.2 or higher, by the part numbers in the Linux kernel's
/// `arch/arm64/include/asm/cputype.h`. Models prove no higher version. Pointer authentication is
/// mandatory from v8.3 on, and SVE2 from v9 on, but hypervisors can switch off both (KVM:
/// `KVM_ARM_VCPU_PTRAUTH_ADDRESS`, `KVM_ARM_VCPU_SVE`).
const ARMV8_2: &[Models] = &[
    // Cortex-A75 and A76, Neoverse N1 (Ampere Altra, AWS Graviton2), Cortex-A77 and A76AE.
    models("ARM", 0xd0a, 0xd0e),
    // Neoverse V1 (AWS Graviton3), N2 and V2 (AWS Graviton4, Google Axion, NVIDIA Grace),
    // Cortex-A78, X1 and later. Microsoft's Cobalt 100, an N2, has a vendor of its own, which NFD's
    // library does not know.
    models("ARM", 0xd40, 0xd4f),
    // Neoverse V3 and N3, Cortex-A520, A720, X4 and later.
    models("ARM", 0xd80, 0xd8f),
    // AmpereOne.
    models("Ampere", 0xac3, 0xac4),
];

const fn models(vendor: &'static str, first: u16, last: u16) -> Models {
    Models {
        vendor,
        first,
        last,
    }
}

/// The highest variant that the labels of a node prove.
pub(super) fn proven(
    architecture: &Architecture,
    labels: &BTreeMap<String, String>,
) -> Option<&'static str> {
    let mut proofs = Proof::of_architecture(architecture).rev();
    let proven = proofs.find(|proof| proof.is_given_by(labels))?;
    Some(proven.variant)
}

/// Alternative lists of requirements, each of which proves one of these variants.
pub(super) fn requirements(
    architecture: &Architecture,
    variants: Variants,
) -> impl Iterator<Item = Vec<Requirement>> {
    let sufficient: Vec<_> = Proof::of_architecture(architecture)
        .filter(|proof| variants.contains(architecture, proof.variant))
        .collect();
    let features: Vec<BTreeSet<_>> = sufficient
        .iter()
        .map(|proof| proof.all_features().into_iter().collect())
        .collect();
    // A proof with all features of a lower proof, and more, selects no further node.
    let is_new = move |index: usize| {
        let (before, rest) = features.split_at(index);
        let mut before = before.iter();
        rest.first()
            .is_some_and(|features| !before.any(|lower| features.is_superset(lower)))
    };
    let models = sufficient
        .clone()
        .into_iter()
        .flat_map(|proof| proof.models);
    let by_cpuid = sufficient
        .into_iter()
        .enumerate()
        .filter(move |(index, _)| is_new(*index))
        .flat_map(|(_, proof)| proof.on_cpuid());
    by_cpuid.chain(models.map(Models::requirements))
}

impl Proof {
    fn of_architecture(
        architecture: &Architecture,
    ) -> impl DoubleEndedIterator<Item = &'static Self> {
        let name = architecture.as_str().to_owned();
        PROOFS
            .iter()
            .filter(move |proof| proof.architecture == name)
    }

    /// All features that the variant needs.
    pub(super) fn all_features(&'static self) -> Vec<&'static str> {
        let (mut features, mut next) = (Vec::new(), Some(self));
        while let Some(proof) = next {
            features.splice(0..0, proof.features.iter().copied());
            let is_base = |other: &&Self| {
                other.architecture == proof.architecture && other.variant == proof.and_of
            };
            next = PROOFS.iter().find(is_base);
        }
        features
    }

    fn is_given_by(&'static self, labels: &BTreeMap<String, String>) -> bool {
        let has_feature = |feature: &&str| {
            let label = labels.get(&format!("{CPUID}{feature}"));
            label.is_some_and(|value| value == "true")
        };
        let by_level = has_feature(&self.level);
        let publishes_levels = !self.level.is_empty() && has_feature(&LOWEST_LEVEL);
        let by_features = || !publishes_levels && self.all_features().iter().all(has_feature);
        by_level || by_features() || self.models.iter().any(|models| models.include(labels))
    }

    /// The level or, where NFD does not publish levels, the features.
    fn on_cpuid(&'static self) -> Vec<Vec<Requirement>> {
        let requirement = |feature: &str, operator| {
            let label = format!("{CPUID}{feature}");
            Requirement::new(&label, operator, vec!["true".to_owned()])
        };
        let features = self.all_features().into_iter();
        let features = features.map(|feature| requirement(feature, Operator::In));
        if self.level.is_empty() {
            return vec![features.collect()];
        }
        // Also matches nodes without the label.
        let no_level = requirement(LOWEST_LEVEL, Operator::NotIn);
        vec![
            vec![requirement(self.level, Operator::In)],
            features.chain([no_level]).collect(),
        ]
    }
}

impl Models {
    /// The model numbers before the first one and after the last one: the part number has 12 bits,
    /// the revision below it 4.
    fn bounds(&self) -> (u32, u32) {
        let number = |part: u16| u32::from(part) << 4;
        (number(self.first) - 1, number(self.last) + 16)
    }

    fn include(&self, labels: &BTreeMap<String, String>) -> bool {
        let (below, above) = self.bounds();
        let model = labels.get(MODEL).and_then(|text| text.parse().ok());
        labels
            .get(VENDOR)
            .is_some_and(|vendor| vendor == self.vendor)
            && model.is_some_and(|model: u32| below < model && model < above)
    }

    fn requirements(&self) -> Vec<Requirement> {
        let (below, above) = self.bounds();
        vec![
            Requirement::new(VENDOR, Operator::In, vec![self.vendor.to_owned()]),
            Requirement::new(MODEL, Operator::Gt, vec![below.to_string()]),
            Requirement::new(MODEL, Operator::Lt, vec![above.to_string()]),
        ]
    }
}
