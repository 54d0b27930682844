//! The platforms of one image.

use super::{ImageArchitectures, Os, Platform, Variants};

/// Why an image names no platform. Such an image does not limit where its pod may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
pub enum NoPlatformReason {
    /// The manifest's config is not an image config: a Helm chart, an SBOM, a WebAssembly module, …
    NotAnImage,
    /// Neither the config nor any index entry names an architecture.
    NoArchitecture,
    /// The image is only mounted, as a volume, and is a single manifest: containerd unpacks such an
    /// image whatever its platform is. Of an index it looks for the entry of the node's platform.
    OnlyMounted,
    /// The pull policy is `Never`, and no node is known to hold the image.
    NotHeld,
}

impl NoPlatformReason {
    /// The name used in `inspect -o json`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The platforms of one image, sorted and without duplicates, or the reason why there are none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PlatformSet {
    /// At least one platform.
    Platforms(Box<[Platform]>),
    /// The image does not limit where its pod may run.
    None(NoPlatformReason),
}

impl PlatformSet {
    /// The set of `platforms`, or `None(reason)` when there are none.
    pub fn new(mut platforms: Vec<Platform>, reason: NoPlatformReason) -> Self {
        if platforms.is_empty() {
            return Self::None(reason);
        }
        platforms.sort();
        platforms.dedup();
        Self::Platforms(platforms.into_boxed_slice())
    }

    /// All platforms, of every OS.
    pub fn platforms(&self) -> &[Platform] {
        match self {
            Self::Platforms(platforms) => platforms,
            Self::None(_) => &[],
        }
    }

    /// The reason why there are no platforms.
    pub fn no_platform_reason(&self) -> Option<NoPlatformReason> {
        match self {
            Self::Platforms(_) => None,
            Self::None(reason) => Some(*reason),
        }
    }

    /// The image's architectures for `os`, each with the variants of nodes that run at least one of
    /// the image's platforms; `None` when the image does not limit its pod. An image that exists
    /// only for other operating systems yields the empty set.
    pub fn architectures(&self, os: &Os) -> Option<ImageArchitectures> {
        match self {
            Self::Platforms(platforms) => {
                let platforms_of_os = platforms.iter().filter(|platform| platform.is_for(os));
                let architectures = platforms_of_os.map(|platform| {
                    (
                        platform.architecture().clone(),
                        Variants::that_run_platform(platform),
                    )
                });
                Some(ImageArchitectures::from_variants(architectures))
            }
            Self::None(_) => None,
        }
    }
}
