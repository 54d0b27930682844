//! Error chains as text, and errors that repeat.

use std::error::Error;

/// An error and its causes on one line, joined by colons.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat their source in their own message.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Remembers the last error of a retry loop, so that the caller logs it only when it changes.
#[derive(Debug, Default)]
pub struct RepeatedError(Option<String>);

impl RepeatedError {
    /// The text of the error, or `None` if it equals the previous one.
    pub fn changed(&mut self, error: &dyn Error) -> Option<&str> {
        let text = chain(error);
        if self.0.as_ref() == Some(&text) {
            return None;
        }
        Some(self.0.insert(text))
    }

    /// Forgets the error: the operation has succeeded.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_logged_when_it_changes() {
        let mut repeated = RepeatedError::default();
        let (a, b) = (std::io::Error::other("a"), std::io::Error::other("b"));
        assert_eq!(repeated.changed(&a), Some("a"));
        assert_eq!(repeated.changed(&a), None);
        assert_eq!(repeated.changed(&b), Some("b"));
        repeated.clear();
        assert_eq!(repeated.changed(&b), Some("b"));
    }
}
