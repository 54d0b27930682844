//! Which credential is sent where, and who may use an answer.

use archaware::image::{
    Reason,
    credentials::{Credential, Keyring},
};
use testimg::Auth;

use super::*;

pub(crate) fn keyring(registry: &str, user: &str, password: &str) -> Keyring {
    let credential = Credential::password(user.to_owned(), password.to_owned().into());
    Keyring::new([(registry.to_owned(), credential)])
}

#[tokio::test]
async fn basic_credentials_are_sent_after_a_challenge() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let image = registry.image("app");
    let right = keyring(&registry.address(), "user", "secret");
    let wrong = keyring(&registry.address(), "user", "guess");
    assert_eq!(
        resolve(&resolver, &image).await.unwrap_err().reason(),
        Reason::Denied
    );
    let denied = resolve_as(&resolver, &image, &wrong).await.unwrap_err();
    assert_eq!(denied.reason(), Reason::Denied);
    assert!(!format!("{denied:?} {}", denied.chain()).contains("guess"));
    assert!(resolve_as(&resolver, &image, &right).await.is_ok());
    let first = registry.seen().into_iter().next().unwrap();
    assert_eq!(first.authorization, None, "nothing is shown unasked");
}

#[tokio::test]
async fn a_tag_that_took_a_credential_is_known_to_its_holder_only() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let image = registry.image("app");
    let right = keyring(&registry.address(), "user", "secret");
    let other = keyring(&registry.address(), "other", "secret");
    assert!(resolve_as(&resolver, &image, &right).await.is_ok());
    for keyring in [&Keyring::default(), &other] {
        let denied = resolve_as(&resolver, &image, keyring).await.unwrap_err();
        assert_eq!(denied.reason(), Reason::Denied);
    }
    registry.forget();
    assert!(resolve_as(&resolver, &image, &right).await.is_ok());
    assert!(
        registry.seen().is_empty(),
        "the holder is answered from memory"
    );
}

#[tokio::test]
async fn bearer_tokens_are_fetched_once_and_renewed() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
    let image = registry.image("app");
    let keyring = keyring(&registry.address(), "user", "secret");
    let many = (0..64).map(|_| resolve_as(&resolver, &image, &keyring));
    assert!(
        futures::future::join_all(many)
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(registry.count("GET", "/token"), 1);
    // An invalidated token is replaced once.
    registry.revoke_tokens();
    registry.add_tag("app", "new", &testimg::find("arm64"));
    assert!(
        resolve_as(&resolver, &format!("{image}:new"), &keyring)
            .await
            .is_ok()
    );
    assert_eq!(registry.count("GET", "/token"), 2);
}

/// A rollout of a repository with many tags: the lookups get challenges concurrently and share one
/// token.
#[tokio::test]
async fn many_tags_of_a_repository_share_one_token() {
    let (registry, resolver) = (registry().await, resolver());
    let tags: Vec<String> = (0..40).map(|n| format!("v{n}")).collect();
    for (number, tag) in tags.iter().enumerate() {
        registry.add_tag("app", tag, &testimg::numbered(number));
    }
    registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
    registry.script(
        "/v2/",
        testimg::Script::Slow(std::time::Duration::from_millis(5)),
    );
    let keyring = keyring(&registry.address(), "user", "secret");
    let image = |tag: &String| format!("{}:{tag}", registry.image("app"));
    let images: Vec<String> = tags.iter().map(image).collect();
    let all = images
        .iter()
        .map(|image| resolve_as(&resolver, image, &keyring));
    assert!(
        futures::future::join_all(all)
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(registry.count("GET", "/token"), 1);
    // An invalidated token is removed only if it was not replaced meanwhile.
    registry.revoke_tokens();
    for (number, tag) in tags.iter().enumerate() {
        registry.add_tag("app", tag, &testimg::numbered(100 + number));
    }
    let again: Vec<String> = (0..40)
        .map(|n| {
            format!(
                "{}@{}",
                registry.image("app"),
                testimg::numbered(100 + n).root.digest
            )
        })
        .collect();
    let all = again
        .iter()
        .map(|image| resolve_as(&resolver, image, &keyring));
    assert!(
        futures::future::join_all(all)
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(registry.count("GET", "/token"), 2);
}

#[tokio::test]
async fn anonymous_tokens_are_shared() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(None));
    let image = registry.image("app");
    assert!(resolve(&resolver, &image).await.is_ok());
    registry.forget();
    let keyring = keyring(&registry.address(), "user", "secret");
    assert!(resolve_as(&resolver, &image, &keyring).await.is_ok());
    assert!(registry.seen().is_empty());
}

#[tokio::test]
async fn wrong_credentials_do_not_get_a_token() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(Some(("user".into(), "secret".into()))));
    let wrong = keyring(&registry.address(), "user", "guess");
    let denied = resolve_as(&resolver, &registry.image("app"), &wrong)
        .await
        .unwrap_err();
    assert_eq!(denied.reason(), Reason::Denied);
}

#[tokio::test]
async fn the_next_credential_is_tried_when_one_is_refused() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("team/app", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let credential = |user: &str| Credential::password(user.to_owned(), "secret".into());
    let keyring = Keyring::new([
        (registry.address(), credential("user")),
        (
            format!("{}/team", registry.address()),
            credential("stranger"),
        ),
    ]);
    assert!(
        resolve_as(&resolver, &registry.image("team/app"), &keyring)
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_token_endpoint_that_limits_its_rate_is_left_alone() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(None));
    let header = ("retry-after".to_owned(), "600".to_owned());
    registry.script("/token", testimg::Script::Status(429, vec![header]));
    for _ in 0..3 {
        let error = resolve(&resolver, &registry.image("app"))
            .await
            .unwrap_err();
        assert_eq!(error.reason(), Reason::RateLimited);
        assert!(error.retry_after().unwrap() > std::time::Duration::from_secs(500));
    }
    assert_eq!(registry.count("GET", "/token"), 1);
}

#[tokio::test]
async fn an_identity_token_is_exchanged() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(None));
    let credential = Credential::identity_token("refresh-me".to_owned().into());
    let keyring = Keyring::new([(registry.address(), credential)]);
    assert!(
        resolve_as(&resolver, &registry.image("app"), &keyring)
            .await
            .is_ok()
    );
    assert_eq!(registry.count("POST", "/token"), 1);
    assert!(
        registry
            .seen()
            .iter()
            .all(|seen| !seen.path.contains("refresh-me"))
    );
}
