//! Objects and files whose images are not known: no format says yes to them.

use super::*;

/// The answer for each workload of a report, by kind and name.
fn answers(output: &Output) -> Vec<(String, String)> {
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let workloads = json["workloads"].as_array().unwrap().iter();
    let answer = |one: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let name = format!("{}/{}", text(&one["kind"]), text(&one["name"]));
        (name, text(&one["answers"][0]["canRun"]))
    };
    workloads.map(answer).collect()
}

/// Objects of operators: archaware knows where some of them name images, and names the others.
#[tokio::test]
async fn objects_of_operators_are_read_or_named() {
    let registry = registry(&["multi", "amd64"]).await;
    let (multi, amd64) = (registry.image("multi"), registry.image("amd64"));
    let objects = [
        json!({"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "wf"},
            "spec": {"templates": [{"script": {"image": amd64}}, {"container": {"image": multi}}]}}),
        json!({"apiVersion": "monitoring.coreos.com/v1", "kind": "Prometheus", "metadata": {"name": "p"},
            "spec": {"image": multi, "replicas": 2}}),
        // Its operator chooses the image.
        json!({"apiVersion": "postgresql.cnpg.io/v1", "kind": "Cluster", "metadata": {"name": "pg"},
            "spec": {"imageName": amd64}}),
        json!({"apiVersion": "example.com/v1", "kind": "Robot", "metadata": {"name": "r"},
            "spec": {"brain": {"workerImage": multi}}}),
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "patch"},
            "spec": {"template": {"spec": {"containers": [{"name": "web", "image": multi}, {"name": "side"}]}}}}),
    ];
    // As `jq` prints a list: JSON objects, one after the other.
    let stream: String = objects.iter().map(ToString::to_string).collect();
    let json = report(&stream, &["-f", "-", "-o", "json"]).await;
    let expected = [
        ("Cluster/pg", "no"),
        ("Deployment/patch", "unknown"),
        ("Prometheus/p", "yes"),
        ("Robot/r", "unknown"),
        ("Workflow/wf", "no"),
    ];
    let expected = expected.map(|(name, answer)| (name.to_owned(), answer.to_owned()));
    assert_eq!(answers(&json), expected);
    for format in ["table", "html", "markdown", "csv", "junit", "json"] {
        let output = report(&stream, &["-f", "-", "-o", format]).await;
        let text = stdout(&output);
        for part in [
            "container side names no image",
            "at a place that archaware does not",
        ] {
            assert!(text.contains(part), "{part} in {format}: {text}");
        }
    }
    let only_unread = objects[3].to_string();
    let output = report(&only_unread, &["-f", "-", "--fail-on", "unknown"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

/// A folder with a chart: its templates are no YAML, and do not end the report.
#[tokio::test]
async fn a_file_that_is_not_yaml_does_not_hide_the_others() {
    let registry = registry(&["multi"]).await;
    let folder = tempfile::tempdir().unwrap();
    let fine = deployment("fine", 1, &[registry.image("multi")]);
    std::fs::write(folder.path().join("fine.yaml"), format!("\u{feff}{fine}")).unwrap();
    let template = "kind: Deployment\nmetadata: {{- include \"x\" . | nindent 2 }}\n";
    std::fs::write(folder.path().join("template.yaml"), template).unwrap();
    let path = folder.path().to_str().unwrap();
    let output = report("", &["-f", path, "-o", "json"]).await;
    assert!(output.status.success(), "{output:?}");
    let file = folder.path().join("template.yaml");
    let expected = [
        ("Deployment/fine".to_owned(), "yes".to_owned()),
        (format!("File/{}", file.display()), "unknown".to_owned()),
    ];
    let mut found = answers(&output);
    found.sort();
    assert_eq!(found, expected);
    let output = report("", &["-f", path, "--fail-on", "missing"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

/// A registry that limits requests proves nothing.
#[tokio::test]
async fn a_check_does_not_pass_while_a_registry_limits_requests() {
    let registry = registry(&["multi"]).await;
    let limited = vec![("retry-after".to_owned(), "60".to_owned())];
    registry.script("/", Script::Status(429, limited));
    let text = deployment("limited", 1, &[registry.image("multi")]);
    for (fail_on, status) in [(&[][..], 0), (&["--fail-on", "missing"], 1)] {
        let arguments = [&["-f", "-"], fail_on].concat();
        let output = report(&text, &arguments).await;
        assert_eq!(output.status.code(), Some(status), "{output:?}");
    }
}
