//! Node Feature Discovery (NFD) itself: what it says of this machine, and how it evaluates rules.

use std::{
    collections::BTreeMap,
    io::Write,
    process::{Command, Stdio},
};

use serde::Deserialize;
use serde_json::Value;

/// Whether the entries of a document hold on a node, or the error that NFD ends with.
#[derive(Debug, Deserialize)]
pub struct Evaluated {
    /// One for each entry; `None` with an error.
    pub holds: Option<Vec<bool>>,
    /// Empty if there is none.
    pub error: String,
}

fn run(argument: &str, input: String) -> String {
    let folder = std::env::var("ARCHAWARE_TEST_NFD")
        .expect("run tests with hack/test.sh: it builds Node Feature Discovery");
    let mut process = Command::new(format!("{folder}/nfd"))
        .arg(argument)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // It logs each rule that does not hold.
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = process.stdin.take().unwrap();
    let write = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = process.wait_with_output().unwrap();
    write.join().unwrap().unwrap();
    assert!(output.status.success(), "nfd {argument}: {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The labels that NFD gives this machine for its CPU.
pub fn labels_of_this_cpu() -> BTreeMap<String, String> {
    serde_json::from_str(&run("labels", String::new())).unwrap()
}

/// Evaluates image compatibility documents on nodes with these features, whose names begin with
/// `test.`: a list for each document, with the result on each node.
pub fn evaluate(questions: &[(String, Vec<Value>)]) -> Vec<Vec<Evaluated>> {
    let line = |(document, nodes): &(String, Vec<Value>)| {
        serde_json::json!({"document": document, "nodes": nodes}).to_string() + "\n"
    };
    let answers = run("evaluate", questions.iter().map(line).collect());
    let answers = answers.lines().map(serde_json::from_str);
    answers.collect::<Result<_, _>>().unwrap()
}
