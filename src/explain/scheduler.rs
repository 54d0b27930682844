//! The scheduler's message in the condition `PodScheduled` of a pod that it cannot place.

/// A reason, with the number of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    pub(super) nodes: usize,
    pub(super) text: String,
}

/// Reasons that node groups explain in more detail.
const EXPLAINED: [&str; 4] = [
    "node(s) had untolerated taint",
    "node(s) had taint",
    "node(s) didn't match Pod's node affinity",
    "node(s) were unschedulable",
];

/// The reasons in a message like `0/5 nodes are available: 2 node(s) had untolerated taint(s), 3
/// Insufficient cpu. preemption: …` (`FitError.Error` of k8s.io/kubernetes), without reasons about
/// taints, selector and affinity of the pod. Empty for a message of another form.
pub(super) fn further_reasons(message: &str) -> Vec<Reason> {
    let Some((_, rest)) = message.split_once(" nodes are available: ") else {
        return Vec::new();
    };
    let end = rest.find(". ").unwrap_or(rest.len());
    let text = rest.get(..end).unwrap_or(rest).trim_end_matches('.');
    let mut reasons: Vec<Reason> = Vec::new();
    for part in text.split(", ") {
        let counted = part.split_once(' ');
        let counted = counted.and_then(|(count, text)| Some((count.parse().ok()?, text)));
        match (counted, reasons.last_mut()) {
            (Some((nodes, text)), _) => reasons.push(Reason {
                nodes,
                text: text.to_owned(),
            }),
            // A comma within a reason.
            (None, Some(last)) => {
                last.text.push_str(", ");
                last.text.push_str(part);
            }
            (None, None) => {}
        }
    }
    let is_explained =
        |reason: &Reason| EXPLAINED.iter().any(|start| reason.text.starts_with(start));
    reasons.retain(|reason| !is_explained(reason));
    reasons
}

impl Reason {
    /// Whether more room on nodes would help.
    pub(super) fn is_about_room(&self) -> bool {
        let text = self.text.as_str();
        text.starts_with("Insufficient") || text.starts_with("Too many pods")
    }

    /// For example `Insufficient cpu on 3 nodes`.
    pub(super) fn say(&self) -> String {
        let nodes = if self.nodes == 1 { "node" } else { "nodes" };
        format!("{} on {} {nodes}", self.text, self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of real schedulers (1.36, 1.20).
    #[test]
    fn reasons_are_found_in_messages() {
        for (message, expected) in [
            (
                "0/5 nodes are available: 2 node(s) had untolerated taint(s), 3 Insufficient cpu. no new claims to deallocate, preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling.",
                vec!["Insufficient cpu on 3 nodes"],
            ),
            (
                "0/3 nodes are available: 1 Insufficient memory, 1 node(s) didn't match Pod's node affinity/selector, 2 node(s) had untolerated taint {kubernetes.io/arch: arm64}.",
                vec!["Insufficient memory on 1 node"],
            ),
            (
                "0/4 nodes are available: 4 node(s) had volume node affinity conflict, for a, b.",
                vec!["node(s) had volume node affinity conflict, for a, b on 4 nodes"],
            ),
            (
                "Scheduling is blocked due to non-empty scheduling gates",
                vec![],
            ),
            ("", vec![]),
        ] {
            let found: Vec<_> = further_reasons(message).iter().map(Reason::say).collect();
            assert_eq!(found, expected, "{message}");
        }
    }
}
