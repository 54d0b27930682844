//! Rate limits of registries are obeyed, per account, with and without `Retry-After`.

use std::time::{Duration, SystemTime};

use archaware::image::{ImageError, Reason};
use testimg::{Auth, Script};

use super::*;

fn limited(status: u16, retry_after: &str) -> Script {
    Script::Status(
        status,
        vec![("retry-after".to_owned(), retry_after.to_owned())],
    )
}

async fn ask(resolver: &Resolver, registry: &FakeRegistry, name: &str) -> ImageError {
    resolve(resolver, &registry.image(name)).await.unwrap_err()
}

#[tokio::test]
async fn seconds_and_dates_close_the_gate_without_further_requests() {
    let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_mins(10));
    for (status, retry_after, reason) in [
        (429, "600", Reason::RateLimited),
        (429, date.as_str(), Reason::RateLimited),
        (503, "600", Reason::Unavailable),
        (503, date.as_str(), Reason::Unavailable),
    ] {
        let (registry, resolver) = (registry().await, resolver());
        registry.script("/v2/", limited(status, retry_after));
        for name in ["a", "b", "c", "a"] {
            let error = ask(&resolver, &registry, name).await;
            assert_eq!(error.reason(), reason, "{}", error.chain());
            let wait = error.retry_after().unwrap();
            assert!(
                wait > Duration::from_secs(500) && wait <= Duration::from_mins(10),
                "{wait:?}"
            );
        }
        assert_eq!(registry.seen().len(), 1, "{status} {retry_after}");
        assert_eq!(resolver.paused_hosts(), 1);
    }
}

#[tokio::test]
async fn a_limit_for_one_account_is_none_for_another() {
    let (registry, resolver) = (registry().await, resolver());
    for name in ["free", "busy"] {
        registry.add(name, &testimg::find("multi"));
    }
    registry.require(Auth::Basic("user".into(), "secret".into()));
    registry.script("/busy/", limited(429, "600"));
    let right = credentials::keyring(&registry.address(), "user", "secret");
    assert_eq!(
        ask(&resolver, &registry, "busy").await.reason(),
        Reason::RateLimited
    );
    // Anonymous requests are paused for every repository; the account's are not.
    assert_eq!(
        ask(&resolver, &registry, "free").await.reason(),
        Reason::RateLimited
    );
    assert!(
        resolve_as(&resolver, &registry.image("free"), &right)
            .await
            .is_ok()
    );
    // A limited account is skipped, and the next one is tried.
    let busy = resolve_as(&resolver, &registry.image("busy"), &right)
        .await
        .unwrap_err();
    assert_eq!(busy.reason(), Reason::RateLimited);
    let before = registry.seen().len();
    let again = resolve_as(
        &resolver,
        &format!("{}:other", registry.image("free")),
        &right,
    )
    .await
    .unwrap_err();
    assert_eq!(
        (again.reason(), registry.seen().len()),
        (Reason::RateLimited, before)
    );
    let both = Keyring::new([
        (
            registry.address(),
            Credential::password("user".into(), "secret".to_owned().into()),
        ),
        (
            registry.address(),
            Credential::password("user".into(), "guess".to_owned().into()),
        ),
    ]);
    registry.unscript();
    let denied = resolve_as(&resolver, &registry.image("busy"), &both)
        .await
        .unwrap_err();
    // A rate limit is transient and therefore reported; the second account was tried all the same.
    assert_eq!(denied.reason(), Reason::RateLimited, "{}", denied.chain());
    let shown: Vec<_> = registry
        .seen()
        .into_iter()
        .filter_map(|seen| seen.authorization)
        .collect();
    assert!(
        shown
            .iter()
            .any(|header| header.ends_with("dXNlcjpndWVzcw==")),
        "{shown:?}"
    );
}

#[tokio::test]
async fn server_errors_are_tried_again_a_little_later_and_not_for_ever() {
    let (registry, resolver) = (registry().await, resolver());
    registry.script("/v2/", Script::Status(502, Vec::new()));
    let started = std::time::Instant::now();
    assert_eq!(
        ask(&resolver, &registry, "app").await.reason(),
        Reason::Unavailable
    );
    assert_eq!(registry.seen().len(), 3);
    assert!(
        started.elapsed() > Duration::from_millis(150),
        "with pauses between them"
    );
    // The failure is cached: a second request causes none.
    assert_eq!(
        ask(&resolver, &registry, "app").await.reason(),
        Reason::Unavailable
    );
    assert_eq!(registry.seen().len(), 3);
}

#[tokio::test]
async fn what_a_registry_says_of_its_limit_is_shown() {
    let (registry, resolver) = (registry().await, resolver());
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let headers = vec![
        header("ratelimit-limit", "100;w=21600"),
        header("ratelimit-remaining", "37;w=21600"),
    ];
    registry.script("/v2/", Script::Status(404, headers));
    ask(&resolver, &registry, "app").await;
    let quotas = resolver.quotas();
    assert_eq!(quotas.len(), 1);
    assert_eq!(
        (
            quotas[0].0.clone(),
            quotas[0].1.limit,
            quotas[0].1.remaining
        ),
        (registry.address(), Some(100), 37)
    );
}
