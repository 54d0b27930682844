use std::collections::HashSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn taint(text: &str) -> Taint {
    text.parse().unwrap()
}

fn arm() -> Taint {
    taint("kubernetes.io/arch=arm64:NoSchedule")
}

fn names(mut taken: Vec<Look>) -> Vec<String> {
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    taken.into_iter().map(|look| look.name).collect()
}

/// Takes the only request that is due.
fn take(looks: &mut Looks, now: Instant) -> (Look, Phase, Instant) {
    let (phase, due) = looks.due(now).unwrap();
    let mut taken = looks.take(phase, due.max(now));
    assert_eq!(taken.len(), 1);
    (taken.remove(0), phase, due)
}

#[test]
fn a_node_is_looked_at_before_and_after() {
    let (mut looks, now) = (Looks::default(), Instant::now());
    assert!(!looks.take_permission("1", "n", &arm(), now));
    // Asked again, for example because its labels change.
    assert!(!looks.take_permission("1", "n", &arm(), now + SECOND));
    let (look, phase, due) = take(&mut looks, now);
    assert_eq!((phase, due), (Phase::BeforeTaint, now + phase.quiet()));
    assert_eq!((looks.waiting(), looks.due(due)), (1, None));
    assert!(!looks.take_permission("1", "n", &arm(), due));
    assert!(looks.record(&look, phase, LookResult::Tolerated, due) && looks.waiting() == 0);
    assert!(looks.take_permission("1", "n", &arm(), due));
    // It has its taint.
    for _ in 0..2 {
        looks.look_after_taint("1", "n", &arm(), due);
    }
    let (look, phase, then) = take(&mut looks, due);
    assert_eq!((phase, then), (Phase::AfterTaint, due + phase.quiet()));
    assert!(!looks.record(&look, phase, LookResult::Tolerated, then));
    looks.look_after_taint("1", "n", &arm(), then);
    assert_eq!(looks.due(then).unwrap().1, then + LOOK_AGAIN);
    // Somebody removed the taint.
    assert!(!looks.take_permission("1", "n", &arm(), then));
    assert_eq!(looks.waiting(), 1);
}

#[test]
fn requests_that_come_together_are_served_together() {
    let (mut looks, start) = (Looks::default(), Instant::now());
    let quiet = Phase::BeforeTaint.quiet();
    let mut now = start;
    for n in 0..3 {
        looks.take_permission(&n.to_string(), &n.to_string(), &arm(), now);
        now += quiet / 2;
    }
    let (_, due) = looks.due(now).unwrap();
    assert_eq!(due, start + 2 * quiet);
    assert_eq!(names(looks.take(Phase::BeforeTaint, due)), ["0", "1", "2"]);
    // They never stop coming.
    for n in 0..100 {
        looks.take_permission(&format!("more-{n}"), "more", &arm(), start + n * quiet / 2);
    }
    let (_, due) = looks.due(start + 50 * quiet).unwrap();
    assert_eq!(due, start + Phase::BeforeTaint.patience());
}

#[test]
fn what_did_not_succeed_is_repeated_after_a_pause() {
    let (mut looks, now) = (Looks::default(), Instant::now());
    looks.take_permission("1", "n", &arm(), now);
    for (outcome, failures, pause) in [
        (LookResult::Failed, 1, 1),
        (LookResult::Failed, 2, 2),
        (LookResult::NotListed, 2, 5),
        (LookResult::Failed, 3, 4),
        (LookResult::Settling, 3, 5),
    ] {
        let (look, phase, _) = take(&mut looks, now + 100 * SECOND);
        assert!(!looks.record(&look, phase, outcome, now));
        assert_eq!(looks.due(now).unwrap().1, now + pause * SECOND);
        assert!(looks.take(Phase::BeforeTaint, now).is_empty());
        assert_eq!(looks.0["1"].0.failures, failures);
    }
}

#[test]
fn what_changed_meanwhile_counts() {
    let (mut looks, now) = (Looks::default(), Instant::now());
    let other = taint("example.com/arch=arm64:NoSchedule");
    for (uid, change, left) in [
        (
            "1",
            &mut (|looks: &mut Looks| looks.forget("1")) as &mut dyn FnMut(&mut Looks),
            0,
        ),
        (
            "2",
            &mut |looks: &mut Looks| {
                assert!(!looks.take_permission("2", "n", &other, now));
            },
            1,
        ),
        (
            "3",
            &mut |looks: &mut Looks| looks.removed(&Removed::Relisted(&HashSet::new())),
            0,
        ),
        ("4", &mut Looks::clear, 0),
        (
            "5",
            &mut |looks: &mut Looks| looks.look_after_taint("5", "n", &arm(), now),
            1,
        ),
    ] {
        looks.take_permission(uid, "n", &arm(), now);
        let taken = looks.take(Phase::BeforeTaint, now);
        change(&mut looks);
        for outcome in [LookResult::Tolerated, LookResult::Failed] {
            assert!(
                !looks.record(&taken[0], Phase::BeforeTaint, outcome, now),
                "{uid}"
            );
        }
        assert_eq!(looks.0.len(), left, "{uid}");
        looks.clear();
    }
}
