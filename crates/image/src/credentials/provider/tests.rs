use std::{fs, process::Command, time::Instant};

use secrecy::ExposeSecret;
use tempfile::TempDir;

use super::{
    super::{CredentialSecret, command::ANSWER_TIMEOUT},
    *,
};

const V1: &str = "credentialprovider.kubelet.k8s.io/v1";

/// A folder with a configuration and plugins that record how often they ran.
struct Node(TempDir);

impl Node {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn plugin(&self, name: &str, script: &str) {
        let path = self.0.path().join(name);
        let runs = self.0.path().join(format!("{name}.runs"));
        let text = format!(
            "#!/bin/sh\ncat > {0}/{name}.stdin\necho x >> {1}\n{script}\n",
            self.0.path().display(),
            runs.display()
        );
        // A process that another test starts meanwhile could inherit the file open for writing, and
        // the kernel refuses to execute such a file (ETXTBSY). So `install` writes the plugin.
        let written = self.0.path().join(format!("{name}.text"));
        fs::write(&written, text).unwrap();
        let install = Command::new("install")
            .args(["--mode", "755"])
            .args([&written, &path])
            .status();
        assert!(install.unwrap().success());
    }

    fn runs(&self, name: &str) -> usize {
        let text = fs::read_to_string(self.0.path().join(format!("{name}.runs")));
        text.map_or(0, |text| text.lines().count())
    }

    fn load(&self, config: &str) -> Result<Providers, ProviderError> {
        let file = self.0.path().join("config.yaml");
        fs::write(&file, config).unwrap();
        Providers::load(&file, self.0.path())
    }
}

fn config(providers: &str) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n{providers}"
    )
}

fn provider(name: &str, images: &str) -> String {
    format!(
        "- {{name: {name}, matchImages: {images}, defaultCacheDuration: 1h, apiVersion: {V1}}}\n"
    )
}

fn answer(cache: &str, more: &str, auth: &str) -> String {
    format!(
        "echo '{{\"apiVersion\": \"{V1}\", \"kind\": \"CredentialProviderResponse\", \"cacheKeyType\": \"{cache}\"{more}, \"auth\": {auth}}}'"
    )
}

async fn users(providers: &Providers, image: &str) -> Vec<String> {
    let name = |credential: &Credential| match credential.secret() {
        CredentialSecret::Password { username, password } => {
            format!("{username}:{}", password.expose_secret())
        }
        CredentialSecret::IdentityToken(_) => "token".to_owned(),
        CredentialSecret::Anonymous => "anonymous".to_owned(),
    };
    providers
        .lookup(&Reference::parse(image).unwrap())
        .await
        .iter()
        .map(name)
        .collect()
}

#[tokio::test]
async fn the_protocol_is_the_kubelet_s() {
    let node = Node::new();
    let auth = r#"{"*.reg.io": {"username": "u", "password": "p"}, "a.reg.io/team": {"username": "'$1-$WHO'", "password": "q"}}"#;
    node.plugin(
        "plug",
        &answer("Registry", ", \"cacheDuration\": \"6h\"", auth),
    );
    let config = config(&format!(
        "- {{name: plug, matchImages: ['*.reg.io'], defaultCacheDuration: 0s, apiVersion: {V1}, args: [first], env: [{{name: WHO, value: me}}]}}\n"
    ));
    let providers = node.load(&config).unwrap();
    assert_eq!(
        users(&providers, "a.reg.io/team/app:v1").await,
        ["first-me:q", "u:p"]
    );
    let request: serde_json::Value =
        serde_json::from_slice(&fs::read(node.0.path().join("plug.stdin")).unwrap()).unwrap();
    let expected = serde_json::json!({"apiVersion": V1, "kind": "CredentialProviderRequest", "image": "a.reg.io/team/app"});
    assert_eq!(request, expected);
    // Cached for the registry. Another registry causes another run. A registry that does not match
    // causes none.
    assert_eq!(users(&providers, "a.reg.io/other").await, ["u:p"]);
    assert_eq!(node.runs("plug"), 1);
    assert_eq!(users(&providers, "b.reg.io/x").await, ["u:p"]);
    assert_eq!(node.runs("plug"), 2);
    assert!(users(&providers, "reg.io/x").await.is_empty());
    assert_eq!(node.runs("plug"), 2);
}

#[tokio::test]
async fn answers_are_kept_as_the_plugin_says() {
    for (cache, more, images, runs) in [
        ("Image", "", ["r.io/a", "r.io/a", "r.io/b"], 2),
        ("Registry", "", ["r.io/a", "r.io/b", "s.io/a"], 2),
        ("Global", "", ["r.io/a", "s.io/b", "t.io/c"], 1),
        (
            "Global",
            ", \"cacheDuration\": \"0s\"",
            ["r.io/a", "r.io/a", "r.io/a"],
            3,
        ),
        (
            "Image",
            ", \"cacheDuration\": null",
            ["r.io/a", "r.io/a", "r.io/a"],
            1,
        ),
    ] {
        let node = Node::new();
        node.plugin(
            "plug",
            &answer(
                cache,
                more,
                "{\"*.io\": {\"username\": \"u\", \"password\": \"p\"}}",
            ),
        );
        let providers = node.load(&config(&provider("plug", "['*.io']"))).unwrap();
        for image in images {
            assert_eq!(users(&providers, image).await, ["u:p"]);
        }
        assert_eq!(node.runs("plug"), runs, "{cache} {more}");
    }
}

#[tokio::test]
async fn concurrent_requests_share_one_run_and_plugins_run_in_order() {
    let node = Node::new();
    let auth = |user: &str| {
        answer(
            "Image",
            "",
            &format!("{{\"r.io\": {{\"username\": \"{user}\", \"password\": \"p\"}}}}"),
        )
    };
    node.plugin("slow", &format!("sleep 0.2\n{}", auth("slow")));
    node.plugin("quick", &auth("quick"));
    let two = format!(
        "{}{}",
        provider("slow", "[r.io]"),
        provider("quick", "[r.io]")
    );
    let providers = node.load(&config(&two)).unwrap();
    let many = (0..50).map(|_| users(&providers, "r.io/a"));
    for found in futures::future::join_all(many).await {
        assert_eq!(found, ["slow:p", "quick:p"]);
    }
    assert_eq!((node.runs("slow"), node.runs("quick")), (1, 1));
}

/// A cold start of a cluster: no answer has shown yet what the plugin's answers apply to.
#[tokio::test]
async fn a_thousand_images_of_a_registry_cost_one_run() {
    for (applies_to, runs) in [("Registry", 2), ("Global", 1), ("Image", 20)] {
        let node = Node::new();
        let auth = answer(
            applies_to,
            "",
            "{\"*.io\": {\"username\": \"u\", \"password\": \"p\"}}",
        );
        node.plugin("plug", &format!("sleep 0.1\n{auth}"));
        let providers = node.load(&config(&provider("plug", "['*.io']"))).unwrap();
        let images: Vec<String> = (0..1000)
            .map(|n| match applies_to {
                "Image" => format!("r.io/{}", n % 20),
                _ => format!("{}.io/{n}", if n % 2 == 0 { "r" } else { "s" }),
            })
            .collect();
        let all = images.iter().map(|image| users(&providers, image));
        for found in futures::future::join_all(all).await {
            assert_eq!(found, ["u:p"]);
        }
        assert_eq!(node.runs("plug"), runs, "{applies_to}");
    }
}

#[tokio::test]
async fn a_failure_hides_no_broader_answer() {
    let node = Node::new();
    let auth = answer(
        "Global",
        "",
        "{\"r.io\": {\"username\": \"u\", \"password\": \"p\"}}",
    );
    // Fails for the image `bad`; for another image it returns an answer for all images.
    node.plugin(
        "plug",
        &format!("grep -q /bad \"$0.stdin\" && exit 1\n{auth}"),
    );
    let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
    assert!(users(&providers, "r.io/bad").await.is_empty());
    assert_eq!(users(&providers, "r.io/good").await, ["u:p"]);
    assert_eq!(users(&providers, "r.io/bad").await, ["u:p"]);
    assert_eq!(node.runs("plug"), 2);
}

/// Eight images, each with its own run of three seconds, four runs at once. The last four images
/// wait three seconds for a slot: wait and run together are longer than [`ANSWER_TIMEOUT`].
#[tokio::test]
async fn time_in_the_line_does_not_count() {
    let node = Node::new();
    let auth = answer(
        "Image",
        "",
        "{\"r.io\": {\"username\": \"u\", \"password\": \"p\"}}",
    );
    node.plugin("plug", &auth);
    let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
    // This answer shows that each answer of the plugin applies to one image.
    users(&providers, "r.io/first").await;
    node.plugin("plug", &format!("sleep 3\n{auth}"));
    let images: Vec<String> = (0..8).map(|n| format!("r.io/{n}")).collect();
    let all = images.iter().map(|image| users(&providers, image));
    for found in futures::future::join_all(all).await {
        assert_eq!(found, ["u:p"]);
    }
    assert_eq!(node.runs("plug"), 9);
}

/// All images wait for the first run, because only its answer shows the `cacheKeyType`. If that run
/// hangs, the other images must still get credentials.
#[tokio::test]
async fn a_run_that_hangs_for_one_image_leaves_the_others_their_credentials() {
    let node = Node::new();
    let auth = answer(
        "Registry",
        "",
        "{\"*.io\": {\"username\": \"u\", \"password\": \"p\"}}",
    );
    node.plugin(
        "plug",
        &format!("grep -q hangs \"$0.stdin\" && exec sleep 600\n{auth}"),
    );
    let providers = node.load(&config(&provider("plug", "['*.io']"))).unwrap();
    let hanging = users(&providers, "hangs.io/x");
    let other = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        users(&providers, "r.io/x").await
    };
    let (hanging, other) = tokio::join!(hanging, other);
    assert!(hanging.is_empty());
    assert_eq!(other, ["u:p"]);
    // Later images do not wait for the run that hangs.
    let started = Instant::now();
    assert_eq!(users(&providers, "s.io/x").await, ["u:p"]);
    assert!(
        started.elapsed() < ANSWER_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
}

/// A caller whose future is dropped while it waits for a slot starts no run.
#[tokio::test]
async fn runs_that_nobody_waits_for_are_not_begun() {
    let node = Node::new();
    let auth = answer(
        "Image",
        "",
        "{\"r.io\": {\"username\": \"u\", \"password\": \"p\"}}",
    );
    node.plugin("plug", &auth);
    let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
    users(&providers, "r.io/first").await;
    node.plugin("plug", &format!("sleep 1\n{auth}"));
    let images: Vec<String> = (0..40).map(|n| format!("r.io/{n}")).collect();
    let all = futures::future::join_all(images.iter().map(|image| users(&providers, image)));
    assert!(
        tokio::time::timeout(Duration::from_millis(500), all)
            .await
            .is_err()
    );
    assert_eq!(users(&providers, "r.io/last").await, ["u:p"]);
    assert!(node.runs("plug") <= 1 + 4 + 1, "{}", node.runs("plug"));
}

#[tokio::test]
async fn what_a_plugin_does_wrong_gives_no_credential_and_is_not_repeated_at_once() {
    let good = "{\"r.io\": {\"username\": \"hunter2\", \"password\": \"p\"}}";
    for script in [
        "exit 1".to_owned(),
        "echo hunter2".to_owned(),
        "head -c 2000000 /dev/zero".to_owned(),
        answer("Sometimes", "", good),
        answer("Image", ", \"cacheDuration\": \"soon\"", good),
        answer("Image", "", good).replace("CredentialProviderResponse", "Other"),
        answer("Image", "", good).replace("/v1", "/v1beta1"),
    ] {
        let node = Node::new();
        node.plugin("plug", &script);
        let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
        assert!(users(&providers, "r.io/a").await.is_empty(), "{script}");
        assert!(users(&providers, "r.io/a").await.is_empty(), "{script}");
        assert_eq!(node.runs("plug"), 1, "{script}");
    }
    let node = Node::new();
    let providers = node.load(&config(&provider("absent", "[r.io]"))).unwrap();
    assert!(users(&providers, "r.io/a").await.is_empty());
}

#[tokio::test]
async fn a_slow_plugin_ends_its_work_for_the_next_attempt() {
    let node = Node::new();
    let auth = answer(
        "Image",
        "",
        "{\"r.io\": {\"username\": \"u\", \"password\": \"p\"}}",
    );
    node.plugin("plug", &format!("sleep 1\n{auth}"));
    let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
    // The caller stops waiting before the plugin answers.
    let waited =
        tokio::time::timeout(Duration::from_millis(100), users(&providers, "r.io/a")).await;
    assert!(waited.is_err());
    assert_eq!(users(&providers, "r.io/a").await, ["u:p"]);
    assert_eq!(node.runs("plug"), 1);
}

#[test]
fn one_that_hangs_does_not_hold_up_a_pod_and_ends_with_the_process() {
    let node = Node::new();
    node.plugin("plug", "echo $$ > \"$0.pid\"\nexec sleep 600");
    let providers = node.load(&config(&provider("plug", "[r.io]"))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let started = Instant::now();
    assert!(runtime.block_on(users(&providers, "r.io/a")).is_empty());
    let took = started.elapsed();
    assert!(
        took >= ANSWER_TIMEOUT && took < ANSWER_TIMEOUT * 2,
        "{took:?}"
    );
    let pid = fs::read_to_string(node.0.path().join("plug.pid")).unwrap();
    let stat = || fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    let running = || stat().is_ok_and(|stat| !stat.contains(") Z "));
    assert!(running(), "its answer may still come");
    drop(runtime);
    let deadline = Instant::now() + Duration::from_secs(10);
    while running() {
        assert!(Instant::now() < deadline, "the plugin still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn configurations_are_checked_as_the_kubelet_does() {
    let node = Node::new();
    let fine = provider("plug", "[r.io]");
    for version in ["v1", "v1beta1", "v1alpha1"] {
        let text = config(&fine.replace("/v1", &format!("/{version}")))
            .replace("k8s.io/v1\n", &format!("k8s.io/{version}\n"));
        assert_eq!(node.load(&text).unwrap().list.len(), 1, "{version}");
    }
    for (bad, problem) in [
        (config(&provider("a/b", "[r.io]")), "not a file name"),
        (config(&provider("'..'", "[r.io]")), "not a file name"),
        (config(&provider("'a b'", "[r.io]")), "not a file name"),
        (config(&provider("plug", "[]")), "matchImages"),
        (config(&provider("plug", "")), "matchImages"),
        (config(&format!("{fine}{fine}")), "twice"),
        (config(&fine.replace("1h", "soon")), "defaultCacheDuration"),
        (config(&fine.replace("1h", "-1h")), "defaultCacheDuration"),
        (
            config(&fine.replace("defaultCacheDuration: 1h, ", "")),
            "defaultCacheDuration",
        ),
        (config(&fine.replace("/v1", "/v7")), "apiVersion"),
        (
            config(&fine).replace("kubelet.config", "other"),
            "CredentialProviderConfig",
        ),
        ("[".to_owned(), ""),
    ] {
        let error = node.load(&bad).err().unwrap_or_else(|| panic!("{bad}"));
        assert!(error.to_string().contains(problem), "{error}");
    }
    // The plugin needs ServiceAccount tokens, which archaware does not request: it is skipped with
    // a warning.
    let with_tokens = fine.replace("apiVersion", "tokenAttributes: {serviceAccountTokenAudience: a, requireServiceAccount: true}, apiVersion");
    let both = config(&format!("{with_tokens}{}", provider("other", "[r.io]")));
    assert_eq!(node.load(&both).unwrap().list.len(), 1);
}

#[test]
fn a_folder_is_read_in_the_order_of_its_names() {
    let (node, folder) = (Node::new(), tempfile::tempdir().unwrap());
    let write = |file: &str, name: &str| {
        fs::write(folder.path().join(file), config(&provider(name, "[r.io]"))).unwrap();
    };
    let load = || Providers::load(folder.path(), node.0.path());
    assert!(matches!(load(), Err(ProviderError::Empty(_))));
    write("b.yaml", "second");
    write("a.yml", "first");
    write("c.json", "third");
    write("d.txt", "ignored");
    let names: Vec<_> = load()
        .unwrap()
        .list
        .into_iter()
        .map(|provider| provider.name.clone())
        .collect();
    assert_eq!(names, ["first", "second", "third"]);
    write("e.yaml", "first");
    assert!(matches!(load(), Err(ProviderError::Invalid { .. })));
}
