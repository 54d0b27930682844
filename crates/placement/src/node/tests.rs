use serde_json::json;

use crate::TAINT_KEY;

use super::*;

fn taint(text: &str) -> Taint {
    text.parse().unwrap()
}

struct Case {
    architecture: &'static str,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    taints: Vec<Value>,
    policy: TaintPolicy,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            architecture: "arm64",
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            taints: vec![json!({"key": "foreign", "effect": "NoSchedule"})],
            policy: TaintPolicy::default(),
        }
    }
}

/// Keys of the configuration and of an earlier configuration.
fn keys() -> ConfiguredKeys {
    ConfiguredKeys {
        taints: [TAINT_KEY, "old/key"].map(str::to_owned).into(),
        tolerations: BTreeSet::new(),
    }
}

impl Case {
    fn owned(mut self, text: &str) -> Self {
        self.annotations
            .insert(annotation::TAINT.to_owned(), text.to_owned());
        self
    }

    fn tainted(mut self, text: &str) -> Self {
        self.taints.push(taint(text).to_json());
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn node(&self) -> NodeView<'_> {
        NodeView {
            architecture: self.architecture,
            labels: &self.labels,
            annotations: &self.annotations,
            taints: &self.taints,
        }
    }

    fn decide(&self) -> (Option<NodeChange>, Option<TaintProblem>) {
        decide(&self.policy, &self.node(), &keys())
    }

    fn clean(&self) -> Option<NodeChange> {
        clean(&self.node(), &keys())
    }
}

const ARM: &str = "kubernetes.io/arch=arm64:NoSchedule";
const AMD: &str = "kubernetes.io/arch=amd64:NoSchedule";

#[test]
fn an_untainted_node_is_tainted_and_claimed() {
    let expected = NodeChange {
        add: Some(taint(ARM)),
        ownership: Some(Ownership::Of(taint(ARM))),
        ..NodeChange::default()
    };
    assert_eq!(Case::default().decide(), (Some(expected), None));
}

#[test]
fn nothing_to_do_is_the_usual_case() {
    assert_eq!(
        Case::default().owned(ARM).tainted(ARM).decide(),
        (None, None)
    );
    let foreign = Case::default().tainted(ARM);
    assert_eq!(
        foreign.decide(),
        (None, None),
        "an identical foreign taint is not claimed"
    );
}

#[test]
fn a_foreign_taint_with_another_value_is_a_conflict() {
    let problem = TaintProblem::Conflict {
        wanted: taint(ARM),
        value: "amd64".to_owned(),
    };
    assert_eq!(Case::default().tainted(AMD).decide(), (None, Some(problem)));
}

#[test]
fn an_owned_taint_is_put_right_and_put_back() {
    let wrong_value = Case::default().owned(ARM).tainted(AMD).decide().0.unwrap();
    assert_eq!(wrong_value.correct, Some((1, taint(ARM))));
    assert_eq!(wrong_value.ownership, None);
    let removed = Case::default().owned(ARM).decide().0.unwrap();
    assert_eq!((removed.add, removed.ownership), (Some(taint(ARM)), None));
    let replaced_node = Case::default().owned(AMD).tainted(AMD).decide().0.unwrap();
    assert_eq!(replaced_node.correct, Some((1, taint(ARM))));
    assert_eq!(replaced_node.ownership, Some(Ownership::Of(taint(ARM))));
}

#[test]
fn a_changed_configuration_moves_the_taint() {
    let old = "old/key=arm64:NoSchedule";
    let moved = Case::default().owned(old).tainted(old).decide().0.unwrap();
    let expected = NodeChange {
        remove: Some((1, taint("old/key=arm64:NoSchedule"))),
        add: Some(taint(ARM)),
        ownership: Some(Ownership::Of(taint(ARM))),
        correct: None,
    };
    assert_eq!(moved, expected);
    let foreign = Case::default()
        .owned(old)
        .tainted(old)
        .tainted(ARM)
        .decide()
        .0
        .unwrap();
    let expected = NodeChange {
        remove: Some((1, taint("old/key=arm64:NoSchedule"))),
        ownership: Some(Ownership::Nothing),
        ..NodeChange::default()
    };
    assert_eq!(foreign, expected);
}

#[test]
fn nodes_that_are_not_to_be_tainted_are_released() {
    let released = NodeChange {
        remove: Some((1, taint(ARM))),
        ownership: Some(Ownership::Nothing),
        ..NodeChange::default()
    };
    let ignore = || [(annotation::IGNORE.to_owned(), "true".to_owned())].into();
    for case in [
        Case::default().with(|case| case.labels = ignore()),
        Case::default().with(|case| case.annotations = ignore()),
        Case::default().with(|case| case.policy.kind = None),
        Case::default().with(|case| case.policy.architectures = ["amd64".parse().unwrap()].into()),
        Case::default().with(|case| {
            case.policy.selector = "pool=arm".to_owned().try_into().unwrap();
        }),
    ] {
        assert_eq!(case.decide(), (None, None), "a foreign node is left alone");
        let case = case.owned(ARM).tainted(ARM);
        assert_eq!(case.decide(), (Some(released.clone()), None));
    }
}

#[test]
fn an_unknown_architecture_is_reported_and_changes_nothing() {
    for architecture in ["", "unknown", "a b"] {
        let case = Case::default().with(|case| case.architecture = architecture);
        assert_eq!(
            case.decide(),
            (None, Some(TaintProblem::UnknownArchitecture))
        );
    }
}

#[test]
fn clean_takes_only_the_recorded_taint() {
    let own = Case::default().owned(ARM).tainted(ARM);
    assert_eq!(own.clean().unwrap().remove, Some((1, taint(ARM))));
    let changed = Case::default().owned(ARM).tainted(AMD);
    let change = changed.clean().unwrap();
    assert_eq!(
        (change.remove, change.ownership),
        (None, Some(Ownership::Nothing))
    );
    assert_eq!(Case::default().tainted(ARM).clean(), None);
}

/// A compromised kubelet can write the annotations of its node. It must not make archaware remove a
/// taint that keeps pods away from the node.
#[test]
fn a_forged_record_removes_no_taint_of_others() {
    for forged in [
        "dedicated=secure:NoSchedule",
        "dedicated=arm64:NoSchedule",
        "kubernetes.io/arch=secure:NoSchedule",
    ] {
        let case = Case::default().owned(forged).tainted(forged);
        let change = case.decide().0;
        let removed = change.as_ref().and_then(|change| change.remove.clone());
        let corrected = change.and_then(|change| change.correct);
        assert_eq!((removed, corrected), (None, None), "{forged}");
        let change = case.clean().unwrap();
        assert_eq!(
            (change.remove, change.ownership),
            (None, Some(Ownership::Nothing)),
            "{forged}"
        );
        let case = case.with(|case| case.policy.kind = None);
        let removed = case.decide().0.and_then(|change| change.remove);
        assert_eq!(removed, None, "{forged}");
    }
    // A taint with the key `dedicated` may come from an earlier configuration that is no longer
    // known, but only if its value is an architecture. The key of `ARM` is known.
    let unknown = |text: &str| {
        let case = Case::default().owned(text).tainted(text);
        of_unknown_key(&case.node(), &keys()).is_some()
    };
    assert!(unknown("dedicated=arm64:NoSchedule"));
    assert!(!unknown("dedicated=secure:NoSchedule") && !unknown(ARM));
    // The record names an architecture, the taint does not.
    let case = Case::default()
        .owned(ARM)
        .tainted("kubernetes.io/arch=secure:NoSchedule");
    let (change, problem) = case.decide();
    assert_eq!(change.unwrap().ownership, Some(Ownership::Nothing));
    assert!(matches!(problem, Some(TaintProblem::Conflict { .. })));
    let case = case.with(|case| case.policy.kind = None);
    assert_eq!(case.decide().0.unwrap().remove, None);
}

#[test]
fn a_decision_once_carried_out_is_stable() {
    // Applies a change as the API server does, then decides again.
    for case in [
        Case::default(),
        Case::default().owned(AMD).tainted(AMD),
        Case::default()
            .owned("old/key=arm64:NoSchedule")
            .tainted("old/key=arm64:NoSchedule"),
        Case::default().owned("nonsense"),
        Case::default()
            .owned(ARM)
            .tainted(ARM)
            .with(|case| case.policy.kind = None),
    ] {
        let mut case = case;
        let (change, _) = case.decide();
        let change = change.unwrap();
        if let Some((index, taint)) = change.correct {
            case.taints[index] = taint.to_json();
        }
        if let Some((index, _)) = change.remove {
            case.taints.remove(index);
        }
        case.taints.extend(change.add.map(|taint| taint.to_json()));
        match change.ownership {
            Some(Ownership::Of(taint)) => {
                case.annotations
                    .insert(annotation::TAINT.to_owned(), taint.to_string());
            }
            Some(Ownership::Nothing) => drop(case.annotations.remove(annotation::TAINT)),
            None => {}
        }
        assert_eq!(case.decide().0, None);
        assert_eq!(case.taints[0]["key"], "foreign");
    }
}
