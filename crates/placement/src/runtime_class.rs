//! Runtime classes (`spec.runtimeClassName`): their handlers run images that the CPU of a node
//! cannot run. These are WebAssembly modules or, by emulation, programs for another architecture.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_platform::{Architectures, ImageArchitectures, Os, PlatformSet};

use super::{
    RulePlatform,
    affinity::{WeightedTerm, on_architecture},
    demand::{Demand, Source},
};

/// Weight of nodes that need no emulation, the highest that the API allows.
const NATIVE_WEIGHT: u8 = 100;

/// The platforms that the handler of a runtime class runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuntimeClass {
    /// The platforms that its handler runs on nodes of every architecture.
    pub platforms: Vec<RulePlatform>,
}

/// Runtime classes by name.
pub type RuntimeClasses = BTreeMap<String, RuntimeClass>;

/// OS and runtime class of a pod: they decide how its images are run.
#[derive(Clone, Copy, Debug)]
pub struct PodRuntime<'a> {
    /// The OS of the pod.
    pub os: &'a Os,
    /// Its runtime class.
    pub class: Option<&'a str>,
}

/// How a pod's runtime class runs an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunBy {
    /// The node's CPU runs the image. `None` if the image names no platform.
    Cpu(Option<ImageArchitectures>),
    /// The handler of the class runs the image on every node. Nodes of these architectures need no
    /// emulation for the image.
    Handler(ImageArchitectures),
    /// The image is a WebAssembly module. Either the configuration does not contain the pod's
    /// class, or the pod has no class and the configuration names no class for WebAssembly.
    Unknown,
}

/// How an image is run.
pub(super) fn run_by(
    image: &PlatformSet,
    runtime: PodRuntime<'_>,
    classes: &RuntimeClasses,
) -> RunBy {
    let Some(architectures) = image.architectures(runtime.os) else {
        return RunBy::Cpu(None);
    };
    let class = runtime.class.map(|name| classes.get(name));
    let has_platform = |platform: &RulePlatform| {
        let of_os = image.architectures(&platform.os);
        of_os.is_some_and(|set| set.contains(platform.architecture.as_str()))
    };
    match class {
        Some(Some(class)) if class.platforms.iter().any(has_platform) => {
            RunBy::Handler(architectures)
        }
        // Missing configuration must not keep a pod with WebAssembly images from running.
        Some(None) if is_webassembly(image) => RunBy::Unknown,
        None if is_webassembly(image) && !runs_webassembly(classes) => RunBy::Unknown,
        _ => RunBy::Cpu(Some(architectures)),
    }
}

/// The preference for nodes that need no emulation; `None` without such nodes.
pub(super) fn prefer_native(native: &Architectures) -> Option<WeightedTerm> {
    (!native.is_empty()).then(|| WeightedTerm {
        weight: NATIVE_WEIGHT,
        expressions: vec![on_architecture(native.names())],
    })
}

/// The demand for a pod of a class. `native`: the architectures of nodes that need no emulation, or
/// `None` if the handler of the class runs none of the images.
pub fn demand(class: &str, native: Option<&Architectures>) -> Demand {
    let note = |native: &Architectures| {
        let preferred = if native.is_empty() {
            String::new()
        } else {
            let native = native.join(", ");
            format!("; nodes that need no emulation are preferred: {native}")
        };
        format!("runtime class {class} runs its images on nodes of every architecture{preferred}")
    };
    Demand {
        prefer: native.and_then(prefer_native).into_iter().collect(),
        note: native.map(note),
        ..Demand::from_source(Source::RuntimeClass)
    }
}

/// Whether an image has nothing but WebAssembly modules.
fn is_webassembly(image: &PlatformSet) -> bool {
    let platforms = image.platforms();
    !platforms.is_empty()
        && platforms
            .iter()
            .all(|platform| platform.architecture().as_str().starts_with("wasm"))
}

/// Whether a class is known to run WebAssembly modules.
fn runs_webassembly(classes: &RuntimeClasses) -> bool {
    let mut platforms = classes.values().flat_map(|class| &class.platforms);
    platforms.any(|platform| platform.architecture.as_str().starts_with("wasm"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use archaware_platform::{NoPlatformReason, Platform};

    fn image(platforms: &[&str]) -> PlatformSet {
        let platform = |text: &&str| {
            let (os, architecture) = text.split_once('/').unwrap();
            Platform::new(os, architecture, "").unwrap()
        };
        let all = platforms.iter().map(platform).collect();
        PlatformSet::new(all, NoPlatformReason::NotAnImage)
    }

    fn classes(text: &str) -> RuntimeClasses {
        crate::yaml(text)
    }

    #[test]
    fn classes_run_what_the_cpu_does_not() {
        let none = "{}";
        let wasm = "{wasmtime: {platforms: [wasi/wasm]}}";
        let qemu = "{qemu: {platforms: [linux/arm64]}}";
        let set = |text: &str| -> ImageArchitectures {
            if text.is_empty() {
                ImageArchitectures::default()
            } else {
                text.parse().unwrap()
            }
        };
        let cpu = |text: &str| RunBy::Cpu(Some(set(text)));
        let handler = |text: &str| RunBy::Handler(set(text));
        for (platforms, class, configured, expected) in [
            (&["linux/amd64"][..], None, none, cpu("amd64")),
            (&["linux/amd64"], Some("wasmtime"), wasm, cpu("amd64")),
            (&[], Some("wasmtime"), wasm, RunBy::Cpu(None)),
            // WebAssembly.
            (&["wasi/wasm"], Some("wasmtime"), wasm, handler("")),
            (
                &["wasi/wasm", "linux/amd64"],
                Some("wasmtime"),
                wasm,
                handler("amd64"),
            ),
            (&["wasi/wasm", "linux/amd64"], None, wasm, cpu("amd64")),
            (&["wasi/wasm"], None, wasm, cpu("")),
            (&["wasip1/wasm"], Some("wasmtime"), wasm, cpu("")),
            (&["wasi/wasm"], Some("qemu"), qemu, cpu("")),
            // A missing configuration does not limit a pod.
            (&["wasi/wasm"], None, none, RunBy::Unknown),
            (&["wasi/wasm"], None, qemu, RunBy::Unknown),
            (&["wasi/wasm"], Some("spin"), wasm, RunBy::Unknown),
            (&["windows/amd64"], Some("spin"), wasm, cpu("")),
            // Emulation.
            (&["linux/arm64"], Some("qemu"), qemu, handler("arm64")),
            (&["linux/arm64"], None, qemu, cpu("arm64")),
            (&["linux/s390x"], Some("qemu"), qemu, cpu("s390x")),
        ] {
            let runtime = PodRuntime {
                os: &Os::linux(),
                class,
            };
            let found = run_by(&image(platforms), runtime, &classes(configured));
            assert_eq!(found, expected, "{platforms:?} {class:?} {configured}");
        }
    }

    /// Pods that the CPU can run, or that no class can run, get no class.
    #[test]
    fn a_class_is_found_for_images_that_no_cpu_runs() {
        let policy = |schedulable: &str| crate::PlacementPolicy {
            runtime_classes: classes(
                "{wasm-b: {platforms: [wasi/wasm]}, wasm-a: {platforms: [wasi/wasm, linux/arm64]}, \
                 qemu: {platforms: [linux/arm64]}}",
            ),
            schedulable: crate::yaml(schedulable),
            ..crate::PlacementPolicy::default()
        };
        for (images, schedulable, expected) in [
            (&[&["wasi/wasm"][..]][..], "[]", Some("wasm-a")),
            (&[&["wasi/wasm"], &["linux/amd64"]], "[]", Some("wasm-a")),
            (&[&["linux/amd64"], &["linux/arm64"]], "[]", Some("qemu")),
            (&[&["linux/arm64"]], "[amd64]", Some("qemu")),
            (&[&["wasip1/wasm"]], "[]", None),
            (&[&["linux/s390x"], &["linux/arm"]], "[]", None),
        ] {
            let sets: Vec<_> = images.iter().map(|platforms| image(platforms)).collect();
            let policy = policy(schedulable);
            let class = policy.class_for(&sets, &Os::linux());
            assert_eq!(class, expected, "{images:?}");
        }
    }

    #[test]
    fn native_nodes_are_preferred() {
        let arm64: Architectures = "arm64".parse().unwrap();
        let term = prefer_native(&arm64).unwrap();
        assert_eq!(
            term.expressions[0].to_string(),
            "kubernetes.io/arch in (arm64)"
        );
        assert_eq!(term.weight, 100);
        assert_eq!(prefer_native(&Architectures::default()), None);
    }
}
