//! Faults of archaware's own credentials for the API server.

use super::*;

/// The kubelet replaces a token long before it expires, so the file is read again.
#[tokio::test]
async fn token_rotated() {
    let cluster = TestCluster::take().await;
    // Two tokens that become invalid with their Secrets.
    let token = |name: &str| {
        cluster.kubectl(&[
            "-n",
            "archaware",
            "delete",
            "secret",
            name,
            "--ignore-not-found",
        ]);
        cluster.kubectl(&["-n", "archaware", "create", "secret", "generic", name]);
        let bound = [
            "--bound-object-kind=Secret",
            &format!("--bound-object-name={name}"),
        ];
        cluster.kubectl(
            &[
                &["-n", "archaware", "create", "token", "archaware"],
                &bound[..],
            ]
            .concat(),
        )
    };
    let (first, second) = (token("token-one"), token("token-two"));
    let file = cluster.dir().join("token");
    std::fs::write(&file, first.trim()).unwrap();
    let kubeconfig = std::fs::read_to_string(cluster.service_account("archaware")).unwrap();
    let path = cluster.dir().join("kubeconfig/rotated");
    let (head, rest) = kubeconfig.split_once("user: {token: ").unwrap();
    let (_, tail) = rest.split_once('}').unwrap();
    let text = format!("{head}user: {{tokenFile: {}}}{tail}", file.display());
    std::fs::write(&path, text).unwrap();
    let scene = Scene::set(cluster, |_| Controller::start_as(&path, "")).await;
    std::fs::write(&file, second.trim()).unwrap();
    let cluster = &scene.cluster;
    cluster.kubectl(&["-n", "archaware", "delete", "secret", "token-one"]);
    // The API server rejects the first token once its cache expires; archaware reads the file again
    // within a minute.
    let refused = "archaware_api_requests_total{verb=\"get\",result=\"4xx\"}";
    let file_again = std::time::Duration::from_secs(90);
    eventually("a request that is refused", file_again, || async {
        (scene.archaware.metric(refused).await > 0.5).then_some(())
    })
    .await;
    cluster.create_pod("meanwhile", &["arm64"]).await;
    let bound = async || cluster.pods().get("meanwhile").await.ok()?.spec?.node_name;
    assert_eq!(eventually("a bound pod", file_again, bound).await, "arm64");
    scene.ends_well().await;
}
