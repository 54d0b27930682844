//! Containers that cannot run on their node because it has another architecture, as Kubernetes
//! reports them. Pure: asks no node, and reads no log.

use jiff::SignedDuration;

use crate::cluster::objects::{ContainerStatus, Pod, StateDetail};

/// The kernel's message for a program of another architecture (`ENOEXEC`). runc, crun, youki,
/// gVisor and Kata pass it on.
pub const EXEC_FORMAT_ERROR: &str = "exec format error";

/// Messages of runtimes for an image index without a manifest for the node, in lower case:
/// containerd, CRI-O and Podman (containers/image, two versions), Docker (`moby`, two cases).
const NO_MATCHING_PLATFORM: [&str; 5] = [
    "no match for platform in manifest",
    "no image found in image index for architecture",
    "no image found in manifest list for architecture",
    "no matching manifest for",
    "does not match the specified platform",
];

/// A program that ran for longer than this can run on the node: by emulation, or because its image
/// names a wrong architecture.
const AT_ONCE: SignedDuration = SignedDuration::from_secs(10);

/// Why a container cannot run on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WrongArchitectureCause {
    /// The kernel does not execute its program.
    ExecFormatError,
    /// Its image index has no manifest for the platform of the node.
    NoMatchingPlatform,
    /// It fails as soon as it starts, and its image is not for the architecture of the node.
    ImageLacksArchitecture,
}

impl WrongArchitectureCause {
    /// The cause that a message of a runtime, or of an event, proves.
    pub fn of_message(message: &str) -> Option<Self> {
        let message = message.to_lowercase();
        if message.contains(EXEC_FORMAT_ERROR) {
            return Some(Self::ExecFormatError);
        }
        let mut known_texts = NO_MATCHING_PLATFORM.iter();
        known_texts
            .any(|text| message.contains(text))
            .then_some(Self::NoMatchingPlatform)
    }

    /// The cause in words, for messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ExecFormatError => EXEC_FORMAT_ERROR,
            Self::NoMatchingPlatform => "no match for the platform of the node",
            Self::ImageLacksArchitecture => "it does not start, or ends at once",
        }
    }
}

/// A container that cannot run on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongArchitecture {
    /// Name of the container.
    pub container: String,
    /// Its image, as the pod names it.
    pub image: String,
    /// The cause, by the container's status, an event, or the architectures of its image.
    pub cause: WrongArchitectureCause,
}

/// The containers of a pod that cannot run on its node. `event_cause`: a container, and the cause
/// that an event proves for it. `lacks`: whether the image of the container with this name is known
/// not to run on the node.
pub fn find(
    pod: &Pod,
    event_cause: Option<(&str, WrongArchitectureCause)>,
    lacks: impl Fn(&str) -> bool,
) -> Vec<WrongArchitecture> {
    let failing = pod.status.containers().filter(|status| is_failing(status));
    let containers = failing.filter_map(|status| {
        let name = status.name.as_str();
        let event_cause = event_cause.filter(|(container, _)| *container == name);
        let lacking = || {
            let is_possible = may_be_wrong_architecture(status) && lacks(name);
            is_possible.then_some(WrongArchitectureCause::ImageLacksArchitecture)
        };
        let cause = of_status(status)
            .or(event_cause.map(|(_, cause)| cause))
            .or_else(lacking)?;
        Some(WrongArchitecture {
            container: name.to_owned(),
            image: image_of(pod, name).to_owned(),
            cause,
        })
    });
    containers.collect()
}

/// Whether another architecture can be the reason for a container's failure, so that it is worth
/// resolving its image.
pub fn may_be_wrong_architecture(status: &ContainerStatus) -> bool {
    let is_pulled = |detail: &StateDetail| {
        let reason = detail.reason.as_deref();
        matches!(reason, Some("ErrImagePull" | "ImagePullBackOff"))
    };
    is_failing(status)
        && (status.failures().any(failed_at_once)
            || status.state.waiting.as_ref().is_some_and(is_pulled))
}

/// Whether the container waits after a failure, or has ended. The state `waiting` alone is no
/// failure: a container that is still starting has it, too.
pub fn says_failure(status: &ContainerStatus) -> bool {
    let is_starting = |detail: &StateDetail| {
        let reason = detail.reason.as_deref();
        matches!(reason, None | Some("ContainerCreating" | "PodInitializing"))
    };
    let waiting = status.state.waiting.as_ref();
    status.state.terminated.is_some() || waiting.is_some_and(|detail| !is_starting(detail))
}

/// Whether the container is failing now. A container that runs again can run on its node, whatever
/// failed before.
fn is_failing(status: &ContainerStatus) -> bool {
    !status.ready && status.state.running.is_none()
}

/// The cause that the messages of a container prove.
fn of_status(status: &ContainerStatus) -> Option<WrongArchitectureCause> {
    let mut messages = status
        .details()
        .filter_map(|detail| detail.message.as_deref());
    messages.find_map(WrongArchitectureCause::of_message)
}

/// If the kernel does not execute a program, the exit code is 1 or 255 (runc, crun), 126 (a shell),
/// 127 (no dynamic loader of that architecture), 128 (`StartError` of containerd), or 128 plus a
/// signal (132: an instruction that the CPU does not have). A program that was killed (137) or
/// terminated (143) has run.
fn failed_at_once(ended: &StateDetail) -> bool {
    let is_stopped =
        matches!(ended.exit_code, Some(137 | 143)) || ended.reason.as_deref() == Some("OOMKilled");
    let lasted = ended.started_at.as_ref().zip(ended.finished_at.as_ref());
    let lasted = lasted.map(|(started, finished)| finished.0.duration_since(started.0));
    // A container that never started has 1970 as its start.
    let has_run = lasted.is_some_and(|time| {
        time > AT_ONCE
            && ended
                .started_at
                .as_ref()
                .is_some_and(|start| start.0.as_second() > 0)
    });
    !is_stopped && !has_run
}

/// The image of a container in the pod's spec.
fn image_of<'a>(pod: &'a Pod, container: &str) -> &'a str {
    let spec = &pod.spec;
    let mut containers = spec.containers.iter().chain(&spec.init_containers);
    let found = containers.find(|candidate| candidate.name == container);
    found
        .and_then(|container| container.image.as_deref())
        .unwrap_or_default()
}

/// The reference of the running image, by its digest, from `imageID`; `None` if the runtime knows
/// only the digest of the image's config.
pub fn running_reference(status: &ContainerStatus) -> Option<&str> {
    let id = status.image_id.as_str();
    let id = id.strip_prefix("docker-pullable://").unwrap_or(id);
    id.contains("@sha").then_some(id)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{WrongArchitectureCause as Cause, *};

    fn pod(status: &Value) -> Pod {
        let mut container = json!({"name": "c", "imageID": "r/app@sha256:1"});
        json_patch::merge(&mut container, status);
        serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "app:1"}]},
            "status": {"phase": "Running", "containerStatuses": [container]},
        }))
        .unwrap()
    }

    fn ended(code: i32, seconds: i64, more: &Value) -> Value {
        let at = |second: i64| {
            jiff::Timestamp::from_second(1_700_000_000 + second)
                .unwrap()
                .to_string()
        };
        let mut ended = json!({"exitCode": code, "reason": "Error", "startedAt": at(0), "finishedAt": at(seconds)});
        json_patch::merge(&mut ended, more);
        json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}})
    }

    fn waits(reason: &str, message: &str) -> Value {
        json!({"state": {"waiting": {"reason": reason, "message": message}}})
    }

    const EXEC: Option<Cause> = Some(Cause::ExecFormatError);
    const PLATFORM: Option<Cause> = Some(Cause::NoMatchingPlatform);
    const LACKS: Option<Cause> = Some(Cause::ImageLacksArchitecture);

    /// Checks the cause of a status if the image fits the node (second value), and if it does not
    /// (third value).
    fn check<const N: usize>(cases: [(Value, Option<Cause>, Option<Cause>); N]) {
        for (status, fitting, lacking) in cases {
            let pod = pod(&status);
            let cause = |lacks| {
                find(&pod, None, |_| lacks)
                    .first()
                    .map(|container| container.cause)
            };
            assert_eq!((cause(false), cause(true)), (fitting, lacking), "{status}");
        }
    }

    #[test]
    fn programs_that_are_not_executed() {
        let none = json!({});
        let never = json!({"reason": "StartError", "startedAt": "1970-01-01T00:00:00Z",
            "message": "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: exec /app: exec format error: unknown"});
        let quiet =
            json!({"reason": "StartError", "startedAt": "1970-01-01T00:00:00Z", "message": ""});
        check([
            (ended(1, 0, &none), None, LACKS),
            (ended(255, 1, &none), None, LACKS),
            (ended(126, 0, &none), None, LACKS),
            (ended(127, 0, &none), None, LACKS),
            (ended(132, 0, &none), None, LACKS),
            (ended(128, 0, &never), EXEC, EXEC),
            (ended(128, 0, &quiet), None, LACKS),
            // These programs ran.
            (ended(1, 60, &none), None, None),
            (ended(143, 0, &none), None, None),
            (ended(137, 0, &json!({"reason": "OOMKilled"})), None, None),
            (ended(0, 0, &json!({"reason": "Completed"})), None, None),
            // With `terminationMessagePolicy: FallbackToLogsOnError` the message is the end of the
            // log.
            (
                ended(1, 0, &json!({"message": "exec /app: exec format error\n"})),
                EXEC,
                EXEC,
            ),
            (
                waits(
                    "RunContainerError",
                    "crun: exec container process `/app`: Exec format error",
                ),
                EXEC,
                EXEC,
            ),
            (
                waits(
                    "CreateContainerError",
                    "failed to create container: ENOEXEC: Exec format error",
                ),
                EXEC,
                EXEC,
            ),
        ]);
    }

    #[test]
    fn images_that_are_not_pulled() {
        check([
            // containerd
            (
                waits(
                    "ErrImagePull",
                    "rpc error: code = NotFound desc = failed to pull and unpack image \"r/app:1\": no match for platform in manifest: not found",
                ),
                PLATFORM,
                PLATFORM,
            ),
            // CRI-O, current and older versions
            (
                waits(
                    "ErrImagePull",
                    "choosing image instance: no image found in image index for architecture \"arm64\", variant \"v8\", OS \"linux\"",
                ),
                PLATFORM,
                PLATFORM,
            ),
            (
                waits(
                    "ImagePullBackOff",
                    "Back-off pulling image \"app:1\": ErrImagePull: no image found in manifest list for architecture arm64, variant \"\", OS linux",
                ),
                PLATFORM,
                PLATFORM,
            ),
            // cri-dockerd
            (
                waits(
                    "ErrImagePull",
                    "no matching manifest for linux/arm64/v8 in the manifest list entries",
                ),
                PLATFORM,
                PLATFORM,
            ),
            (
                waits(
                    "ErrImagePull",
                    "image with reference app:1 was found but does not match the specified platform: wanted linux/arm64, actual: linux/amd64",
                ),
                PLATFORM,
                PLATFORM,
            ),
            // While the kubelet backs off, its message may omit the cause of the failed pull.
            (
                waits("ImagePullBackOff", "Back-off pulling image \"app:1\""),
                None,
                LACKS,
            ),
            (waits("ErrImagePull", "unauthorized"), None, LACKS),
            (waits("ContainerCreating", ""), None, None),
            (
                waits("CreateContainerConfigError", "secret \"a\" not found"),
                None,
                None,
            ),
            (
                json!({"ready": true, "lastState": {"terminated": {"exitCode": 1, "message": "exec format error"}}}),
                None,
                None,
            ),
            (
                json!({"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {"terminated": {"exitCode": 1, "message": "exec format error"}}}),
                None,
                None,
            ),
        ]);
    }

    #[test]
    fn an_event_tells_of_one_container() {
        let pod = pod(&ended(1, 0, &json!({})));
        let event_cause =
            |container| find(&pod, Some((container, Cause::ExecFormatError)), |_| false);
        let expected = [WrongArchitecture {
            container: "c".to_owned(),
            image: "app:1".to_owned(),
            cause: Cause::ExecFormatError,
        }];
        assert_eq!(event_cause("c"), expected);
        assert_eq!(event_cause("d"), []);
    }

    #[test]
    fn the_image_that_runs_is_named_by_its_digest() {
        for (id, expected) in [
            (
                "docker.io/library/a@sha256:1",
                Some("docker.io/library/a@sha256:1"),
            ),
            ("docker-pullable://a@sha256:1", Some("a@sha256:1")),
            ("sha256:1", None),
            ("", None),
        ] {
            let status = ContainerStatus {
                image_id: id.to_owned(),
                ..ContainerStatus::default()
            };
            assert_eq!(running_reference(&status), expected);
        }
    }
}
