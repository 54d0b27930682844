use proptest::prelude::*;
use serde_json::json;

use crate::{
    UnlabelledNodes,
    change::{AffinityAccess, Asked, PodView},
    demand::Demands,
    preference::Preferences,
};

use super::*;
use archaware_platform::{NoPlatformReason, Platform};

/// The decision for images.
fn decide<'a>(
    policy: &PlacementPolicy,
    images: impl IntoIterator<Item = &'a PlatformSet>,
    os: &Os,
) -> Decision {
    let runtime = PodRuntime { os, class: None };
    policy.decide(policy.shared_architectures(images, runtime))
}

fn policy() -> PlacementPolicy {
    PlacementPolicy::default()
}

fn set(names: &[&str]) -> Architectures {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn image(platforms: &[&str]) -> PlatformSet {
    let platform = |text: &&str| {
        let (os, architecture) = text.split_once('/').unwrap();
        Platform::new(os, architecture, "").unwrap()
    };
    PlatformSet::new(
        platforms.iter().map(platform).collect(),
        NoPlatformReason::NoArchitecture,
    )
}

#[test]
fn intersections() {
    let none = PlatformSet::None(NoPlatformReason::NotAnImage);
    let multi = image(&["linux/amd64", "linux/arm64", "linux/s390x"]);
    for (images, os, expected) in [
        (
            vec![&multi],
            "linux",
            Decision::Architectures(set(&["amd64", "arm64", "s390x"])),
        ),
        (
            vec![
                &multi,
                &image(&["linux/arm64", "linux/amd64"]),
                &image(&["linux/arm64"]),
            ],
            "linux",
            Decision::Architectures(set(&["arm64"])),
        ),
        (
            vec![&image(&["linux/amd64"]), &image(&["linux/arm64"])],
            "linux",
            Decision::NoCommonArchitecture,
        ),
        (
            vec![&none, &image(&["linux/arm64"])],
            "linux",
            Decision::Architectures(set(&["arm64"])),
        ),
        (vec![&none, &none], "linux", Decision::TolerateAll),
        (vec![], "linux", Decision::TolerateAll),
        (
            vec![&image(&["linux/386"])],
            "linux",
            Decision::Architectures(set(&["386", "amd64"])),
        ),
        (
            vec![&image(&["linux/386"]), &image(&["linux/amd64"])],
            "linux",
            Decision::Architectures(set(&["amd64"])),
        ),
        (
            vec![&image(&["linux/amd64", "windows/arm64"])],
            "linux",
            Decision::Architectures(set(&["amd64"])),
        ),
        (
            vec![&image(&["linux/amd64", "windows/arm64"])],
            "windows",
            Decision::Architectures(set(&["arm64"])),
        ),
        (
            vec![&image(&["linux/amd64"])],
            "windows",
            Decision::NoCommonArchitecture,
        ),
        (
            vec![&image(&["/arm64"])],
            "windows",
            Decision::Architectures(set(&["arm64"])),
        ),
    ] {
        assert_eq!(
            decide(&policy(), images.clone(), &os.parse().unwrap()),
            expected,
            "{images:?} {os}"
        );
    }
}

#[test]
fn only_schedulable_architectures_count() {
    let mut policy = policy();
    policy.schedulable = ["arm64".parse().unwrap()].into();
    let linux = Os::linux();
    let both = image(&["linux/amd64", "linux/arm64"]);
    assert_eq!(
        decide(&policy, [&both], &linux),
        Decision::Architectures(set(&["arm64"]))
    );
    assert_eq!(
        decide(&policy, [&image(&["linux/amd64"])], &linux),
        Decision::NoCommonArchitecture
    );
}

#[test]
fn only_what_is_missing_is_added() {
    let both = Decision::Architectures(set(&["amd64", "arm64"]));
    let amd64 = json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": "amd64", "effect": "NoSchedule"});
    let arm64 = json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"});
    let any = json!({"key": "kubernetes.io/arch", "operator": "Exists", "effect": "NoSchedule"});
    let everything = json!({"operator": "Exists"});
    let user = json!({"key": "kubernetes.io/arch", "value": "arm64"});
    for (decision, existing, expected) in [
        (&both, vec![], vec![amd64.clone(), arm64.clone()]),
        (&both, vec![user.clone()], vec![amd64.clone()]),
        (&both, vec![everything.clone()], vec![]),
        (
            &Decision::TolerateAll,
            vec![amd64.clone(), arm64.clone()],
            vec![any.clone()],
        ),
        (&Decision::TolerateAll, vec![everything], vec![]),
        (&Decision::TolerateAll, vec![any.clone()], vec![]),
        (&Decision::NoCommonArchitecture, vec![], vec![]),
    ] {
        assert_eq!(
            policy().missing_tolerations(decision, &Os::linux(), &existing),
            expected,
            "{decision:?}"
        );
    }
    assert_eq!(both.annotation(), "amd64,arm64");
}

fn architectures() -> impl Strategy<Value = Architectures> {
    let names = prop::sample::subsequence(vec!["amd64", "arm64", "386", "s390x", "arm"], 0..=5);
    names.prop_map(|names| set(&names))
}

proptest! {
    #[test]
    fn the_order_and_number_of_images_do_not_matter(
        sets in prop::collection::vec(architectures(), 1..6),
        existing in architectures(),
    ) {
        let linux = Os::linux();
        let images: Vec<_> = sets.iter().filter(|set| !set.is_empty()).map(|set| {
            image(&set.names().map(|a| format!("linux/{a}")).collect::<Vec<_>>().iter().map(String::as_str).collect::<Vec<_>>())
        }).collect();
        let forward = decide(&policy(), images.iter(), &linux);
        let backward = decide(&policy(), images.iter().rev().chain(images.iter()), &linux);
        prop_assert_eq!(&forward, &backward);
        // Every image supports each decided architecture, or can run on it by compatibility.
        if let Decision::Architectures(shared) = &forward {
            for image in &images {
                let native = image.architectures(&linux).unwrap();
                for architecture in shared.names() {
                    let runs_386 = architecture.as_str() == "amd64" && native.contains("386");
                    prop_assert!(native.contains(architecture.as_str()) || runs_386);
                }
            }
        }
        // After the missing tolerations are added, none is missing and none is repeated.
        let mut tolerations: Vec<_> = existing.names().map(|a| policy().taint.taint(a.as_str()).toleration()).collect();
        let missing = policy().missing_tolerations(&forward, &Os::linux(), &tolerations);
        prop_assert!(missing.iter().all(|toleration| !tolerations.contains(toleration)));
        tolerations.extend(missing);
        prop_assert!(policy().missing_tolerations(&forward, &Os::linux(), &tolerations).is_empty());
    }
}

#[test]
fn rules_and_affinity_come_on_top() {
    let policy = PlacementPolicy {
        tolerations: crate::yaml(
            "[{platforms: [linux/arm64], toleration: {key: pool, value: arm}}]",
        ),
        ..PlacementPolicy::default()
    };
    let linux = Os::linux();
    let (selector, preferences) = (BTreeMap::new(), Preferences::new());
    let view = PodView {
        os: &linux,
        tolerations: &[],
        author: AuthorNodes {
            node_selector: &selector,
            affinity: None,
        },
        affinity: AffinityAccess::Open,
    };
    let disjoint = [set(&["amd64"]), set(&["arm64"])];
    let keys = |decision: &Decision, affinity| {
        let view = PodView { affinity, ..view };
        let asked = Asked {
            demands: &Demands::default(),
            preferences: &preferences,
            unlabelled: &UnlabelledNodes::default(),
            disjoint: &disjoint,
            by_policy: false,
        };
        let change = policy.change(decision, view, asked);
        let keys = change
            .tolerations
            .iter()
            .map(|one| one["key"].as_str().unwrap().to_owned());
        (
            keys.collect::<Vec<_>>().join(" "),
            change.affinity.require.is_some(),
        )
    };
    let arch_key = "kubernetes.io/arch";
    let on = |names: &[&str]| Decision::Architectures(set(names));
    assert_eq!(
        keys(&on(&["amd64", "arm64"]), AffinityAccess::Narrowing),
        (format!("{arch_key} {arch_key} pool"), true)
    );
    assert_eq!(
        keys(&on(&["amd64"]), AffinityAccess::Closed),
        (arch_key.to_owned(), false)
    );
    assert_eq!(
        keys(&Decision::TolerateAll, AffinityAccess::Open),
        (arch_key.to_owned(), false)
    );
    assert_eq!(
        keys(&Decision::NoCommonArchitecture, AffinityAccess::Open),
        (String::new(), true)
    );
}
