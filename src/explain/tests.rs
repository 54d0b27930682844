use serde_json::{Value, json};

use super::*;
use crate::{
    evaluate::{Conflict, Stage},
    plan,
};

fn set(names: &str) -> Architectures {
    names.parse().unwrap()
}

fn image(name: &str, architectures: &str) -> EvaluatedImage {
    let built_for = (architectures != "any").then(|| architectures.parse().unwrap());
    EvaluatedImage::for_tests(name, built_for)
}

fn node(name: &str, architecture: &str, change: &Value) -> Node {
    let taint = json!({"key": "kubernetes.io/arch", "value": architecture, "effect": "NoSchedule"});
    let mut node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": architecture}},
        "spec": {"taints": [taint]},
        "status": {"nodeInfo": {"architecture": architecture}},
    });
    json_patch::merge(&mut node, change);
    serde_json::from_value(node).unwrap()
}

/// Two amd64 nodes and an arm64 node.
fn nodes() -> Vec<Node> {
    let no_change = json!({});
    vec![
        node("a", "amd64", &no_change),
        node("b", "amd64", &no_change),
        node("c", "arm64", &no_change),
    ]
}

fn tolerating(architectures: &[&str]) -> Value {
    let tolerations = architectures.iter().map(|name| {
        json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule"})
    });
    json!({"tolerations": tolerations.collect::<Vec<_>>()})
}

fn unschedulable(message: &str) -> Value {
    json!({"phase": "Pending", "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]})
}

/// What is known in one case.
struct Case {
    spec: Value,
    annotations: Value,
    status: Value,
    exists: bool,
    /// The kind of its controller.
    owner: Option<&'static str>,
    creation_problem: Option<&'static str>,
    images: Vec<EvaluatedImage>,
    failed: Vec<(String, ImageError)>,
    verdict: Verdict,
    conflict: Option<Conflict>,
    overruled: Option<Architectures>,
    handling: Handling,
    nodes: Option<Vec<Node>>,
    is_installed: Option<bool>,
}

impl Case {
    /// A pod with these images, and with the tolerations of the decision.
    fn of(images: Vec<EvaluatedImage>, decision: Decision) -> Self {
        let spec = match &decision {
            Decision::Architectures(set) => {
                let names: Vec<_> = set.names().map(ToString::to_string).collect();
                tolerating(&names.iter().map(String::as_str).collect::<Vec<_>>())
            }
            _ => json!({}),
        };
        Self {
            spec,
            annotations: json!({}),
            status: json!({"phase": "Pending"}),
            exists: true,
            owner: Some("ReplicaSet"),
            creation_problem: None,
            images,
            failed: Vec::new(),
            verdict: Verdict::Decided(decision),
            conflict: None,
            overruled: None,
            handling: Handling::Mode(Mode::Inspect),
            nodes: Some(nodes()),
            is_installed: Some(true),
        }
    }

    fn on(architectures: &str) -> Self {
        let decision = Decision::Architectures(set(architectures));
        Self::of(vec![image("app:1", architectures)], decision)
    }

    fn explain(&self) -> Explanation {
        let mut pod = json!({
            "metadata": {"name": "p", "namespace": "n", "annotations": self.annotations},
            "spec": {"containers": [{"name": "c", "image": "app:1"}]},
            "status": self.status,
        });
        json_patch::merge(&mut pod["spec"], &self.spec);
        if let Some(kind) = self.owner {
            let owner = json!({"apiVersion": "apps/v1", "kind": kind, "name": "o", "uid": "o", "controller": true});
            pod["metadata"]["ownerReferences"] = json!([owner]);
        }
        let pod = ExistingPod::read(pod).unwrap();
        let config = Config::default();
        let policy = PlacementPolicy::from(&config);
        let mut evaluation = Evaluation {
            conflict: self.conflict.clone(),
            images: self.images.clone(),
            ..Evaluation::new(self.verdict.clone())
        };
        let overruled = self
            .overruled
            .as_ref()
            .map(|set| evaluation.explain_overruled(set));
        evaluation
            .raised
            .extend(overruled.map(Notice::AuthorOverrules));
        let subject = plan::pod::subject(&pod.pod);
        explain(&Facts {
            kind: "Pod",
            name: &NamespacedName::new("n", "p"),
            pod: self.exists.then_some(&pod),
            pods: &[],
            subject: Subject {
                stage: if self.exists {
                    Stage::Pod
                } else {
                    Stage::Creation
                },
                ..subject
            },
            template: None,
            handling: (&self.handling, HandlingSource::Configuration),
            evaluation: &evaluation,
            images: &self.images,
            failed: &self.failed,
            tried: &BTreeMap::new(),
            nodes: self.nodes.as_deref(),
            is_installed: self.is_installed,
            own_namespace: "archaware",
            withheld: None,
            class_problem: None,
            creation_problem: self.creation_problem,
            missing_permissions: &[],
            policy: &policy,
            config: &config,
        })
    }
}

const NO_CPU: &str = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu. preemption: no.";

type Expected = (&'static str, Case, &'static str, &'static [&'static str]);

/// Checks the conclusion and the advice of each case.
fn check<const N: usize>(cases: [Expected; N]) {
    for (name, case, sentence, advice) in cases {
        let explained = case.explain();
        assert_eq!(explained.conclusion, sentence, "{name}");
        assert_eq!(explained.advice, advice, "{name}");
    }
}

fn not_found() -> (String, ImageError) {
    let what = "app:1".to_owned();
    ("app:1".to_owned(), ImageError::NotFound { what })
}

#[test]
fn pods_that_can_run_somewhere_and_wait() {
    check([
        (
            "room",
            Case {
                status: unschedulable(NO_CPU),
                ..Case::on("amd64")
            },
            "Image app:1 is for amd64 only. The scheduler cannot place the pod on the other nodes (2 amd64 nodes): Insufficient cpu on 2 nodes.",
            &["Build app:1 for arm64, or add amd64 nodes."],
        ),
        (
            "room, and no image limits it",
            Case {
                status: unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
                ..Case::on("amd64,arm64")
            },
            "Its images run on 2 amd64 nodes and 1 arm64 node, but the scheduler cannot place it on any of them: Insufficient cpu on 3 nodes.",
            &["Make room on these nodes, or add amd64 or arm64 nodes."],
        ),
        (
            "not decided yet",
            Case {
                spec: json!({}),
                ..Case::on("amd64")
            },
            "It can run on 2 amd64 nodes as soon as archaware has given it its tolerations.",
            &[
                "If that takes longer than a second, see whether archaware runs (`kubectl -n archaware get pods`), and its events and logs.",
            ],
        ),
        (
            "not scheduled yet",
            Case::on("amd64"),
            "It can run on 2 amd64 nodes; the scheduler has not placed it yet.",
            &[],
        ),
        (
            "a template",
            Case {
                exists: false,
                spec: json!({}),
                ..Case::on("amd64")
            },
            "A pod of it can run on 2 amd64 nodes: app:1 is for amd64 only.",
            &[],
        ),
        (
            "a gate of another tool",
            Case {
                spec: json!({"schedulingGates": [{"name": "example.com/quota"}]}),
                ..Case::on("amd64")
            },
            "It waits for its scheduling gate example.com/quota, which another tool set and has to remove.",
            &[],
        ),
        (
            "archaware's gate, and archaware is gone",
            Case {
                spec: json!({"schedulingGates": [{"name": "archaware.dev/inspect"}], "tolerations": tolerating(&["amd64"])["tolerations"]}),
                is_installed: Some(false),
                ..Case::on("amd64")
            },
            "It can run on 2 amd64 nodes, and waits behind archaware's scheduling gate.",
            &[
                "archaware removes the gate when it next reconciles the pod. If the gate stays, archaware does not run: start it, or remove the gate archaware.dev/inspect from the pod.",
            ],
        ),
    ]);
}

#[test]
fn pods_that_no_node_can_take() {
    check([
        (
            "no such nodes",
            Case {
                status: unschedulable(""),
                ..Case::on("s390x")
            },
            "No node can take it: 2 amd64 nodes and 1 arm64 node (app:1 is for s390x only).",
            &["Build app:1 for amd64, or add s390x nodes."],
        ),
        (
            "its author's selector",
            Case {
                spec: json!({"nodeSelector": {"disk": "ssd"}, "tolerations": tolerating(&["amd64"])["tolerations"]}),
                ..Case::on("amd64")
            },
            "No node can take it: 2 amd64 nodes (node selector disk=ssd); 1 arm64 node (node selector disk=ssd; and app:1 is for amd64 only).",
            &[
                "Its images run on the amd64 nodes, but it cannot land there (node selector disk=ssd). Label one of them disk=ssd, or change the node selector.",
            ],
        ),
        (
            "nothing in common",
            Case {
                conflict: Some(Conflict::Disjoint(Vec::new())),
                ..Case::of(
                    vec![
                        image("app:1", "amd64,arm64"),
                        image("proxy:1", "s390x"),
                        image("log:1", "amd64"),
                    ],
                    Decision::NoCommonArchitecture,
                )
            },
            "The images of the pod share no architecture: app:1 (amd64, arm64), proxy:1 (s390x), log:1 (amd64).",
            &["Build proxy:1 for amd64."],
        ),
        (
            "left alone",
            Case {
                spec: json!({}),
                verdict: Verdict::Skip,
                handling: Handling::Mode(Mode::Ignore),
                ..Case::on("amd64")
            },
            "No node can take it: 2 amd64 nodes (untolerated taint kubernetes.io/arch=amd64:NoSchedule); 1 arm64 node (app:1 is for amd64 only).",
            &[
                "Its images run on the amd64 nodes, but it cannot land there (untolerated taint kubernetes.io/arch=amd64:NoSchedule).",
                "archaware leaves it alone (mode ignore), so it has to tolerate archaware's taint itself.",
            ],
        ),
        (
            "unreadable",
            Case {
                failed: vec![not_found()],
                verdict: Verdict::Unresolved {
                    failed: vec![not_found()],
                    known: None,
                },
                ..Case::of(Vec::new(), Decision::TolerateAll)
            },
            "The platforms of app:1 cannot be read: NotFound: app:1 not found.",
            &[
                "Correct the name or the tag of the image, or push it. Some registries also answer 404 if a credential is missing.",
                "If the image stays unreadable for 60 s, archaware lets the pod run on every architecture that its other images allow (resolution.failure). The pod may then die on a node whose architecture the image lacks.",
            ],
        ),
    ]);
}

#[test]
fn pods_that_have_a_node() {
    check([
        (
            "it runs",
            Case {
                spec: json!({"nodeName": "a"}),
                status: json!({"phase": "Running"}),
                ..Case::on("amd64")
            },
            "It is bound to node a (amd64), for which its images exist.",
            &[],
        ),
        (
            "it runs where it cannot",
            Case {
                spec: json!({"nodeName": "c"}),
                status: json!({"phase": "Running", "containerStatuses": [{"name": "c", "state": {"waiting": {
                    "reason": "CrashLoopBackOff", "message": "back-off 10s"}}, "lastState": {"terminated": {
                    "reason": "StartError", "exitCode": 128, "message": "exec /app: exec format error"}}}]}),
                ..Case::on("amd64")
            },
            "It is bound to node c (arm64), but app:1 is for amd64 only; container c does not run: CrashLoopBackOff: exec /app: exec format error.",
            &[
                "Build app:1 for arm64.",
                "Or delete the pod, so that its replacement is placed by its images.",
            ],
        ),
        (
            "it fails for another reason",
            Case {
                spec: json!({"nodeName": "a"}),
                status: json!({"phase": "Pending", "containerStatuses": [{"name": "c", "state": {"waiting": {
                    "reason": "CreateContainerConfigError", "message": "secret \"x\" not found"}}}]}),
                ..Case::on("amd64")
            },
            "It is bound to node a (amd64), for which its images exist; container c does not run: CreateContainerConfigError: secret \"x\" not found.",
            &[],
        ),
        (
            "unread, and bound",
            Case {
                spec: json!({"nodeName": "a"}),
                failed: vec![not_found()],
                verdict: Verdict::Skip,
                ..Case::of(Vec::new(), Decision::TolerateAll)
            },
            "It is bound to node a (amd64); it is not known whether app:1 exists for this architecture (its registry has no such image). Its containers have not started.",
            &[
                "Correct the name or the tag of the image, or push it. Some registries also answer 404 if a credential is missing.",
            ],
        ),
        (
            "finished",
            Case {
                status: json!({"phase": "Succeeded"}),
                ..Case::on("amd64")
            },
            "It has finished (Succeeded).",
            &[],
        ),
    ]);
}

#[test]
fn what_is_stated_and_what_is_not_known() {
    check([
        (
            "no permission to list nodes",
            Case {
                nodes: None,
                ..Case::on("amd64,arm64")
            },
            "It can run on amd64, arm64. archaware cannot list the nodes, so it is not known whether there are such nodes.",
            &[],
        ),
        (
            "stated by its author",
            Case {
                images: vec![image("app:1", "amd64")],
                handling: Handling::Architectures(set("arm64")),
                ..Case::on("arm64")
            },
            "It can run on 1 arm64 node; the scheduler has not placed it yet.",
            &[],
        ),
    ]);
}

/// archaware does not limit these pods, but their images do not run on every node.
#[test]
fn pods_that_nothing_keeps_away_from_wrong_nodes() {
    let everything = || json!({"tolerations": [{"operator": "Exists"}]});
    let unlimited_case = |spec: Value| Case {
        spec,
        images: vec![image("app:1", "amd64")],
        ..Case::of(Vec::new(), Decision::TolerateAll)
    };
    let deadly =
        "Nothing keeps it away from 1 arm64 node, where it dies with \"exec format error\".";
    check([
        (
            "it tolerates everything",
            unlimited_case(everything()),
            "It can run on 2 amd64 nodes; the scheduler has not placed it yet.",
            &["Nothing keeps it away from 1 arm64 node, where it dies with \"exec format error\"."],
        ),
        (
            "a template that does",
            Case {
                exists: false,
                verdict: Verdict::Skip,
                ..unlimited_case(everything())
            },
            "A pod of it can run on 2 amd64 nodes: app:1 is for amd64 only.",
            &["Nothing keeps it away from 1 arm64 node, where it dies with \"exec format error\"."],
        ),
    ]);
    let explained = unlimited_case(everything()).explain();
    assert_eq!(
        (explained.verdict, explained.architectures),
        ("any", Some(vec!["amd64".to_owned()]))
    );
    assert_eq!(explained.advice, [deadly]);
}

#[test]
fn what_the_architecture_has_nothing_to_do_with() {
    let failing = |message: &str| {
        json!({"phase": "Running", "containerStatuses": [{"name": "c", "state": {"terminated": {
            "reason": "StartError", "exitCode": 128, "message": message}}}]})
    };
    let claims = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.";
    check([
        (
            "a volume",
            Case {
                status: unschedulable(claims),
                ..Case::on("amd64")
            },
            "Its images run on 2 amd64 nodes, but the scheduler cannot place it on any of them: 0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            &[],
        ),
        (
            "an image that says something wrong",
            Case {
                spec: json!({"nodeName": "a"}),
                status: failing("exec /app: exec format error"),
                ..Case::on("amd64")
            },
            "It is bound to node a (amd64), for which its images exist; container c does not run: StartError: exec /app: exec format error.",
            &[
                "An image contains programs for another architecture than its manifest lists: build it again, or state where it runs with the annotation archaware.dev/architectures.",
            ],
        ),
        (
            "its author states it",
            Case {
                spec: json!({"nodeName": "c"}),
                images: vec![image("app:1", "amd64")],
                handling: Handling::Architectures(set("arm64")),
                ..Case::on("arm64")
            },
            "It is bound to node c (arm64), an architecture that its author states.",
            &[],
        ),
        (
            "its author states another architecture",
            Case {
                spec: json!({"nodeName": "c"}),
                images: vec![image("app:1", "amd64,arm64")],
                handling: Handling::Architectures(set("amd64")),
                ..Case::on("amd64")
            },
            "It is bound to node c (arm64), but the annotation archaware.dev/architectures lists only amd64.",
            &[
                "Delete the pod: its replacement is placed by the annotation archaware.dev/architectures. Or correct the annotation in the template.",
            ],
        ),
        (
            "a variant that is not known",
            Case {
                spec: json!({"nodeName": "a"}),
                images: vec![image("app:1", "amd64/v3")],
                ..Case::on("amd64/v3")
            },
            "It is bound to node a (amd64); it is not known whether the CPU of the node suffices for app:1 (amd64/v3).",
            &[],
        ),
        (
            "it failed",
            Case {
                spec: json!({"nodeName": "c"}),
                status: json!({"phase": "Failed"}),
                ..Case::on("amd64")
            },
            "It failed on node c (arm64), but app:1 is for amd64 only; programs for another architecture die with \"exec format error\".",
            &[
                "Build app:1 for arm64.",
                "Or delete the pod, so that its replacement is placed by its images.",
            ],
        ),
    ]);
}

#[test]
fn advice_depends_on_what_replaces_the_pod() {
    check([
        (
            "nothing replaces it",
            Case {
                spec: json!({"nodeName": "c"}),
                owner: None,
                ..Case::on("amd64")
            },
            "It is bound to node c (arm64), but app:1 is for amd64 only; programs for another architecture die with \"exec format error\".",
            &[
                "Build app:1 for arm64.",
                "No controller replaces the pod: delete it and create it again, so that archaware places it.",
            ],
        ),
        (
            "its DaemonSet would make it again there",
            Case {
                spec: json!({"nodeName": "c"}),
                owner: Some("DaemonSet"),
                ..Case::on("amd64")
            },
            "It is bound to node c (arm64), but app:1 is for amd64 only; programs for another architecture die with \"exec format error\".",
            &[
                "Build app:1 for arm64.",
                "Its DaemonSet would make another pod on the same node: let node affinity in the template of the DaemonSet exclude such nodes.",
            ],
        ),
        (
            "archaware would not place its replacement",
            Case {
                spec: json!({"nodeName": "c"}),
                is_installed: Some(false),
                ..Case::on("amd64")
            },
            "It is bound to node c (arm64), but app:1 is for amd64 only; programs for another architecture die with \"exec format error\".",
            &["Build app:1 for arm64."],
        ),
        (
            "it needs more memory",
            Case {
                spec: json!({"nodeName": "a"}),
                status: json!({"phase": "Running", "containerStatuses": [{"name": "c", "state": {"waiting": {
                    "reason": "CrashLoopBackOff", "message": "back-off 10s"}}, "lastState": {"terminated": {
                    "reason": "OOMKilled", "exitCode": 137}}}]}),
                ..Case::on("amd64")
            },
            "It is bound to node a (amd64), for which its images exist; container c does not run: CrashLoopBackOff: OOMKilled, exit code 137.",
            &[],
        ),
    ]);
}

/// Nodes that the author selects lack less than nodes without the label.
#[test]
fn the_advice_is_for_the_nodes_that_the_pod_is_meant_for() {
    let taint = json!({"key": "gpu", "value": "yes", "effect": "NoSchedule"});
    let own = json!({"key": "kubernetes.io/arch", "value": "amd64", "effect": "NoSchedule"});
    let gpu = json!({"metadata": {"labels": {"gpu": "yes"}}, "spec": {"taints": [own, taint]}});
    let mut all = nodes();
    all.push(node("gpu", "amd64", &gpu));
    let mut spec = tolerating(&["amd64"]);
    spec["nodeSelector"] = json!({"gpu": "yes"});
    let case = Case {
        spec,
        nodes: Some(all),
        ..Case::on("amd64")
    };
    let advice = case.explain().advice.join(" ");
    assert!(advice.contains("tolerate that taint"), "{advice}");
    assert!(advice.contains("gpu=yes:NoSchedule"), "{advice}");
    assert!(!advice.contains("Label"), "{advice}");
}

/// A pod that Kubernetes does not create has no use for nodes.
#[test]
fn pods_that_cannot_be_created_are_told() {
    let case = Case {
        exists: false,
        creation_problem: Some("pods \"a\" is forbidden: exceeded quota: small"),
        ..Case::on("amd64")
    };
    let explained = case.explain();
    assert_eq!(
        explained.conclusion,
        "Kubernetes cannot create its pods: pods \"a\" is forbidden: exceeded quota: small. A pod of it can run on 2 amd64 nodes: app:1 is for amd64 only."
    );
    let advice = explained.advice.join(" ");
    assert!(advice.contains("ResourceQuota"), "{advice}");
}

/// The controller only reports that no node can run a pod.
#[test]
fn nothing_is_to_be_added_to_a_pod_that_no_node_can_run() {
    for (exists, expected) in [(true, false), (false, true)] {
        let case = Case {
            exists,
            spec: json!({"schedulingGates": [{"name": "archaware.dev/inspect"}]}),
            conflict: Some(Conflict::Disjoint(vec![set("amd64"), set("arm64")])),
            ..Case::of(
                vec![image("app:1", "amd64")],
                Decision::NoCommonArchitecture,
            )
        };
        assert_eq!(case.explain().pending.is_some(), expected, "{exists}");
    }
}

#[test]
fn thousands_of_nodes_are_a_few_groups() {
    let dedicated = json!({"spec": {"taints": [{"key": "dedicated", "effect": "NoExecute"}]}});
    let mut many_nodes: Vec<Node> = (0..5000)
        .map(|n| node(&format!("node-{n}"), ["amd64", "arm64"][n % 2], &json!({})))
        .collect();
    many_nodes.push(node("gpu", "amd64", &dedicated));
    let case = Case {
        nodes: Some(many_nodes),
        ..Case::on("amd64")
    };
    let groups = case.explain().nodes.unwrap();
    let found: Vec<_> = groups
        .iter()
        .map(|group| (group.fits, group.count, group.architecture.as_str()))
        .collect();
    assert_eq!(
        found,
        [
            ("yes", 2500, "amd64"),
            ("no", 2500, "arm64"),
            ("no", 1, "amd64")
        ]
    );
    assert_eq!(groups[0].examples, ["node-0", "node-2", "node-4"]);
    assert_eq!(groups[2].taints, ["dedicated:NoExecute"]);
}

#[test]
fn who_added_what_and_when() {
    let added = r#"{"version":1,"tolerations":[{"key":"kubernetes.io/arch","operator":"Equal","value":"amd64","effect":"NoSchedule"}],"affinity":{"require":{"architectures":["amd64"]}}}"#;
    let managed = |annotation: bool| {
        let fields = if annotation {
            json!({"f:metadata": {"f:annotations": {"f:archaware.dev/decision": {}}}})
        } else {
            json!({"f:spec": {"f:tolerations": {}}})
        };
        json!([{"manager": "archaware", "operation": "Update", "time": "2026-01-01T00:01:00Z", "fieldsV1": fields}])
    };
    let (at_creation, later) = ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z");
    for (fields, expected) in [
        (json!([]), vec![("webhook", at_creation)]),
        (managed(true), vec![("controller", later)]),
        (
            managed(false),
            vec![("webhook", at_creation), ("controller", later)],
        ),
    ] {
        let pod = json!({"metadata": {
            "name": "p", "creationTimestamp": at_creation, "managedFields": fields,
            "annotations": {"archaware.dev/decision": "amd64", "archaware.dev/added": added},
        }});
        let pod = ExistingPod::read(pod).unwrap();
        let additions = Additions::recorded(&pod).unwrap();
        let authors: Vec<_> = additions
            .by
            .iter()
            .map(|author| (author.part, author.time.as_deref().unwrap()))
            .collect();
        assert_eq!(authors, expected);
        let lines = [
            "tolerations kubernetes.io/arch=amd64:NoSchedule",
            "required node affinity kubernetes.io/arch in (amd64)",
        ];
        assert_eq!(additions.lines(), lines);
    }
    let untouched = ExistingPod::read(json!({"metadata": {"name": "p"}})).unwrap();
    assert_eq!(Additions::recorded(&untouched), None);
}

/// `explain` shows the note that archaware also reports as an event.
#[test]
fn an_author_who_overrules_the_images_is_told() {
    let case = Case {
        overruled: Some(set("amd64")),
        ..Case::on("amd64")
    };
    let notes = case.explain().notes;
    assert!(
        notes
            .iter()
            .any(|note| note.contains("No taint keeps the pod away")),
        "{notes:?}"
    );
}
