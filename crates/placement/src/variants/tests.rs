use serde_json::{Value, json};

use crate::affinity::NodeSelectorTerm;

use super::{
    proof::{CPUID, MODEL, PROOFS, VENDOR},
    *,
};

const LABEL: &str = "archaware.dev/variant";

fn policy(unknown: UnknownVariants) -> VariantPolicy {
    VariantPolicy {
        unknown,
        label: LABEL.to_owned(),
        taints: true,
    }
}

fn set(text: &str) -> Architectures {
    text.parse().unwrap()
}

fn architecture(name: &str) -> Architecture {
    name.parse().unwrap()
}

/// Labels of a node: its own variant, and CPU features.
fn labels(variant: Option<&str>, features: &str) -> BTreeMap<String, String> {
    let label = variant.map(|variant| (LABEL.to_owned(), variant.to_owned()));
    let features = features.split_whitespace();
    let features = features.map(|name| (format!("{CPUID}{name}"), "true".to_owned()));
    label.into_iter().chain(features).collect()
}

#[test]
fn labels_say_the_variant_of_a_node() {
    let v4 = "AVX AVX2 FMA3 AVX512F AVX512BW AVX512CD AVX512DQ AVX512VL";
    let v85 = "ATOMICS ASIMDRDM CRC32 DCPOP JSCVT FCMA LRCPC PACA ASIMDDP FLAGM USCAT ILRCPC DIT DCPODP FLAGM2 FRINT SB";
    for (name, variant, features, expected) in [
        ("amd64", None, "", None),
        ("amd64", None, "AESNI AVX", Some("v2")),
        ("amd64", None, "AVX AVX2", Some("v2")),
        ("amd64", None, "AVX AVX2 FMA3", Some("v3")),
        ("amd64", None, v4, Some("v4")),
        // Where NFD publishes levels, the labels for single features do not count.
        ("amd64", None, "X86_64_V1", None),
        ("amd64", None, "X86_64_V1 X86_64_V2 X86_64_V3", Some("v3")),
        (
            "amd64",
            None,
            &format!("{v4} X86_64_V1 X86_64_V2"),
            Some("v2"),
        ),
        ("arm64", None, "X86_64_V1 X86_64_V2", None),
        // The variant label counts more than features, even with a lower variant.
        ("amd64", Some("v2"), v4, Some("v2")),
        ("amd64", Some("v1"), v4, Some("v1")),
        // A value that is no variant says nothing.
        ("amd64", Some("fast"), v4, Some("v4")),
        ("amd64", Some("v8"), v4, Some("v4")),
        (
            "amd64",
            None,
            "AVX512F AVX512BW AVX512CD AVX512DQ AVX512VL",
            None,
        ),
        ("arm", Some("v6"), "", Some("v6")),
        ("riscv64", Some("rva22u64"), "", Some("rva22u64")),
        ("arm64", None, "ASIMD AES", None),
        ("arm64", None, "ASIMD ATOMICS ASIMDRDM CRC32", Some("v8.1")),
        ("arm64", None, v85, Some("v8.5")),
        ("arm64", None, &format!("{v85} SVE2"), Some("v9")),
        (
            "arm64",
            None,
            &format!("{v85} SVE2 I8MM BF16"),
            Some("v9.1"),
        ),
        ("arm64", None, v4, None),
        ("s390x", Some("z14"), "", None),
    ] {
        let labels = labels(variant, features);
        let found = policy(UnknownVariants::Prefer).variant_by_labels(&architecture(name), &labels);
        let name_of = found.map(NodeVariant::name);
        assert_eq!(name_of, expected, "{name} {variant:?} {features}");
        let is_exact = found.is_some_and(|found| matches!(found, NodeVariant::Exactly(_)));
        assert_eq!(is_exact, found.is_some() && variant == name_of);
    }
}

/// Each proof is for a known variant. A variant that runs the images of another variant has a later
/// proof, which contains the features of the other proof.
#[test]
fn proofs_are_in_order() {
    for (index, proof) in PROOFS.iter().enumerate() {
        let architecture = architecture(proof.architecture);
        let sufficient = Variants::that_run(&architecture, proof.variant);
        assert_eq!(
            sufficient.lowest(&architecture).collect::<Vec<_>>(),
            [proof.variant]
        );
        let features: std::collections::BTreeSet<_> = proof.all_features().into_iter().collect();
        for (later_index, later) in PROOFS.iter().enumerate() {
            if later.architecture == proof.architecture
                && sufficient.contains(&architecture, later.variant)
            {
                assert!(later_index >= index);
                assert!(
                    later
                        .all_features()
                        .iter()
                        .collect::<std::collections::BTreeSet<_>>()
                        .is_superset(&features.iter().collect())
                );
            }
        }
    }
}

#[test]
fn the_documented_proofs_are_these() {
    let text = include_str!("../../../../docs/variants.md");
    let mut before = "";
    for proof in PROOFS {
        let features = proof.features.join(", ");
        let features = match (proof.level, proof.and_of) {
            (level, _) if !level.is_empty() => {
                format!("{level}, or {}", proof.all_features().join(", "))
            }
            (_, "") => features,
            (_, base) if base == before => format!("and {features}"),
            (_, base) => format!("those of {base}, {features}"),
        };
        let row = format!(
            "| {} `{}` | {features} |",
            proof.architecture, proof.variant
        );
        assert!(text.contains(&row), "{row}");
        for models in proof.models {
            let (first, last) = (models.first, models.last);
            let row = format!(
                "| `{}` | {} to {} | {first:#05x} to {last:#05x}",
                models.vendor,
                u32::from(first) * 16,
                u32::from(last) * 16 + 15
            );
            assert!(text.contains(&row), "{row}");
        }
        before = proof.variant;
    }
}

/// Labels as NFD 0.18 makes them: the number of a model is the part number and the revision.
#[test]
fn models_prove_a_variant() {
    let policy = policy(UnknownVariants::Prefer);
    for (name, vendor, model, expected) in [
        // AWS Graviton2: Neoverse N1 r3p1.
        ("arm64", "ARM", "53441", Some("v8.2")),
        // Neoverse V2 r0p1: a hypervisor may hide what v8.3 and v9 need.
        ("arm64", "ARM", "54513", Some("v8.2")),
        ("arm64", "Ampere", "44080", Some("v8.2")),
        // The first and the last of Cortex-A75 to A76AE, and what is before and after them.
        ("arm64", "ARM", "53408", Some("v8.2")),
        ("arm64", "ARM", "53487", Some("v8.2")),
        ("arm64", "ARM", "53407", None),
        ("arm64", "ARM", "53488", None),
        // Cortex-A72: Armv8.0.
        ("arm64", "ARM", "53379", None),
        // Each vendor has its own numbers. Microsoft's Cobalt 100 has the number of Neoverse N2,
        // but a vendor that NFD does not know.
        ("arm64", "VendorUnknown", "54416", None),
        ("arm64", "Ampere", "53441", None),
        ("arm64", "ARM", "", None),
        ("arm64", "ARM", "-1", None),
        ("arm64", "ARM", "99999999999", None),
        ("amd64", "ARM", "53441", None),
        ("amd64", "Intel", "85", None),
    ] {
        let mut labels = labels(None, "");
        labels.insert(VENDOR.to_owned(), vendor.to_owned());
        labels.insert(MODEL.to_owned(), model.to_owned());
        let architecture = architecture(name);
        let found = policy.variant_by_labels(&architecture, &labels);
        assert_eq!(
            found,
            expected.map(NodeVariant::AtLeast),
            "{name} {vendor} {model}"
        );
        // Pods with images for a variant prefer a node exactly if the node is known to suffice.
        let prefers = |set: &str| {
            let terms = policy.preferred(&super::tests::set(set));
            terms.iter().any(|term| {
                let term = NodeSelectorTerm::with_expressions(term.expressions.clone());
                let mut labels = labels.clone();
                labels.insert(crate::affinity::LABEL.to_owned(), name.to_owned());
                term.selects(&labels, "")
            })
        };
        assert_eq!(prefers("arm64/v8.1"), expected.is_some());
        assert_eq!(prefers("arm64/v8.2"), expected.is_some());
        assert!(!prefers("arm64/v8.3"));
        // Features can prove a higher variant than the model, and the variant label overrides both.
        let more = "ATOMICS ASIMDRDM CRC32 DCPOP JSCVT FCMA LRCPC PACA";
        labels.extend(super::tests::labels(None, more));
        let found = policy.variant_by_labels(&architecture, &labels);
        let expected = (name == "arm64").then_some(NodeVariant::AtLeast("v8.3"));
        assert_eq!(found, expected);
        labels.insert(LABEL.to_owned(), "v8".to_owned());
        let found = policy.variant_by_labels(&architecture, &labels);
        let expected = (name == "arm64").then_some(NodeVariant::Exactly("v8"));
        assert_eq!(found, expected);
    }
}

#[test]
fn whether_a_node_suffices() {
    use NodeVariant::{AtLeast, Exactly};
    for (text, node, variant, expected) in [
        ("amd64/v3,arm64", "arm64", None, Some(true)),
        ("amd64/v3,arm64", "s390x", None, Some(false)),
        ("amd64/v3", "amd64", None, None),
        ("amd64/v3", "amd64", Some(AtLeast("v2")), None),
        ("amd64/v3", "amd64", Some(AtLeast("v3")), Some(true)),
        ("amd64/v3", "amd64", Some(Exactly("v2")), Some(false)),
        ("amd64/v3", "amd64", Some(Exactly("v4")), Some(true)),
        ("arm/v7", "arm", None, Some(true)),
        ("arm/v7", "arm", Some(Exactly("v6")), Some(false)),
        ("arm/v8", "arm", None, None),
    ] {
        assert_eq!(
            suffices(&set(text), node, variant),
            expected,
            "{text} on {node} {variant:?}"
        );
    }
}

#[test]
fn what_is_considered() {
    for (unknown, taints, text, expected) in [
        (
            UnknownVariants::Prefer,
            false,
            "amd64/v3,arm/v7,arm64",
            "amd64/v3,arm,arm64",
        ),
        (
            UnknownVariants::Prefer,
            true,
            "amd64/v3,arm/v7",
            "amd64/v3,arm/v7",
        ),
        (
            UnknownVariants::Require,
            false,
            "amd64/v3,arm/v7",
            "amd64/v3,arm/v7",
        ),
        (
            UnknownVariants::Ignore,
            true,
            "amd64/v3,arm/v7",
            "amd64,arm",
        ),
    ] {
        let policy = VariantPolicy {
            taints,
            ..policy(unknown)
        };
        assert_eq!(policy.considered(set(text)).to_string(), expected);
    }
}

/// With `taint.variants`.
#[test]
fn taints_and_tolerations_of_variants() {
    let value = |name: &str, variant: Option<&str>| {
        let policy = policy(UnknownVariants::Prefer);
        policy.taint_value(&architecture(name), &labels(variant, ""))
    };
    for (name, variant, expected) in [
        ("amd64", None, "amd64"),
        ("amd64", Some("v1"), "amd64"),
        ("amd64", Some("v3"), "amd64-v3"),
        ("arm", Some("v6"), "arm-v6"),
        ("arm", Some("v7"), "arm"),
        ("arm64", Some("v8.4"), "arm64"),
        ("arm64", Some("v9.2"), "arm64-v9"),
        ("riscv64", Some("rva23u64"), "riscv64-rva23u64"),
        ("s390x", Some("z14"), "s390x"),
    ] {
        assert_eq!(value(name, variant), expected, "{name} {variant:?}");
        assert_eq!(architecture_of(expected), Some(architecture(name)));
    }
    // A variant that only features prove is in the taint only with `require`.
    for (unknown, expected) in [
        (UnknownVariants::Prefer, "amd64"),
        (UnknownVariants::Require, "amd64-v2"),
        (UnknownVariants::Ignore, "amd64"),
    ] {
        let labels = labels(None, "AVX");
        assert_eq!(
            policy(unknown).taint_value(&architecture("amd64"), &labels),
            expected
        );
    }
    for foreign in ["amd64-fast", "secure-v3", "amd64-", "-v3"] {
        assert_eq!(architecture_of(foreign), None, "{foreign}");
    }
    let tolerated = |unknown, text: &str| {
        let set = set(text);
        let (name, variants) = set.iter().next().unwrap();
        policy(unknown).tolerated_values(name, variants).join(" ")
    };
    let (prefer, require) = (UnknownVariants::Prefer, UnknownVariants::Require);
    for (unknown, text, expected) in [
        (prefer, "amd64", "amd64 amd64-v2 amd64-v3 amd64-v4"),
        (require, "amd64", "amd64 amd64-v2 amd64-v3 amd64-v4"),
        (prefer, "amd64/v3", "amd64 amd64-v3 amd64-v4"),
        (require, "amd64/v3", "amd64-v3 amd64-v4"),
        (prefer, "arm/v6", "arm arm-v6 arm-v8"),
        (require, "arm/v8", "arm-v8"),
        // The minor version is not in the taint.
        (require, "arm64/v8.2", "arm64 arm64-v9"),
        (require, "arm64/v9.1", "arm64-v9"),
        (prefer, "s390x", "s390x"),
    ] {
        let mut found: Vec<_> = tolerated(unknown, text)
            .split(' ')
            .map(str::to_owned)
            .collect();
        found.sort();
        assert_eq!(found.join(" "), expected, "{unknown:?} {text}");
    }
    let without = VariantPolicy {
        taints: false,
        ..policy(prefer)
    };
    assert_eq!(
        without.taint_value(&architecture("amd64"), &labels(Some("v3"), "")),
        "amd64"
    );
    assert_eq!(
        without.tolerated_values(&architecture("amd64"), Variants::ANY),
        ["amd64"]
    );
}

fn on_arch(names: &[&str]) -> Value {
    json!({"key": "kubernetes.io/arch", "operator": "In", "values": names})
}

fn by_label(operator: &str, values: &[&str]) -> Value {
    json!({"key": LABEL, "operator": operator, "values": values})
}

fn no_label() -> Value {
    by_label("NotIn", &["v1", "v2", "v3", "v4"])
}

fn cpuid(name: &str, operator: &str) -> Value {
    json!({"key": format!("{CPUID}{name}"), "operator": operator, "values": ["true"]})
}

fn feature(name: &str) -> Value {
    cpuid(name, "In")
}

fn no_level() -> Value {
    cpuid("X86_64_V1", "NotIn")
}

#[test]
fn the_affinity_of_variants() {
    let both = |unknown, text: &str, is_single| {
        let policy = policy(unknown);
        let preferred = policy.preferred(&set(text)).into_iter();
        let preferred: Vec<_> = preferred.map(|term| json!(term.expressions)).collect();
        (
            json!(policy.required(&set(text), is_single)),
            json!(preferred),
        )
    };
    let (prefer, require) = (UnknownVariants::Prefer, UnknownVariants::Require);
    let nothing = (json!([]), json!([]));
    for unknown in [prefer, require] {
        assert_eq!(both(unknown, "amd64,arm64", false), nothing);
        assert_eq!(both(unknown, "amd64/v1,arm64/v8", false), nothing);
        // An arm node of unknown variant is presumed to be v7. (This is considered with
        // `taint.variants` or `require` only.)
        let v7 = json!([[on_arch(&["amd64", "arm"]), by_label("NotIn", &["v5", "v6"])]]);
        assert_eq!(both(unknown, "amd64,arm/v7", false), (v7, json!([])));
    }
    // Nodes that are known not to suffice are excluded, those that are known to suffice are
    // preferred.
    let v3 = json!([
        [on_arch(&["amd64"]), by_label("In", &["v3", "v4"])],
        [on_arch(&["amd64"]), no_label(), feature("X86_64_V3")],
        [
            on_arch(&["amd64"]),
            no_label(),
            feature("AVX"),
            feature("AVX2"),
            feature("FMA3"),
            no_level()
        ],
    ]);
    let not_lower = json!([[on_arch(&["amd64"]), by_label("NotIn", &["v1", "v2"])]]);
    assert_eq!(
        both(prefer, "amd64/v3", false),
        (not_lower.clone(), v3.clone())
    );
    assert_eq!(both(require, "amd64/v3", false), (v3, json!([])));
    // Affinity that can only be narrowed gets no alternatives.
    assert_eq!(both(require, "amd64/v3", true), (not_lower, json!([])));
    let mixed = json!([
        [on_arch(&["arm64"])],
        [on_arch(&["amd64"]), by_label("In", &["v2", "v3", "v4"])],
        [on_arch(&["amd64"]), no_label(), feature("X86_64_V2")],
        [on_arch(&["amd64"]), no_label(), feature("AVX"), no_level()],
    ]);
    assert_eq!(
        both(require, "amd64/v2,arm64", false),
        (mixed.clone(), json!([]))
    );
    let one = json!([[on_arch(&["amd64", "arm64"]), by_label("NotIn", &["v1"])]]);
    assert_eq!(both(prefer, "amd64/v2,arm64", false), (one, mixed));
    // No features prove more than Armv9.1.
    let v92 = json!([[
        on_arch(&["arm64"]),
        by_label("In", &["v9.2", "v9.3", "v9.4", "v9.5", "v9.6", "v9.7"])
    ]]);
    assert_eq!(both(require, "arm64/v9.2", true), (v92, json!([])));
    // `v8` is also a variant of arm.
    let shared = json!([[
        on_arch(&["arm", "arm64"]),
        by_label("NotIn", &["v5", "v6", "v8.1"])
    ]]);
    assert_eq!(both(prefer, "arm/v7,arm64/v8.2", false).0, shared);
}

/// The proof of `arm64/v9` needs no feature that v8.6 adds, and the proof of v8.6 needs no SVE2.
#[test]
fn each_sufficient_variant_has_its_proof() {
    let policy = policy(UnknownVariants::Require);
    let both = set("arm64/v8.6,arm64/v9");
    let required = json!(policy.required(&both, false)).to_string();
    for (features, expected) in [("SVE2", true), ("I8MM", true), ("SVE2BITPERM", false)] {
        let label = format!("\"{CPUID}{features}\"");
        assert_eq!(required.contains(&label), expected, "{required}");
    }
}

proptest::proptest! {
    /// Required node affinity selects a node exactly if the node is known to suffice.
    #[test]
    fn known_nodes_are_those_that_are_selected(
        features in proptest::sample::subsequence(
            PROOFS.iter().flat_map(|proof| proof.features.iter().copied()).collect::<Vec<_>>(), 0..30),
        // NFD publishes a level with those below it.
        levels in 0_usize..5,
        all_of in proptest::option::of(0..PROOFS.len()),
        variant in proptest::option::of(proptest::sample::select(&["v1", "v2", "v3", "v4", "v8", "v8.2", "v9", "other"][..])),
        model in proptest::option::of(proptest::sample::select(&[("ARM", "53441"), ("ARM", "53379"), ("Ampere", "44080")][..])),
        needs in proptest::sample::select(&["amd64/v2", "amd64/v3", "amd64/v4", "arm64/v8.1", "arm64/v8.2", "arm64/v8.6", "arm64/v9", "arm64/v9.1", "arm64/v8.6,arm64/v9"][..]),
    ) {
        let mut names = features.join(" ");
        for level in ["X86_64_V1", "X86_64_V2", "X86_64_V3", "X86_64_V4"].iter().take(levels) {
            names = format!("{names} {level}");
        }
        for name in all_of.into_iter().flat_map(|index| PROOFS[index].all_features()) {
            names = format!("{names} {name}");
        }
        let mut labels = labels(variant, &names);
        if let Some((vendor, number)) = model {
            labels.insert(VENDOR.to_owned(), vendor.to_owned());
            labels.insert(MODEL.to_owned(), number.to_owned());
        }
        let (name, _) = needs.split_once('/').unwrap();
        labels.insert(crate::affinity::LABEL.to_owned(), name.to_owned());
        let policy = policy(UnknownVariants::Require);
        let known = policy.variant_by_labels(&architecture(name), &labels);
        let selected = policy.required(&set(needs), false).into_iter().any(|all| {
            NodeSelectorTerm::with_expressions(all).selects(&labels, "")
        });
        proptest::prop_assert_eq!(suffices(&set(needs), name, known) == Some(true), selected, "{:?} {:?}", known, labels);
    }
}
