//! What a pod requests, from quantities in the API's form.

use std::ops::Add;

use serde_json::Value;

/// CPU and memory that pods request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// CPU, in thousandths of a core.
    pub cpu_millicores: u64,
    pub memory_bytes: u64,
}

impl Requests {
    fn max(self, other: Self) -> Self {
        Self {
            cpu_millicores: self.cpu_millicores.max(other.cpu_millicores),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
        }
    }

    /// The requests of this number of pods.
    #[must_use]
    pub fn times(self, pods: u64) -> Self {
        Self {
            cpu_millicores: self.cpu_millicores.saturating_mul(pods),
            memory_bytes: self.memory_bytes.saturating_mul(pods),
        }
    }
}

impl Add for Requests {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cpu_millicores: self.cpu_millicores.saturating_add(other.cpu_millicores),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
        }
    }
}

/// The requests of a pod, for each resource (`PodRequests` of k8s.io/component-helpers): its
/// pod-level request if there is one (KEP-2837), otherwise the larger of
/// - its containers and sidecars together,
/// - its largest init container with the sidecars before it.
///
/// The pod's overhead is added.
pub fn requests_of(spec: &Value) -> Requests {
    let list = |field: &str| spec.get(field).and_then(Value::as_array);
    let containers = list("containers").into_iter().flatten();
    let sum = |total: Requests, container: &Value| total + of_container(container);
    let mut running = containers.fold(Requests::default(), sum);
    let (mut sidecars, mut starting) = (Requests::default(), Requests::default());
    for container in list("initContainers").into_iter().flatten() {
        let requests = of_container(container);
        if container.get("restartPolicy").and_then(Value::as_str) == Some("Always") {
            sidecars = sidecars + requests;
            starting = starting.max(sidecars);
        } else {
            starting = starting.max(sidecars + requests);
        }
    }
    running = running + sidecars;
    let overhead = spec.get("overhead").map(of_list).unwrap_or_default();
    of_pod(spec, running.max(starting)) + overhead
}

/// The pod-level request for each resource. Without one, the requests of the containers count, or
/// the pod-level limit if no container requests the resource.
fn of_pod(spec: &Value, containers: Requests) -> Requests {
    let pod_resource = |list: &str, name: &str| spec.pointer(&format!("/resources/{list}/{name}"));
    let amount = |name: &str, containers: u64, unit: u64| {
        let limit = pod_resource("limits", name).filter(|_| containers == 0);
        let request = pod_resource("requests", name).or(limit);
        request.map_or(containers, |stated| thousandths(stated) / unit)
    };
    Requests {
        cpu_millicores: amount("cpu", containers.cpu_millicores, 1),
        memory_bytes: amount("memory", containers.memory_bytes, 1000),
    }
}

/// The requests of a container. Kubernetes sets a missing request to the limit.
fn of_container(container: &Value) -> Requests {
    let resource_list = |field: &str| container.pointer(&format!("/resources/{field}"));
    let (requests, limits) = (resource_list("requests"), resource_list("limits"));
    let value = |name: &str| {
        let named = |list: Option<&Value>| list.and_then(|list| list.get(name)).cloned();
        named(requests)
            .or_else(|| named(limits))
            .unwrap_or_default()
    };
    Requests {
        cpu_millicores: thousandths(&value("cpu")),
        memory_bytes: thousandths(&value("memory")) / 1000,
    }
}

fn of_list(list: &Value) -> Requests {
    let value = |name: &str| list.get(name).map(thousandths).unwrap_or_default();
    Requests {
        cpu_millicores: value("cpu"),
        memory_bytes: value("memory") / 1000,
    }
}

/// A quantity (`k8s.io/apimachinery/pkg/api/resource`) in thousandths, rounded up. Text that is not
/// a quantity counts as 0.
fn thousandths(value: &Value) -> u64 {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return 0,
    };
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '+' && c != '-')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let Ok(number) = number.parse::<f64>() else {
        return 0;
    };
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => f64::from(1 << 20),
        "Gi" => f64::from(1 << 30),
        "Ti" => 1024.0_f64.powi(4),
        "Pi" => 1024.0_f64.powi(5),
        "Ei" => 1024.0_f64.powi(6),
        exponent => {
            let digits = exponent.strip_prefix(['e', 'E']);
            let Some(power) = digits.and_then(|digits| digits.parse::<i32>().ok()) else {
                return 0;
            };
            10.0_f64.powi(power)
        }
    };
    // Floating point is exact enough for a sum that people read.
    let thousandths = (number * factor * 1000.0).ceil().max(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is not negative, and a cast saturates"
    )]
    let rounded = thousandths as u64;
    rounded
}

/// Thousandths of a core as cores, for people: `1.5`.
pub fn cores(millicores: u64) -> String {
    let (whole, rest) = (millicores / 1000, millicores % 1000);
    if rest == 0 {
        return whole.to_string();
    }
    let text = format!("{whole}.{rest:03}");
    text.trim_end_matches('0').to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    proptest! {
        /// Manifests may contain any text, so that parsing must not panic.
        #[test]
        fn any_text_is_a_quantity_or_nothing(text in "[-+.0-9]{0,20}[a-zA-Z]{0,3}[-+0-9]{0,12}") {
            let container = |value: &str| json!({"resources": {"requests": {"cpu": value, "memory": value}}});
            let requests = of_container(&container(&text));
            let spec = json!({"containers": vec![container(&text); 3]});
            prop_assert!(requests_of(&spec).cpu_millicores >= requests.cpu_millicores);
            let _ = requests_of(&spec).times(u64::MAX);
        }
    }

    #[test]
    fn quantities_of_the_api() {
        for (value, expected) in [
            (json!("1"), 1000),
            (json!(2), 2000),
            (json!("250m"), 250),
            (json!("0.1"), 100),
            (json!("1500000u"), 1500),
            (json!("1n"), 1),
            (json!("1Ki"), 1_024_000),
            (json!("1.5Gi"), 1_610_612_736_000),
            (json!("128M"), 128_000_000_000),
            (json!("1e3"), 1_000_000),
            (json!("12E2"), 1_200_000),
            (json!("-1"), 0),
            (json!("one"), 0),
            (json!(null), 0),
            (json!("99E"), u64::MAX),
        ] {
            assert_eq!(thousandths(&value), expected, "{value}");
        }
        assert_eq!(
            ["0", "1.5", "2", "0.001"],
            [0, 1500, 2000, 1].map(cores).as_slice()
        );
    }

    #[test]
    fn a_pod_requests_what_runs_at_once() {
        let container = |cpu: &str| json!({"resources": {"requests": {"cpu": cpu}}});
        let sidecar =
            |cpu: &str| json!({"restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
        for (init, containers, expected) in [
            (json!([]), json!([container("1"), container("2")]), 3000),
            (json!([container("5")]), json!([container("1")]), 5000),
            (json!([container("1")]), json!([container("2")]), 2000),
            // A sidecar keeps running, beside the later init containers and the containers.
            (
                json!([sidecar("1"), container("3")]),
                json!([container("2")]),
                4000,
            ),
            (
                json!([container("3"), sidecar("1")]),
                json!([container("2")]),
                3000,
            ),
        ] {
            let spec = json!({"initContainers": init, "containers": containers});
            assert_eq!(requests_of(&spec).cpu_millicores, expected, "{spec}");
        }
        let limited = json!({"containers": [{"resources": {"limits": {"memory": "1Mi"}}}], "overhead": {"cpu": "250m"}});
        let found = requests_of(&limited);
        assert_eq!((found.cpu_millicores, found.memory_bytes), (250, 1 << 20));
        // A pod-level request counts for each resource; a pod-level limit only if no container
        // requests the resource.
        let mut spec = json!({"containers": [container("1"), container("2")], "overhead": {"cpu": "250m"},
            "resources": {"requests": {"cpu": "4"}, "limits": {"cpu": "8", "memory": "2Mi"}}});
        let found = requests_of(&spec);
        assert_eq!((found.cpu_millicores, found.memory_bytes), (4250, 2 << 20));
        spec["resources"] = json!({"limits": {"cpu": "8"}});
        assert_eq!(requests_of(&spec).cpu_millicores, 3250);
    }
}
