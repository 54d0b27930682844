use super::*;
use crate::admission::certificate::issue::issue;

const HOUR: Duration = Duration::from_hours(1);

fn made(names: &[String], at: SystemTime) -> Stored {
    let made = issue(names, at, 3 * HOUR).unwrap();
    Stored {
        authorities: ca_bundle::with(&made.authority, ""),
        current: made.pair,
        next: None,
    }
}

#[test]
fn a_certificate_is_replaced_in_two_steps() {
    let names = ["archaware.ns.svc".to_owned(), "127.0.0.1".to_owned()];
    let now = SystemTime::now();
    let mut stored = made(&names, now);
    assert!(stored.is_usable());
    let run =
        |stored: &Stored, at, names: &[String], settled| step(stored, at, 3 * HOUR, names, settled);
    assert_eq!(run(&stored, now + HOUR, &names, false), Step::Nothing);
    assert_eq!(
        run(&stored, now + 2 * HOUR + HOUR / 2, &names, false),
        Step::Prepare
    );
    assert_eq!(
        run(&stored, now, &["other.svc".to_owned()], true),
        Step::Prepare
    );
    assert_eq!(
        step(&stored, now, HOUR, &names, true),
        Step::Prepare,
        "a shorter lifetime"
    );
    stored.next = Some(stored.current.clone());
    assert_eq!(run(&stored, now + 4 * HOUR, &names, false), Step::Nothing);
    assert_eq!(run(&stored, now, &names, true), Step::Promote);
    let expired = made(&names, now - 5 * HOUR);
    assert!(!expired.is_usable());
    stored.next = None;
    stored
        .authorities
        .push_str(&issue(&names, now - 5 * HOUR, HOUR).unwrap().authority);
    assert_eq!(run(&stored, now, &names, true), Step::Prune);
}

#[test]
fn the_secret_holds_it_and_shows_no_key() {
    let stored = made(&["a.svc".to_owned()], SystemTime::now());
    assert_eq!(Stored::parse(&stored.to_secret()), Some(stored.clone()));
    assert!(!format!("{stored:?}").contains("PRIVATE"), "{stored:?}");
    assert_eq!(Stored::parse(&Secret::default()), None);
    let mut other = stored.clone();
    other.current.key = made(&["a.svc".to_owned()], SystemTime::now()).current.key;
    assert!(!other.is_usable(), "a key of another certificate");
    let mut other = stored.clone();
    other.authorities = made(&["a.svc".to_owned()], SystemTime::now() - HOUR).authorities;
    assert!(!other.is_usable(), "an authority of another certificate");
}
