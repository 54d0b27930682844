//! What a cluster is like when a test fails.

use super::TestCluster;

/// Enough for the tests that have few objects; the others create thousands of equal ones.
const LINES: usize = 60;

const PODS: &str = "custom-columns=POD:.metadata.name,NODE:.spec.nodeName,PHASE:.status.phase,\
    GATES:.spec.schedulingGates[*].name,ARCHITECTURES:.spec.affinity.nodeAffinity\
    .requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[*].matchExpressions[*].values,\
    CONDITIONS:.status.conditions[*].message,WAITING:.status.containerStatuses[*].state.waiting.reason,\
    ENDED:.status.containerStatuses[*].lastState.terminated";
const NODES: &str = "custom-columns=NODE:.metadata.name,ARCHITECTURE:.status.nodeInfo.architecture,\
    TAINTS:.spec.taints[*].key,ALLOCATABLE:.status.allocatable,CONDITIONS:.status.conditions[*].status";
const EVENTS: &str = "custom-columns=TIME:.eventTime,LAST:.lastTimestamp,ABOUT:.involvedObject.name,REASON:.reason,NOTE:.message";

impl TestCluster {
    /// What pods wait for, what nodes are like, and what was said of them last.
    pub fn state(&self) -> String {
        let mut state = String::new();
        let own = self.namespace.as_str();
        for (what, output) in [("pods", PODS), ("nodes", NODES), ("events", EVENTS)] {
            let (_, out, error) = self.try_kubectl(&[
                "get",
                what,
                "--namespace",
                own,
                "--output",
                output,
                "--sort-by=.metadata.creationTimestamp",
                "--request-timeout=10s",
            ]);
            state.push_str(&format!("--- {what} ---\n"));
            state.push_str(&last_lines(&out));
            state.push_str(&error);
        }
        let log = self.dir().join("log/kube-scheduler.log");
        let log = std::fs::read_to_string(log).unwrap_or_default();
        state.push_str("--- log of kube-scheduler ---\n");
        state.push_str(&last_lines(&log));
        state
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let skipped = lines.len().saturating_sub(LINES);
    let mut last = if skipped > 0 {
        format!("({skipped} lines before)\n")
    } else {
        String::new()
    };
    for line in lines.into_iter().skip(skipped) {
        last.push_str(line);
        last.push('\n');
    }
    last
}
