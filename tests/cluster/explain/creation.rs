//! Pods that Kubernetes does not create.

use super::*;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::ResourceQuota};

#[tokio::test]
async fn the_message_of_the_controller_is_told() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    let image = cluster.image("amd64");
    let mut without_class = workload("no-class", spec(&image, "1"));
    without_class["spec"]["template"]["spec"]["priorityClassName"] = json!("none-such");
    without_class["spec"]["serviceName"].take();
    cluster.create::<Deployment>(without_class).await;
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "500m"}}});
    cluster.create::<ResourceQuota>(quota).await;
    eventually("a quota that is known", DEADLINE, || async {
        let quota = cluster.kubectl(&[
            "-n",
            &cluster.namespace,
            "get",
            "quota",
            "small",
            "-o",
            "json",
        ]);
        quota.contains("\"used\"").then_some(())
    })
    .await;
    // Its controller says it by an event only.
    let set = workload("too-much", spec(&image, "1"));
    cluster.create::<StatefulSet>(set).await;
    for (object, says, advice) in [
        (
            "deploy/no-class",
            "no PriorityClass with name none-such",
            "Create the PriorityClass",
        ),
        ("sts/too-much", "exceeded quota: small", "ResourceQuota"),
    ] {
        wait_for_conclusion(&cluster, object, says).await;
        let found = explained(&cluster, &[object]);
        let conclusion = found["conclusion"].as_str().unwrap();
        assert!(
            conclusion.starts_with("Kubernetes cannot create its pods: "),
            "{conclusion}"
        );
        assert!(
            found["advice"][0].as_str().unwrap().contains(advice),
            "{found}"
        );
    }
}
