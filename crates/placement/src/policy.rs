//! Decides where a pod may run, based on the platforms of its images.

pub mod change;
mod runs;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use archaware_platform::{
    Architecture, Architectures, ImageArchitectures, Os, PlatformSet, Variants,
};

pub use runs::NodePlatform;

use super::{
    TaintKind, VariantPolicy,
    author_nodes::AuthorNodes,
    decision::Decision,
    emulation::{Emulation, Emulator},
    runtime_class::{PodRuntime, RunBy, RuntimeClasses, run_by},
    taint::tolerates,
    toleration::{by_rules, covers},
    toleration_rule::TolerationRule,
};

/// Maximum number of architectures. Go supports about twenty, so an image that names more than the
/// maximum is a fake. A toleration for each would make the pod too large for the API server, so the
/// pod tolerates every architecture instead.
const MAX_ARCHITECTURES: usize = 64;

/// Settings that apply to every pod.
#[derive(Clone, Debug)]
pub struct PlacementPolicy {
    /// Key and effect of archaware's taint.
    pub taint: TaintKind,
    /// For each node architecture, the further architectures whose images it can run.
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only architectures that are considered; empty means all.
    pub schedulable: BTreeSet<Architecture>,
    /// Additional tolerations.
    pub tolerations: Vec<TolerationRule>,
    /// What runtime classes run.
    pub runtime_classes: RuntimeClasses,
    /// Nodes that emulate.
    pub emulation: Vec<Emulator>,
    /// Whether architectures are also required by node affinity, where it can still be set.
    pub requires_affinity: bool,
    /// How variants are considered.
    pub variants: VariantPolicy,
    /// The nodes that get a taint.
    pub tainted: Tainted,
}

impl Default for PlacementPolicy {
    /// The policy of an empty configuration.
    fn default() -> Self {
        let pair = "amd64".parse().ok().zip("386".parse().ok());
        Self {
            taint: TaintKind::default(),
            compatibility: pair
                .map(|(node, also)| (node, vec![also]))
                .into_iter()
                .collect(),
            schedulable: BTreeSet::new(),
            tolerations: Vec::new(),
            runtime_classes: RuntimeClasses::new(),
            emulation: Vec::new(),
            requires_affinity: true,
            variants: VariantPolicy::default(),
            tainted: Tainted::default(),
        }
    }
}

/// The architectures whose nodes get a taint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tainted {
    /// Every one.
    #[default]
    All,
    /// Only these architectures; an empty set means none.
    Only(BTreeSet<Architecture>),
}

impl Tainted {
    fn contains(&self, name: Option<&str>) -> bool {
        match (self, name) {
            (Self::All, _) => true,
            (Self::Only(set), Some(name)) => {
                set.iter().any(|architecture| architecture.as_str() == name)
            }
            (Self::Only(set), None) => !set.is_empty(),
        }
    }
}

impl PlacementPolicy {
    /// The architectures of an image; `None` if the image does not limit its pod.
    pub fn of_image(
        &self,
        image: &PlatformSet,
        runtime: PodRuntime<'_>,
    ) -> Option<ImageArchitectures> {
        match run_by(image, runtime, &self.runtime_classes) {
            RunBy::Cpu(set) => Some(set?.map(|set| self.variants.considered(set))),
            RunBy::Handler(_) | RunBy::Unknown => None,
        }
    }

    /// The architectures whose nodes run all of these images without emulation; `None` if the pod's
    /// runtime class emulates none of them.
    pub fn native_architectures<'a>(
        &self,
        images: impl IntoIterator<Item = &'a PlatformSet>,
        runtime: PodRuntime<'_>,
    ) -> Option<Architectures> {
        self.runtime_classes.get(runtime.class?)?;
        let emulated = images.into_iter().filter_map(|image| {
            match run_by(image, runtime, &self.runtime_classes) {
                RunBy::Handler(native) => Some(self.widen(&native.without_variants())),
                RunBy::Cpu(_) | RunBy::Unknown => None,
            }
        });
        emulated.reduce(|shared, set| shared.and(&set))
    }

    /// The node architectures that can run all of these images; `None` if no image limits its pod
    /// ([`Self::of_image`]).
    pub fn shared_architectures<'a>(
        &self,
        images: impl IntoIterator<Item = &'a PlatformSet>,
        runtime: PodRuntime<'_>,
    ) -> Option<Architectures> {
        let images = images.into_iter();
        let sets: Vec<_> = images
            .filter_map(|image| self.of_image(image, runtime))
            .collect();
        self.shared(&sets)
    }

    /// The node architectures that can run all images that limit a pod; `None` without such images.
    pub fn shared<'a>(
        &self,
        images: impl IntoIterator<Item = &'a ImageArchitectures>,
    ) -> Option<Architectures> {
        let sets = images.into_iter().map(|image| self.widen(image));
        sets.reduce(|shared, set| shared.and(&set))
    }

    /// The nodes that run these images by emulation, and the native architectures; `None` if no
    /// emulating node runs all of them.
    pub fn emulation<'a>(
        &self,
        images: impl IntoIterator<Item = &'a PlatformSet> + Clone,
        runtime: PodRuntime<'_>,
    ) -> Option<Emulation> {
        if self.emulation.is_empty() {
            return None;
        }
        let native = self.shared_architectures(images.clone(), runtime)?;
        let runs_all = |emulator: &&Emulator| {
            let name = emulator.architecture.as_str();
            let mut sets = images
                .clone()
                .into_iter()
                .filter_map(|image| self.of_image(image, runtime));
            let is_schedulable =
                self.schedulable.is_empty() || self.schedulable.contains(&emulator.architecture);
            is_schedulable
                && !native.contains(name)
                && sets.all(|set| emulator.emulates(&set) || self.widen(&set).contains(name))
        };
        let emulators: Vec<_> = self.emulation.iter().filter(runs_all).cloned().collect();
        let native = self.within_schedulable(native);
        (!emulators.is_empty()).then_some(Emulation { native, emulators })
    }

    /// The node architectures that run images of these architectures, natively or by emulation.
    /// `labels`: the labels of the node, or `None` for any node.
    pub fn widen_with_emulation(
        &self,
        architectures: &ImageArchitectures,
        labels: Option<&BTreeMap<String, String>>,
    ) -> Architectures {
        let selects =
            |emulator: &Emulator| labels.is_none_or(|labels| emulator.nodes.matches(labels));
        let emulators = self.emulation.iter();
        let emulators =
            emulators.filter(|emulator| emulator.emulates(architectures) && selects(emulator));
        let emulators = emulators.map(|emulator| (emulator.architecture.clone(), Variants::ANY));
        let emulators: Vec<_> = emulators.collect();
        let native = self.widen(architectures);
        let native = native
            .iter()
            .map(|(name, variants)| (name.clone(), variants));
        Architectures::from_variants(native.chain(emulators))
    }

    /// The first runtime class, by name, that runs all of these images. Meant for images that share
    /// no architecture without a class.
    pub fn class_for<'a>(
        &self,
        images: impl IntoIterator<Item = &'a PlatformSet> + Clone,
        os: &Os,
    ) -> Option<&str> {
        let runs = |class: &&str| {
            let runtime = PodRuntime {
                os,
                class: Some(class),
            };
            let shared = self.shared_architectures(images.clone(), runtime);
            self.decide(shared) != Decision::NoCommonArchitecture
        };
        self.runtime_classes.keys().map(String::as_str).find(runs)
    }

    /// The decision for the shared architectures of all images; every architecture is tolerated if
    /// no image names a platform.
    pub fn decide(&self, shared: Option<Architectures>) -> Decision {
        shared.map_or(Decision::TolerateAll, |shared| self.limit(shared))
    }

    /// The architectures that `schedulable` allows.
    pub fn within_schedulable(&self, architectures: Architectures) -> Architectures {
        if self.schedulable.is_empty() {
            architectures
        } else {
            architectures.within(&self.schedulable)
        }
    }

    /// The decision for known architectures.
    pub fn limit(&self, mut architectures: Architectures) -> Decision {
        architectures = self.within_schedulable(architectures);
        architectures = self.variants.considered(architectures);
        if architectures.len() > MAX_ARCHITECTURES {
            Decision::TolerateAll
        } else if architectures.is_empty() {
            Decision::NoCommonArchitecture
        } else {
            Decision::Architectures(architectures)
        }
    }

    /// The node architectures that can run images of these architectures. Not transitive: amd64
    /// nodes run 386 images, but a node that runs amd64 images need not run 386 images.
    pub fn widen(&self, architectures: &ImageArchitectures) -> Architectures {
        let runs_one = |runs: &&Vec<Architecture>| {
            runs.iter()
                .any(|image| architectures.contains(image.as_str()))
        };
        let compatible: Vec<_> = self
            .compatibility
            .iter()
            .filter(|(_, runs)| runs_one(runs))
            .map(|(architecture, _)| (architecture.clone(), Variants::ANY))
            .collect();
        let native = architectures
            .iter()
            .map(|(name, variants)| (name.clone(), variants));
        Architectures::from_variants(native.chain(compatible))
    }

    /// The values of the taints that pods for these architectures tolerate.
    pub fn tolerated_values(&self, set: &Architectures) -> impl Iterator<Item = String> {
        let variants = &self.variants;
        set.iter()
            .flat_map(|(name, sufficient)| variants.tolerated_values(name, sufficient))
    }

    /// The tolerations that a decision requires and that `existing` does not cover by the API's
    /// matching rule.
    pub fn missing_tolerations(
        &self,
        decision: &Decision,
        os: &Os,
        existing: &[Value],
    ) -> Vec<Value> {
        let mut wanted = match decision {
            Decision::Architectures(set) => {
                let values = self.tolerated_values(set);
                let tolerations = values.map(|value| self.taint.taint(value).toleration());
                tolerations
                    .chain(by_rules(&self.tolerations, set, os))
                    .collect()
            }
            Decision::TolerateAll => vec![self.taint.toleration_of_all()],
            Decision::NoCommonArchitecture => Vec::new(),
        };
        wanted.retain(|new| !existing.iter().any(|toleration| covers(toleration, new)));
        wanted
    }

    /// Whether the author of a pod selects only architectures outside of this set, and the taint of
    /// at least one of them keeps the pod away. An autoscaler would then create nodes that the pod
    /// cannot use, again and again.
    pub fn is_excluded(
        &self,
        architectures: &Architectures,
        author: AuthorNodes<'_>,
        tolerations: &[Value],
    ) -> bool {
        let admits = |name: Option<&str>| {
            let architecture = name.and_then(|name| name.parse().ok());
            let values = architecture
                .map(|architecture| self.variants.tolerated_values(&architecture, Variants::ANY));
            let tolerated = |value: String| {
                let taint = self.taint.taint(value);
                tolerations
                    .iter()
                    .any(|toleration| tolerates(toleration, &taint))
            };
            let tolerates_all = || {
                let mut all = tolerations.iter();
                all.any(|toleration| self.taint.is_tolerated_by(toleration))
            };
            !self.tainted.contains(name)
                || tolerates_all()
                || values.is_some_and(|values| values.into_iter().all(tolerated))
        };
        author.excludes_all(architectures) && !author.is_admitted(admits)
    }

    /// Sets of node architectures that share nothing: the sets of single images, and `schedulable`.
    pub fn disjoint(
        &self,
        images: impl IntoIterator<Item = ImageArchitectures>,
    ) -> Vec<Architectures> {
        let schedulable = Some(&self.schedulable).filter(|set| !set.is_empty());
        let schedulable = schedulable.map(|set| set.iter().cloned().collect());
        let images = images
            .into_iter()
            .map(|image| self.widen(&image.without_variants()));
        // Fake sets would make the pod too large, so they are left out. The remaining sets may then
        // share an architecture.
        let images = images.filter(|set| set.len() <= MAX_ARCHITECTURES);
        let mut shared: Option<Architectures> = None;
        let mut sets: Vec<_> = images.chain(schedulable).collect();
        // A set that excludes nothing does not explain the conflict.
        sets.retain(|set| {
            let next = shared
                .as_ref()
                .map_or_else(|| set.clone(), |shared| shared.and(set));
            let narrows = shared.as_ref() != Some(&next);
            shared = Some(next);
            narrows
        });
        if shared.is_none_or(|shared| !shared.is_empty()) {
            sets = vec![Architectures::default()];
        }
        sets
    }
}

#[cfg(test)]
mod tests;
