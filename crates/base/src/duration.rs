//! Durations in Go's text format: `500ms`, `5s`, `2m`, `1h30m`, `0`.

use std::time::Duration;

/// Longer durations are cut to this: `Instant` cannot hold every `Duration`.
const MAX: Duration = Duration::from_hours(24 * 365);

/// Parses a non-negative duration. More than a year is cut to a year.
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let signed: jiff::SignedDuration = text.parse().ok()?;
    Some(Duration::try_from(signed).ok()?.min(MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_go_writes_them() {
        for (text, expected) in [
            ("500ms", Some(Duration::from_millis(500))),
            ("1h30m", Some(Duration::from_mins(90))),
            ("0", Some(Duration::ZERO)),
            ("0s", Some(Duration::ZERO)),
            ("999999h", Some(MAX)),
            ("-1s", None),
            ("5", None),
            ("", None),
        ] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }
}
