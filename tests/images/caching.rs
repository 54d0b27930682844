//! Few requests: concurrent requests share one lookup, later ones use the cache.

use std::time::Duration;

use archaware::image::{Reason, ResolutionSource};
use testimg::Script;

use super::*;

#[tokio::test]
async fn an_index_costs_one_head_and_one_get_and_a_manifest_one_more() {
    let (registry, resolver) = (registry().await, resolver());
    for (name, gets) in [("multi", 1), ("docker-list", 1), ("amd64", 2)] {
        registry.add(name, &testimg::find(name));
        registry.forget();
        let first = resolve(&resolver, &registry.image(name)).await.unwrap();
        assert_eq!(first.source, ResolutionSource::Registry);
        assert_eq!(
            (registry.count("HEAD", ""), registry.count("GET", "")),
            (1, gets),
            "{name}"
        );
        let again = resolve(&resolver, &registry.image(name)).await.unwrap();
        assert_eq!(again.source, ResolutionSource::Memory);
        assert_eq!(registry.seen().len(), 1 + gets, "{name}");
    }
}

#[tokio::test]
async fn sixty_four_at_once_cost_the_same_as_one() {
    let (registry, resolver) = (registry().await, resolver());
    registry.add("app", &testimg::find("multi"));
    registry.script("/v2/", Script::Slow(Duration::from_millis(20)));
    let image = registry.image("app");
    let answers = futures::future::join_all((0..64).map(|_| resolve(&resolver, &image))).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(
        (registry.count("HEAD", ""), registry.count("GET", "")),
        (1, 1)
    );
}

#[tokio::test]
async fn tags_of_one_digest_share_its_document() {
    let (registry, resolver) = (registry().await, resolver());
    for tag in ["a", "b", "c"] {
        registry.add_tag("app", tag, &testimg::find("multi"));
        resolve(&resolver, &format!("{}:{tag}", registry.image("app")))
            .await
            .unwrap();
    }
    assert_eq!(
        (registry.count("HEAD", ""), registry.count("GET", "")),
        (3, 1)
    );
}

#[tokio::test]
async fn a_tag_that_moved_is_seen_after_its_time_and_an_old_one_serves_when_the_registry_is_down() {
    let registry = registry().await;
    let mut settings = settings();
    settings.tag_ttl = Duration::from_millis(1);
    settings.latest_ttl = Duration::from_millis(1);
    let resolver = resolver_with(settings);
    registry.add("app", &testimg::find("amd64"));
    let image = registry.image("app");
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()),
        ["linux/amd64"]
    );
    registry.add("app", &testimg::find("arm64"));
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()),
        ["linux/arm64"]
    );
    registry.script("/", Script::Status(503, Vec::new()));
    let stale = resolve(&resolver, &image).await.unwrap();
    assert_eq!(platforms(&stale), ["linux/arm64"], "stale if error");
    registry.unscript();
    registry.script("/", Script::Status(404, Vec::new()));
    // The failure is cached for a second, then the request succeeds.
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        match resolve(&resolver, &image).await {
            Err(error) => {
                assert_eq!(error.reason(), Reason::NotFound);
                // The same from the cache.
                let again = resolve(&resolver, &image).await.unwrap_err();
                break assert_eq!(again.reason(), Reason::NotFound);
            }
            Ok(_) => assert!(
                std::time::Instant::now() < deadline,
                "an image that is gone is still served"
            ),
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn failures_are_remembered_for_a_while() {
    let (registry, resolver) = (registry().await, resolver());
    for _ in 0..10 {
        let error = resolve(&resolver, &registry.image("nothing"))
            .await
            .unwrap_err();
        assert_eq!(error.reason(), Reason::NotFound);
    }
    assert_eq!(registry.seen().len(), 1);
}

#[tokio::test]
async fn pull_policy_always_and_latest_are_looked_up_sooner() {
    let registry = registry().await;
    let mut settings = settings();
    settings.latest_ttl = Duration::from_millis(1);
    let resolver = resolver_with(settings);
    let keyring = ready_keyring(Keyring::default());
    registry.add_tag("app", "v1", &testimg::find("amd64"));
    let (image, latest) = (
        format!("{}:v1", registry.image("app")),
        registry.image("app"),
    );
    registry.add("app", &testimg::find("amd64"));
    let ask = |image: &str, policy| {
        let (resolver, keyring, image) = (&resolver, &keyring, image.to_owned());
        async move {
            let request = ResolveRequest {
                image: &image,
                policy,
                keyring,
                tenant: "",
            };
            platforms(&resolver.resolve(request).await.unwrap())
        }
    };
    assert_eq!(ask(&image, PullPolicy::IfNotPresent).await, ["linux/amd64"]);
    assert_eq!(
        ask(&latest, PullPolicy::IfNotPresent).await,
        ["linux/amd64"]
    );
    registry.add_tag("app", "v1", &testimg::find("arm64"));
    registry.add("app", &testimg::find("arm64"));
    assert_eq!(
        ask(&image, PullPolicy::IfNotPresent).await,
        ["linux/amd64"],
        "within its time"
    );
    assert_eq!(ask(&image, PullPolicy::Always).await, ["linux/arm64"]);
    assert_eq!(
        ask(&latest, PullPolicy::IfNotPresent).await,
        ["linux/arm64"]
    );
}
