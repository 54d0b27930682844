//! Results that a later process can use without containerd, for commands that people run again.

use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use crate::{
    cache::{CacheScope, CachedSummary},
    digest::Digest,
    reference::{Reference, Version},
    summary::ImageSummary,
};
use archaware_platform::{NoPlatformReason, Platform, PlatformSet, media_type::MANIFESTS};

use super::{ResolutionSource, Resolved, Resolver};

/// The part of a [`Resolved`] that a later process may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedImage {
    /// The normalised name with its tag, if the registry required no credential. `None` otherwise,
    /// and for a name with a digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
    digest: String,
    media_type: String,
    platforms: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// When the tag pointed at the digest, in seconds since 1970.
    at: u64,
}

impl Resolver {
    /// The part of an answer that a later process may use; `None` if there is nothing new. Leaves
    /// out the tag if the answer needed a credential, because a later process may have other
    /// credentials. Leaves out images with missing children, because they may be complete later.
    pub fn save(&self, resolved: &Resolved) -> Option<SavedImage> {
        let inner = &self.0;
        let is_complete = || {
            inner
                .caches
                .summary(&resolved.digest, CacheScope::Public)
                .is_some()
        };
        if resolved.source == ResolutionSource::Memory
            || inner.settings.per_credential
            || !is_complete()
        {
            return None;
        }
        let is_tagged = matches!(resolved.reference.version(), Version::Tag(_));
        let is_public = resolved.credential.is_none();
        let platforms = resolved.platforms.platforms().iter();
        let note = resolved.platforms.no_platform_reason();
        Some(SavedImage {
            reference: (is_tagged && is_public).then(|| resolved.reference.to_string()),
            digest: resolved.digest.to_string(),
            media_type: resolved.media_type.to_owned(),
            platforms: platforms.map(ToString::to_string).collect(),
            note: note.map(|note| note.as_str().to_owned()),
            at: now(),
        })
    }

    /// Caches the result of an earlier process. The tag keeps its age, so an old tag is looked up
    /// again. Malformed parts are ignored.
    pub fn restore(&self, saved: &SavedImage) {
        let inner = &self.0;
        if inner.settings.per_credential {
            return;
        }
        let Some((digest, summary)) = saved.summary() else {
            return;
        };
        let known = CachedSummary {
            summary: inner.caches.intern(summary),
            last_touched: 0,
        };
        inner
            .caches
            .store_summary(&digest, CacheScope::Public, known);
        let age = now().checked_sub(saved.at).map(Duration::from_secs);
        let seen = age.and_then(|age| Instant::now().checked_sub(age));
        let reference = saved.reference.as_deref();
        let reference = reference.and_then(|name| Reference::parse(name).ok());
        if let (Some(seen), Some(reference)) = (seen, reference) {
            let name = reference.to_string();
            inner
                .caches
                .store_tag(&name, CacheScope::Public, &digest, seen);
        }
    }
}

impl SavedImage {
    fn summary(&self) -> Option<(Digest, ImageSummary)> {
        let digest = self.digest.parse().ok()?;
        let media_type = MANIFESTS
            .into_iter()
            .find(|known| *known == self.media_type)?;
        let platforms: Option<Vec<_>> = self.platforms.iter().map(|text| platform(text)).collect();
        let reasons = [
            NoPlatformReason::NotAnImage,
            NoPlatformReason::NoArchitecture,
        ];
        let reason = reasons
            .into_iter()
            .find(|reason| Some(reason.as_str()) == self.note.as_deref());
        let platforms = match (platforms?, reason) {
            (none, Some(reason)) if none.is_empty() => PlatformSet::None(reason),
            (some, None) if !some.is_empty() => {
                PlatformSet::new(some, NoPlatformReason::NoArchitecture)
            }
            _ => return None,
        };
        let summary = ImageSummary {
            media_type,
            platforms,
        };
        Some((digest, summary))
    }
}

/// Parses what `Display` writes, for example `linux/arm/v7`. `*` is every OS.
fn platform(text: &str) -> Option<Platform> {
    let mut parts = text.splitn(3, '/');
    let (os, architecture) = (parts.next()?, parts.next()?);
    let os = if os == "*" { "" } else { os };
    Platform::new(os, architecture, parts.next().unwrap_or_default())
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map(|since| since.as_secs()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_read_as_they_are_written() {
        for (os, architecture, variant) in [
            ("linux", "amd64", ""),
            ("linux", "amd64", "v3"),
            ("linux", "arm", "v6"),
            ("linux", "arm64", "v8"),
            ("windows", "amd64", ""),
            ("", "s390x", ""),
        ] {
            let written = Platform::new(os, architecture, variant).unwrap();
            assert_eq!(platform(&written.to_string()), Some(written));
        }
        assert_eq!(platform("linux"), None);
    }
}
