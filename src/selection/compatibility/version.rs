//! Versions as Node Feature Discovery compares them (`type: version`). It parses them with
//! `NewVersion` of `Masterminds/semver`, which also accepts `5.15`. It ignores the pre-release, so
//! that the kernel `6.1.0-18-amd64` is `6.1.0`.

use std::{fmt, num::ParseIntError, str::FromStr};

/// Major, minor and patch version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version([u64; 3]);

/// Text that is no version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidVersion;

impl From<ParseIntError> for InvalidVersion {
    fn from(_: ParseIntError) -> Self {
        Self
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

impl FromStr for Version {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let (text, metadata) = split(text, '+');
        let (numbers, pre_release) = split(text, '-');
        let is_valid_suffix = |part: Option<&str>, is_one: fn(&str) -> bool| {
            part.is_none_or(|part| part.split('.').all(is_one))
        };
        if !is_valid_suffix(metadata, is_identifier)
            || !is_valid_suffix(pre_release, is_pre_release)
        {
            return Err(InvalidVersion);
        }
        let mut version = [0; 3];
        let mut places = version.iter_mut();
        for number in numbers.split('.') {
            // `u64::from_str` also accepts a leading `+`.
            if !is_number(number) {
                return Err(InvalidVersion);
            }
            *places.next().ok_or(InvalidVersion)? = number.parse()?;
        }
        Ok(Self(version))
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at)
        .map_or((text, None), |(before, after)| (before, Some(after)))
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_identifier(part: &str) -> bool {
    let is_one = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !part.is_empty() && part.bytes().all(is_one)
}

/// A numeric identifier of a pre-release has no leading zero.
fn is_pre_release(part: &str) -> bool {
    is_identifier(part) && !(part.len() > 1 && part.starts_with('0') && is_number(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        let read = |text: &str| text.parse::<Version>().ok().map(|version| version.0);
        for (text, expected) in [
            ("6", Some([6, 0, 0])),
            ("6.1", Some([6, 1, 0])),
            ("v6.1.20", Some([6, 1, 20])),
            ("06.01", Some([6, 1, 0])),
            ("6.1.0-18-amd64", Some([6, 1, 0])),
            ("6.8.0-rc.1+build.7", Some([6, 8, 0])),
            ("6.8.0+a-b", Some([6, 8, 0])),
            ("6-rc", Some([6, 0, 0])),
            // The kernel versions of Red Hat contain `_`, which is invalid.
            ("5.14.0-427.el9_4.x86_64", None),
            ("6.8.0-01", None),
            ("6.8.0-a..b", None),
            ("6.8.0-", None),
            ("6.8.0+", None),
            ("6.8.0.1", None),
            ("6.", None),
            ("+6", None),
            ("vv6", None),
            ("", None),
            ("six", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        assert!(read("6.10") > read("6.9.9"));
    }
}
