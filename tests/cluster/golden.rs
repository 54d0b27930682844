//! Outputs that are compared with files.

use std::path::Path;

use regex::Regex;

use super::TestCluster;

/// Compares an output with a file in `tests/cluster`, after replacing what differs between runs by
/// something of the same width. With `ARCHAWARE_UPDATE_GOLDEN=1` it writes the file instead: look
/// at the difference before it is committed.
pub(crate) fn assert_golden(cluster: &TestCluster, file: &str, output: &str) {
    let text = normalised(cluster, output);
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/cluster")
        .join(file);
    if std::env::var_os("ARCHAWARE_UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &text).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        text == expected,
        "{file} is expected:\n{expected}\nbut this is printed:\n{text}"
    );
}

fn normalised(cluster: &TestCluster, output: &str) -> String {
    let registry = cluster.registry();
    let same_width = format!("registry.test:{:0>1$}", 5, registry.len() - 14);
    let mut text = output.replace(&registry, &same_width);
    for (pattern, replacement) in [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-01T00:00:00Z"),
        (r"\d+[smh] old", "1s old"),
    ] {
        let pattern = Regex::new(pattern).unwrap();
        text = pattern.replace_all(&text, replacement).into_owned();
    }
    text
}
