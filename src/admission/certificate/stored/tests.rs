use super::*;
use crate::admission::certificate::issue::issue;

const HOUR: Duration = Duration::from_hours(1);

fn made(names: &[String], at: SystemTime) -> StoredCertificates {
    let made = issue(names, at, 3 * HOUR).unwrap();
    StoredCertificates {
        authorities: ca_bundle::with_authority(&made.authority, ""),
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
    let run = |stored: &StoredCertificates, at, names: &[String], settled| {
        renewal_step(stored, at, 3 * HOUR, names, settled)
    };
    assert_eq!(
        run(&stored, now + HOUR, &names, false),
        RenewalStep::Nothing
    );
    assert_eq!(
        run(&stored, now + 2 * HOUR + HOUR / 2, &names, false),
        RenewalStep::Prepare
    );
    assert_eq!(
        run(&stored, now, &["other.svc".to_owned()], true),
        RenewalStep::Prepare
    );
    assert_eq!(
        renewal_step(&stored, now, HOUR, &names, true),
        RenewalStep::Prepare,
        "a shorter lifetime"
    );
    stored.next = Some(stored.current.clone());
    assert_eq!(
        run(&stored, now + 4 * HOUR, &names, false),
        RenewalStep::Nothing
    );
    assert_eq!(run(&stored, now, &names, true), RenewalStep::Promote);
    let expired = made(&names, now - 5 * HOUR);
    assert!(!expired.is_usable());
    stored.next = None;
    stored
        .authorities
        .push_str(&issue(&names, now - 5 * HOUR, HOUR).unwrap().authority);
    assert_eq!(run(&stored, now, &names, true), RenewalStep::Prune);
}

#[test]
fn the_secret_holds_it_and_shows_no_key() {
    let stored = made(&["a.svc".to_owned()], SystemTime::now());
    assert_eq!(
        StoredCertificates::parse(&stored.to_secret()),
        Some(stored.clone())
    );
    assert!(!format!("{stored:?}").contains("PRIVATE"), "{stored:?}");
    assert_eq!(StoredCertificates::parse(&Secret::default()), None);
    let mut with_other_key = stored.clone();
    with_other_key.current.key = made(&["a.svc".to_owned()], SystemTime::now()).current.key;
    assert!(!with_other_key.is_usable(), "a key of another certificate");
    let mut with_other_authority = stored.clone();
    with_other_authority.authorities =
        made(&["a.svc".to_owned()], SystemTime::now() - HOUR).authorities;
    assert!(
        !with_other_authority.is_usable(),
        "an authority of another certificate"
    );
}
