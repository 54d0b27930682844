use super::*;

fn image(architectures: &str) -> KnownImage {
    match architectures {
        "?" => KnownImage::Failed {
            reason: "NotFound",
            message: "not found".to_owned(),
        },
        "any" => KnownImage::Resolved {
            platforms: Vec::new(),
            built_for: None,
            architectures: None,
        },
        names => KnownImage::Resolved {
            platforms: names
                .split(',')
                .map(|name| format!("linux/{name}"))
                .collect(),
            built_for: Some(names.parse().unwrap()),
            architectures: Some(names.parse().unwrap()),
        },
    }
}

fn workload(name: &str, cpu: u64, images: &[(&str, &str)]) -> KnownWorkload {
    let images = images.iter();
    KnownWorkload {
        kind: "Deployment".to_owned(),
        namespace: Some("shop".to_owned()),
        name: name.to_owned(),
        pods: 2,
        requests: Requests {
            cpu_millicores: cpu,
            memory_bytes: 10 * cpu,
        },
        images: images
            .map(|(name, set)| ((*name).to_owned(), image(set)))
            .collect(),
        ..KnownWorkload::default()
    }
}

fn arm64() -> Architecture {
    "arm64".parse().unwrap()
}

#[test]
fn each_workload_has_an_answer() {
    let stated = |names: &str| KnownWorkload {
        stated: Some(names.parse().unwrap()),
        ..workload("a", 1, &[("a", "amd64"), ("b", "?")])
    };
    let excluded = KnownWorkload {
        excluded: [arm64()].into(),
        ..workload("a", 1, &[("a", "amd64,arm64")])
    };
    for (workload, can_run, blocked_by, unknown, architectures) in [
        (
            workload("a", 1, &[("a", "amd64,arm64")]),
            CanRun::Yes,
            vec![],
            vec![],
            Some("amd64,arm64"),
        ),
        (
            workload("a", 1, &[("a", "any")]),
            CanRun::Yes,
            vec![],
            vec![],
            None,
        ),
        (
            workload(
                "a",
                1,
                &[("a", "amd64"), ("b", "amd64,arm64"), ("c", "any")],
            ),
            CanRun::No,
            vec!["a"],
            vec![],
            Some("amd64"),
        ),
        // An image that lacks the architecture counts more than an image that is not known.
        (
            workload("a", 1, &[("a", "amd64"), ("b", "?")]),
            CanRun::No,
            vec!["a"],
            vec!["b"],
            None,
        ),
        (
            workload("a", 1, &[("a", "arm64"), ("b", "?")]),
            CanRun::Unknown,
            vec![],
            vec!["b"],
            None,
        ),
        (
            workload("a", 1, &[("a", "amd64"), ("b", "arm64")]),
            CanRun::No,
            vec!["a"],
            vec![],
            Some(""),
        ),
        (
            workload("a", 1, &[("a", "amd64/v3,arm64/v9")]),
            CanRun::Yes,
            vec![],
            vec![],
            Some("amd64/v3,arm64/v9"),
        ),
        (stated("arm64"), CanRun::Yes, vec![], vec![], Some("arm64")),
        (stated("amd64"), CanRun::No, vec![], vec![], Some("amd64")),
        (excluded, CanRun::No, vec![], vec![], Some("amd64,arm64")),
    ] {
        let answer = workload.answer(&arm64());
        assert_eq!(answer.can_run, can_run, "{workload:?}");
        assert_eq!(answer.blocked_by, blocked_by, "{workload:?}");
        assert_eq!(answer.unknown, unknown, "{workload:?}");
        let found = workload.architectures().map(|set| set.to_string());
        assert_eq!(found.as_deref(), architectures, "{workload:?}");
    }
}

#[test]
fn totals_add_up_and_the_worst_blocker_is_first() {
    let workloads = vec![
        workload("fine", 100, &[("app", "amd64,arm64")]),
        workload("one", 20, &[("old", "amd64"), ("app", "amd64,arm64")]),
        workload("one-more", 10, &[("old", "amd64")]),
        workload("big", 500, &[("huge", "amd64")]),
        workload("two", 5, &[("old", "amd64"), ("rare", "s390x")]),
        workload("unread", 3, &[("gone", "?")]),
    ];
    let report = report("test".to_owned(), workloads, &[arm64()], Vec::new());
    let [summary] = report.summaries.as_slice() else {
        panic!("one architecture is asked about");
    };
    let parts = [
        summary.can_run,
        summary.blocked_by_one_image,
        summary.blocked_otherwise,
        summary.unknown,
    ];
    assert_eq!(parts.map(|part| part.workloads), [1, 3, 1, 1]);
    assert_eq!(parts.map(|part| part.cpu_millicores), [100, 530, 5, 3]);
    assert_eq!(
        parts.iter().map(|part| part.pods).sum::<u64>(),
        summary.total.pods
    );
    assert_eq!(summary.total.memory_bytes, 6380);
    let blockers: Vec<_> = summary
        .blockers
        .iter()
        .map(|blocker| {
            (
                blocker.image.as_str(),
                blocker.blocks_alone.workloads,
                blocker.blocks.workloads,
            )
        })
        .collect();
    assert_eq!(blockers, [("old", 2, 3), ("huge", 1, 1), ("rare", 0, 1)]);
    let old = report
        .images
        .iter()
        .find(|image| image.image == "old")
        .unwrap();
    assert_eq!(
        (old.workloads, old.platforms.as_slice()),
        (3, &["linux/amd64".to_owned()][..])
    );
    let gone = report
        .images
        .iter()
        .find(|image| image.image == "gone")
        .unwrap();
    assert_eq!(gone.error.as_ref().unwrap().reason, "NotFound");
    let order: Vec<_> = report
        .workloads
        .iter()
        .map(|reported| reported.name.as_str())
        .collect();
    assert_eq!(order, ["big", "fine", "one", "one-more", "two", "unread"]);
}
