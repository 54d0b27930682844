use std::collections::HashSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn taint(text: &str) -> Taint {
    text.parse().unwrap()
}

fn arm() -> Taint {
    taint("kubernetes.io/arch=arm64:NoSchedule")
}

fn names(mut taken: Vec<NodeCheck>) -> Vec<String> {
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    taken.into_iter().map(|check| check.name).collect()
}

/// Takes the only request that is due.
fn take(checks: &mut NodeChecks, now: Instant) -> (NodeCheck, Phase, Instant) {
    let (phase, due) = checks.due(now).unwrap();
    let mut taken = checks.take(phase, due.max(now));
    assert_eq!(taken.len(), 1);
    (taken.remove(0), phase, due)
}

#[test]
fn a_node_is_looked_at_before_and_after() {
    let (mut checks, now) = (NodeChecks::default(), Instant::now());
    assert!(!checks.take_permission("1", "n", &arm(), now));
    // The node is reconciled again, for example because its labels changed.
    assert!(!checks.take_permission("1", "n", &arm(), now + SECOND));
    let (check, phase, due) = take(&mut checks, now);
    assert_eq!((phase, due), (Phase::BeforeTaint, now + phase.quiet()));
    assert_eq!((checks.waiting(), checks.due(due)), (1, None));
    assert!(!checks.take_permission("1", "n", &arm(), due));
    assert!(checks.record(&check, phase, CheckResult::Tolerated, due) && checks.waiting() == 0);
    assert!(checks.take_permission("1", "n", &arm(), due));
    // Now the node has its taint.
    for _ in 0..2 {
        checks.recheck("1", "n", &arm(), due);
    }
    let (check, phase, then) = take(&mut checks, due);
    assert_eq!((phase, then), (Phase::AfterTaint, due + phase.quiet()));
    assert!(!checks.record(&check, phase, CheckResult::Tolerated, then));
    checks.recheck("1", "n", &arm(), then);
    assert_eq!(checks.due(then).unwrap().1, then + RECHECK_INTERVAL);
    // Somebody removed the taint.
    assert!(!checks.take_permission("1", "n", &arm(), then));
    assert_eq!(checks.waiting(), 1);
}

#[test]
fn requests_that_come_together_are_served_together() {
    let (mut checks, start) = (NodeChecks::default(), Instant::now());
    let quiet = Phase::BeforeTaint.quiet();
    let mut now = start;
    for n in 0..3 {
        checks.take_permission(&n.to_string(), &n.to_string(), &arm(), now);
        now += quiet / 2;
    }
    let (_, due) = checks.due(now).unwrap();
    assert_eq!(due, start + 2 * quiet);
    assert_eq!(names(checks.take(Phase::BeforeTaint, due)), ["0", "1", "2"]);
    // Requests keep coming: the first of them waits at most for `patience`.
    for n in 0..100 {
        checks.take_permission(&format!("more-{n}"), "more", &arm(), start + n * quiet / 2);
    }
    let (_, due) = checks.due(start + 50 * quiet).unwrap();
    assert_eq!(due, start + Phase::BeforeTaint.patience());
}

#[test]
fn what_did_not_succeed_is_repeated_after_a_pause() {
    let (mut checks, now) = (NodeChecks::default(), Instant::now());
    checks.take_permission("1", "n", &arm(), now);
    for (outcome, failures, pause) in [
        (CheckResult::Failed, 1, 1),
        (CheckResult::Failed, 2, 2),
        (CheckResult::NotListed, 2, 5),
        (CheckResult::Failed, 3, 4),
        (CheckResult::Settling, 3, 5),
    ] {
        let (check, phase, _) = take(&mut checks, now + 100 * SECOND);
        assert!(!checks.record(&check, phase, outcome, now));
        assert_eq!(checks.due(now).unwrap().1, now + pause * SECOND);
        assert!(checks.take(Phase::BeforeTaint, now).is_empty());
        assert_eq!(checks.0["1"].0.failures, failures);
    }
}

#[test]
fn what_changed_meanwhile_counts() {
    let (mut checks, now) = (NodeChecks::default(), Instant::now());
    let other_taint = taint("example.com/arch=arm64:NoSchedule");
    for (uid, change, left) in [
        (
            "1",
            &mut (|checks: &mut NodeChecks| checks.forget("1")) as &mut dyn FnMut(&mut NodeChecks),
            0,
        ),
        (
            "2",
            &mut |checks: &mut NodeChecks| {
                assert!(!checks.take_permission("2", "n", &other_taint, now));
            },
            1,
        ),
        (
            "3",
            &mut |checks: &mut NodeChecks| checks.removed(&Removed::Relisted(&HashSet::new())),
            0,
        ),
        ("4", &mut NodeChecks::clear, 0),
        (
            "5",
            &mut |checks: &mut NodeChecks| checks.recheck("5", "n", &arm(), now),
            1,
        ),
    ] {
        checks.take_permission(uid, "n", &arm(), now);
        let taken = checks.take(Phase::BeforeTaint, now);
        change(&mut checks);
        for outcome in [CheckResult::Tolerated, CheckResult::Failed] {
            assert!(
                !checks.record(&taken[0], Phase::BeforeTaint, outcome, now),
                "{uid}"
            );
        }
        assert_eq!(checks.0.len(), left, "{uid}");
        checks.clear();
    }
}
