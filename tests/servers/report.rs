//! `archaware report` without a cluster: in a pipeline, for many workloads, and its page in a real
//! browser.

mod page;
mod readers;
mod unread;

use std::{
    path::Path,
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry, Script};
use testsupport::servers::Browser;
use tokio::io::AsyncWriteExt;

/// Runs `report` with this on stdin. It has no memory of earlier reports.
async fn report(stdin: &str, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    report_with_cache(folder.path(), stdin, arguments).await
}

/// The same for a user with this folder for caches.
async fn report_with_cache(folder: &Path, stdin: &str, arguments: &[&str]) -> Output {
    let mut child = tokio::process::Command::new(testsupport::program())
        .arg("report")
        .args(arguments)
        .env("COLUMNS", "100")
        .env("XDG_CACHE_HOME", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let text = stdin.to_owned();
    let writing = tokio::spawn(async move { input.write_all(text.as_bytes()).await });
    let output = child.wait_with_output().await.unwrap();
    let _ = writing.await;
    output
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn deployment(name: &str, replicas: u32, images: &[String]) -> String {
    let container = |(n, image): (usize, &String)| json!({"name": format!("c{n}"), "image": image, "resources": {"requests": {"cpu": "250m", "memory": "64Mi"}}});
    let containers: Vec<Value> = images.iter().enumerate().map(container).collect();
    let object = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": containers}}}});
    format!("---\n{object}\n")
}

async fn registry(images: &[&str]) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    for image in images {
        registry.add(image, &testimg::find(image));
    }
    registry
}

/// Four Deployments: for both architectures, for one of them, with an image that is gone, and torn.
fn manifests(registry: &FakeRegistry) -> String {
    let image = |name: &str| registry.image(name);
    let mut all = deployment("fine", 2, &[image("multi")]);
    all += "---\napiVersion: v1\nkind: Service\nmetadata: {name: fine}\n";
    all += &deployment("old", 4, &[image("multi"), image("amd64")]);
    all += &deployment("gone", 1, &[image("none")]);
    all + &deployment("torn", 1, &[image("amd64"), image("s390x")])
}

/// On a terminal a bar says how far it is; elsewhere nothing does, so that a log of CI stays short.
#[tokio::test]
async fn a_terminal_shows_progress() {
    let registry = registry(&["multi", "amd64", "arm64"]).await;
    registry.script("/", Script::Slow(Duration::from_millis(300)));
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("images");
    let names = ["multi", "amd64", "arm64"].map(|name| registry.image(name));
    std::fs::write(&images, names.join("\n")).unwrap();
    let arguments = ["--images", images.to_str().unwrap(), "--no-cache"];
    let elsewhere = report("", &arguments).await;
    assert_eq!(String::from_utf8_lossy(&elsewhere.stderr), "");
    // script(1) is a terminal for a command.
    let command = format!(
        "'{}' report --images '{}' --no-cache",
        testsupport::program().display(),
        images.display()
    );
    let terminal = tokio::process::Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("COLUMNS", "100")
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let shown = stdout(&terminal);
    assert!(terminal.status.success(), "{shown}");
    assert!(shown.contains("1/3") && shown.contains('█'), "{shown:?}");
    // The bar is gone when the report is printed.
    let table = console::strip_ansi_codes(stdout(&elsewhere)).into_owned();
    let last = shown.rsplit("\u{1b}[2K").next().unwrap();
    let last = console::strip_ansi_codes(last).replace('\r', "");
    assert_eq!(last.trim_start_matches('\n'), table, "{shown:?}");
}

/// A program that reads a table finds each row in one line.
#[tokio::test]
async fn rows_are_not_wrapped_without_a_terminal() {
    let long = format!(
        "registry.test/{}/app:1",
        "team/".repeat(40).trim_end_matches('/')
    );
    let mut child = tokio::process::Command::new(testsupport::program())
        .args(["report", "-f", "-", "--no-cache"])
        .env_remove("COLUMNS")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let manifest = deployment("web", 1, std::slice::from_ref(&long));
    let mut input = child.stdin.take().unwrap();
    input.write_all(manifest.as_bytes()).await.unwrap();
    drop(input);
    let output = child.wait_with_output().await.unwrap();
    let whole = |line: &str| line.contains(&long);
    assert!(stdout(&output).lines().any(whole), "{}", stdout(&output));
}

/// Without `COLUMNS`, tables are as wide as the terminal.
#[tokio::test]
async fn tables_fit_the_terminal() {
    let registry = registry(&["multi", "amd64", "s390x"]).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.yaml");
    std::fs::write(&file, manifests(&registry)).unwrap();
    for width in [72_usize, 90, 200] {
        let command = format!(
            "stty rows 24 cols {width}; '{}' report -f '{}' --for arm64",
            testsupport::program().display(),
            file.display()
        );
        let terminal = tokio::process::Command::new("script")
            .args(["-qec", &command, "/dev/null"])
            .env_remove("COLUMNS")
            .env("XDG_CACHE_HOME", folder.path())
            .stdin(Stdio::null())
            .output()
            .await
            .unwrap();
        let shown = console::strip_ansi_codes(stdout(&terminal)).into_owned();
        let table = shown.replace('\r', "");
        let table = table.lines().skip_while(|line| !line.contains("WORKLOAD"));
        let widths = table.map(|line| line.chars().count());
        let widest = widths.max().unwrap_or_default();
        assert!(widest <= width, "{widest} of {width}: {shown}");
        assert!(widest > width.min(100) - 20, "{widest} of {width}: {shown}");
    }
}

#[tokio::test]
async fn manifests_in_a_pipeline() {
    let registry = registry(&["multi", "amd64", "s390x"]).await;
    let all = manifests(&registry);
    let output = report(&all, &["-f", "-", "-o", "json", "--for", "arm64,s390x"]).await;
    assert!(output.status.success(), "{output:?}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let schema = report("", &["--schema"]).await;
    let schema: Value = serde_json::from_slice(&schema.stdout).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<_> = validator
        .iter_errors(&json)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(json["source"], "manifests from stdin");
    let arm64 = &json["summaries"][0];
    let amount = |part: &str| {
        (
            arm64[part]["workloads"].as_u64().unwrap(),
            arm64[part]["cpuMillicores"].as_u64().unwrap(),
        )
    };
    assert_eq!(amount("total"), (4, 500 + 2000 + 250 + 500));
    assert_eq!(amount("canRun"), (1, 500));
    assert_eq!(amount("blockedByOneImage"), (1, 2000));
    assert_eq!(amount("blockedOtherwise"), (1, 500));
    assert_eq!(amount("unknown"), (1, 250));
    assert_eq!(arm64["blockers"][0]["image"], registry.image("amd64"));
    assert_eq!(arm64["blockers"][0]["blocks"]["workloads"], 2);
    let s390x = &json["summaries"][1];
    assert_eq!(s390x["architecture"], "s390x");
    assert_eq!(s390x["canRun"]["workloads"], 1);
    let gone = json["workloads"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["name"] == "gone")
        .unwrap();
    assert_eq!(gone["answers"][0]["canRun"], "unknown");
    assert_eq!(gone["architectures"], Value::Null);
    // For CI.
    for (what, fails) in [
        ("missing", true),
        ("unknown", true),
        ("unknown,missing", true),
    ] {
        let output = report(&all, &["-f", "-", "--fail-on", what]).await;
        assert_eq!(output.status.code(), Some(i32::from(fails)), "{what}");
    }
    let fine = deployment("fine", 1, &[registry.image("multi")]);
    let output = report(&fine, &["-f", "-", "--fail-on", "unknown,missing"]).await;
    assert!(output.status.success(), "{output:?}");
    // Its workers have containers, at a place of its own.
    let cluster = "---\napiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: ray}\nspec: {workers: [{template: {spec: {containers: [{image: app}]}}}]}\n";
    let policy = cluster
        .replace("ray.io", "kyverno.io")
        .replace("RayCluster", "Policy");
    let values = "---\ncontainer: {image: app}\n";
    let without = format!("{fine}\n{policy}{values}");
    let output = report(&without, &["-f", "-", "--fail-on", "unknown"]).await;
    assert!(output.status.success(), "{output:?}");
    let with_unread = format!("{fine}\n{cluster}");
    for what in ["missing", "unknown"] {
        let output = report(&with_unread, &["-f", "-", "--fail-on", what]).await;
        assert_eq!(output.status.code(), Some(1), "{what}");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            error.contains("images of raycluster/ray are not known"),
            "{error}"
        );
    }
    // Charts write fields that are null, and keys twice.
    let nulls = fine.replace(
        "\"containers\"",
        "\"initContainers\": null, \"volumes\": null, \"containers\"",
    ) + "---\nkind: [twice]\nkind: ConfigMap\n";
    let output = report(&nulls, &["-f", "-", "--fail-on", "missing"]).await;
    assert!(output.status.success(), "{output:?}");
    // Bad input.
    for (text, expected) in [
        ("kind: [", "stdin is not YAML"),
        (
            &deployment("a", 1, &[]).replace("[]", "7"),
            "Deployment a: ",
        ),
    ] {
        let output = report(text, &["-f", "-"]).await;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(output.stdout.is_empty());
    }
    let output = report("kind: ConfigMap", &["-f", "-"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let output = report("", &["--for", "x68", "-f", "-"]).await;
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// A reader that has seen enough is no error.
#[tokio::test]
async fn the_reader_may_end_first() {
    let registry = registry(&["multi"]).await;
    let mut all = String::new();
    for n in 0..2000 {
        all += &deployment(&format!("w{n}"), 1, &[registry.image("multi")]);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.yaml");
    std::fs::write(&file, all).unwrap();
    let command = format!(
        "set -o pipefail; {} report --no-cache -f {} | head -n 1",
        testsupport::program().display(),
        file.display()
    );
    let ended = tokio::process::Command::new("bash")
        .args(["-c", &command])
        .output()
        .await
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(stdout(&ended).lines().count(), 1);
}

#[tokio::test]
async fn every_format_says_the_same() {
    let registry = registry(&["multi", "amd64", "s390x"]).await;
    let all = manifests(&registry);
    let csv = report(&all, &["-f", "-", "-o", "csv"]).await;
    let lines: Vec<&str> = stdout(&csv).lines().collect();
    assert_eq!(lines.len(), 5, "{csv:?}");
    assert!(
        lines[0].starts_with("namespace,kind,name,pods,"),
        "{}",
        lines[0]
    );
    let old = lines
        .iter()
        .find(|line| line.starts_with("shop,Deployment,old,"))
        .unwrap();
    let expected = format!(
        "shop,Deployment,old,4,2000,536870912,amd64,arm64,no,{},,false,0,,",
        registry.image("amd64")
    );
    assert_eq!(*old, expected);
    let markdown = report(&all, &["-f", "-", "-o", "markdown"]).await;
    let row = format!(
        "| shop/deployment/old | amd64 | no | image {} is not for arm64 |",
        registry.image("amd64")
    );
    assert!(stdout(&markdown).contains(&row), "{}", stdout(&markdown));
    let table = report(&all, &["-f", "-"]).await;
    let lines = stdout(&table).lines();
    let words: Vec<String> = lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in [
        "one image to build 1 (25%) 4 (50%) 2 (62%) 512Mi (62%)",
        "shop/deployment/old no amd64 -",
        "- image amd64 is not for arm64",
        "Images that could not be checked",
    ] {
        assert!(words.iter().any(|one| one == line), "{line}: {words:#?}");
    }
    // What ends with an error is a failure there, and nothing else.
    let fine = deployment("fine", 1, &[registry.image("multi")]);
    for (manifests, fail_on, cases, status) in [
        (&all, &[][..], "4 3 0", 1),
        (&all, &["--fail-on", "missing"], "4 3 0", 1),
        (&all, &["--fail-on", "unknown"], "4 1 2", 1),
        (&fine, &[], "1 0 0", 0),
    ] {
        let arguments = [&["-f", "-", "-o", "junit"], fail_on].concat();
        let junit = report(manifests, &arguments).await;
        assert_eq!(readers::cases(&junit).await, cases, "{fail_on:?}");
        assert_eq!(junit.status.code(), Some(status), "{fail_on:?}");
    }
    // A list of images.
    let list = format!(
        "# ours\n{}\n\n{}\n",
        registry.image("multi"),
        registry.image("amd64")
    );
    let images = report(&list, &["--images", "-"]).await;
    let images = stdout(&images);
    assert!(
        images.contains("IMAGE") && !images.contains("ON NODES"),
        "{images}"
    );
}

/// 5,000 workloads with 2,000 images, within a minute; each image is asked for once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_workloads() {
    let registry = registry(&[]).await;
    let kinds = ["multi", "amd64", "arm64", "amd64-arm64"].map(testimg::find);
    for n in 0..2000 {
        registry.add(&format!("app-{n}"), &kinds[n % 4]);
    }
    let workloads = (0..5000).map(|n| {
        let images = [n % 2000, (n * 7) % 2000].map(|n| registry.image(&format!("app-{n}")));
        deployment(&format!("w{n}"), 1, &images)
    });
    let all: String = workloads.collect();
    let began = Instant::now();
    let output = report(&all, &["-f", "-", "-o", "json"]).await;
    let took = began.elapsed();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["workloads"].as_array().unwrap().len(), 5000);
    assert_eq!(json["images"].as_array().unwrap().len(), 2000);
    assert_eq!(
        json["summaries"][0]["unknown"]["workloads"], 0,
        "{}",
        json["summaries"]
    );
    assert_eq!(registry.count("HEAD", "/manifests/"), 2000);
    assert!(took < Duration::from_mins(1), "{took:?}");
}

/// A report that is made again asks for what it does not know.
#[tokio::test]
async fn an_interrupted_report_goes_on() {
    let registry = registry(&[]).await;
    for n in 0..40 {
        registry.add(
            &format!("app-{n}"),
            &testimg::find(["multi", "amd64-v3", "unnamed"][n % 3]),
        );
    }
    let list = |count: usize| -> String {
        (0..count)
            .map(|n| format!("{}\n", registry.image(&format!("app-{n}"))))
            .collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let answers = |output: &Output| -> Value {
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["images"].clone()
    };
    let arguments = ["--images", "-", "-o", "json"];
    // The first one is killed while four of them have no answer: fewer than may be asked for at
    // once.
    for n in 36..40 {
        registry.script(&format!("/app-{n}"), Script::Hang);
    }
    let file = folder.path().join("archaware/images.jsonl");
    let known = || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.lines().count()
    };
    let names = folder.path().join("names");
    std::fs::write(&names, list(40)).unwrap();
    let mut killed = tokio::process::Command::new(testsupport::program())
        .args(["report", "--images", names.to_str().unwrap()])
        .env("XDG_CACHE_HOME", folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    testsupport::servers::eventually("what is known already", || async {
        (known() == 36).then_some(())
    })
    .await;
    killed.kill().await.unwrap();
    registry.unscript();
    registry.forget();
    let whole = report_with_cache(folder.path(), &list(40), &arguments).await;
    assert_eq!(registry.count("HEAD", "/manifests/"), 4, "the rest");
    assert_eq!(
        answers(&whole)[0]["platforms"],
        answers(&report(&list(1), &arguments).await)[0]["platforms"]
    );
    registry.forget();
    let again = report_with_cache(folder.path(), &list(40), &arguments).await;
    assert_eq!(
        (answers(&again), registry.seen().len()),
        (answers(&whole), 0)
    );
    report_with_cache(folder.path(), &list(40), &["--images", "-", "--no-cache"]).await;
    assert_eq!(registry.count("HEAD", "/manifests/"), 40);
    // An hour later the tags are looked up again, and nothing else.
    let text = std::fs::read_to_string(&file).unwrap();
    let older = text.lines().map(|line| {
        let mut saved: Value = serde_json::from_str(line).unwrap();
        saved["at"] = json!(saved["at"].as_u64().unwrap() - 3600);
        format!("{saved}\n")
    });
    let older: String = older.collect();
    std::fs::write(&file, older + "nonsense\n{\"digest\": 7}\n").unwrap();
    registry.forget();
    let later = report_with_cache(folder.path(), &list(40), &arguments).await;
    assert_eq!(answers(&later), answers(&whole));
    assert_eq!(registry.count("HEAD", "/manifests/"), 40);
    assert_eq!(registry.count("GET", "/"), 0);
    // What a credential was needed for is not known to others.
    let private = FakeRegistry::start().await.unwrap();
    private.add("app", &testimg::find("multi"));
    private.require(Auth::Basic("user".into(), "hunter2".into()));
    let config = folder.path().join("config.json");
    let content =
        json!({"auths": {private.address(): {"username": "user", "password": "hunter2"}}});
    std::fs::write(&config, content.to_string()).unwrap();
    let image = private.image("app");
    let with = [
        "--images",
        "-",
        "-o",
        "json",
        "--docker-config",
        config.to_str().unwrap(),
    ];
    let with = report_with_cache(folder.path(), &image, &with).await;
    assert_eq!(answers(&with)[0]["error"], Value::Null);
    let without = report_with_cache(folder.path(), &image, &arguments).await;
    assert_eq!(answers(&without)[0]["error"]["reason"], "Denied");
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(
        !kept.contains("hunter2") && !kept.contains(&image),
        "{kept}"
    );
}

async fn page(folder: &Path, manifests: &str) -> std::path::PathBuf {
    let output = report(
        manifests,
        &["-f", "-", "-o", "html", "--for", "arm64,s390x"],
    )
    .await;
    assert!(output.status.success(), "{output:?}");
    let file = folder.join("report.html");
    std::fs::write(&file, &output.stdout).unwrap();
    file
}

/// The page needs no network, can be filtered, sorted and searched with the keyboard alone, and
/// shows names as text.
#[tokio::test]
async fn the_page_in_a_browser() {
    let registry = registry(&["multi", "amd64", "s390x"]).await;
    let mut all = manifests(&registry);
    for n in 0..30 {
        all += &deployment(&format!("small-{n}"), n, &[registry.image("multi")]);
    }
    all += &deployment(
        "<img src=x onerror=alert(1)>",
        1,
        &[registry.image("multi")],
    );
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path(), &all).await;
    let browser = Browser::start(false).await;
    browser.open(&file, "").await;
    let visible = "Array.from(document.querySelectorAll('#workloads tbody tr')).filter(r => !r.hidden).map(r => r.cells[0].textContent)";
    let count = format!("{visible}.length");
    assert_eq!(browser.evaluate(&count).await, 35);
    assert_eq!(
        browser.evaluate("document.images.length").await,
        0,
        "names are text"
    );
    assert_eq!(
        browser
            .evaluate("performance.getEntriesByType('resource').length")
            .await,
        0
    );
    // Search with the keyboard alone.
    browser.keys("/").await;
    browser.keys("small-1").await;
    assert_eq!(browser.evaluate(&count).await, 11);
    assert_eq!(
        browser
            .evaluate("document.getElementById('count').textContent")
            .await,
        "11 of 35"
    );
    assert_eq!(browser.evaluate("location.hash").await, "#q=small-1");
    // The view can be sent around.
    browser.open(&file, "#q=shop&show=no&sort=0").await;
    let names = browser.evaluate(visible).await;
    assert_eq!(
        names,
        json!(["shop/deployment/old", "shop/deployment/torn"])
    );
    // Sort by pods, from the keyboard: the most first, then the fewest.
    browser.open(&file, "").await;
    let pods = "document.querySelectorAll('#workloads th button')[5]";
    assert_eq!(
        browser.evaluate(&format!("{pods}.textContent")).await,
        "Pods"
    );
    let first = "document.querySelector('#workloads tbody tr').cells[0].textContent";
    browser.evaluate(&format!("{pods}.focus()")).await;
    browser.keys("\u{E007}").await;
    assert_eq!(browser.evaluate(first).await, "shop/deployment/small-29");
    assert_eq!(
        browser
            .evaluate(&format!("{pods}.parentElement.getAttribute('aria-sort')"))
            .await,
        "descending"
    );
    browser.keys("\u{E007}").await;
    assert_eq!(browser.evaluate(first).await, "shop/deployment/small-0");
    // Light and dark.
    let ground = "getComputedStyle(document.body).backgroundColor";
    let light = browser.evaluate(ground).await;
    browser.click("#theme").await;
    let dark = browser.evaluate(ground).await;
    assert_ne!(light, dark);
    assert!(browser.screenshot().await.len() > 10_000);
    // It is printed without what cannot be used on paper.
    let controls = "Array.from(document.styleSheets[0].cssRules).some(r => r.media && r.media.mediaText === 'print' && r.cssText.includes('.controls'))";
    assert_eq!(browser.evaluate(controls).await, true);
    // The diagram says in words what it shows.
    let label = browser
        .evaluate("document.getElementById('by-architecture').getAttribute('aria-label')")
        .await;
    assert_eq!(label, "amd64 33, arm64 32, s390x 32");
    assert_eq!(browser.console().await, Vec::<String>::new());
    browser.close().await;
    let browser = Browser::start(true).await;
    browser.open(&file, "").await;
    assert_eq!(
        browser.evaluate(ground).await,
        dark,
        "as the system prefers"
    );
    browser.close().await;
}
