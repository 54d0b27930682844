//! Serialisation of durations in the configuration.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Longer durations are rejected as mistakes.
const MAX: Duration = Duration::from_hours(30 * 24);

pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    let text = jiff::SignedDuration::try_from(*time).map(|time| format!("{time:#}"));
    serializer.serialize_str(&text.map_err(serde::ser::Error::custom)?)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    let malformed = || D::Error::custom(format!("{text:?} is not a duration like 500ms, 5s or 2m"));
    let time = crate::duration::parse(&text).ok_or_else(malformed)?;
    if time.is_zero() || time > MAX {
        return Err(D::Error::custom(format!(
            "{text:?} is not between 1ns and 30 days"
        )));
    }
    Ok(time)
}
