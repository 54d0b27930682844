//! Makes text of users, registries and servers safe for messages. Such text can contain terminal
//! commands or Unicode's bidirectional controls, which reorder letters, and it can be as long as
//! the document that contains it.

use std::fmt::Write;

/// What replaces a character that is not shown.
const REPLACEMENT: char = '\u{fffd}';

/// Replaces bidirectional controls, noncharacters, and control characters other than line feeds.
pub fn printable(text: &str) -> String {
    let shown = |c: char| if c == '\n' { c } else { shown(c) };
    text.chars().map(shown).collect()
}

/// The beginning of a text as one line, at most `max` characters. A cut text ends with `…`.
pub fn brief(text: &str, max: usize) -> String {
    let is_cut = text.char_indices().nth(max).is_some();
    let kept = if is_cut { max.saturating_sub(1) } else { max };
    let mut short: String = text.chars().take(kept).map(shown).collect();
    if is_cut {
        short.push('…');
    }
    short
}

/// A list as text, at most `max` elements; the rest is counted.
pub fn brief_list<T: AsRef<str>>(
    list: impl IntoIterator<Item = T>,
    separator: &str,
    max: usize,
) -> String {
    let mut list = list.into_iter();
    let mut text = String::new();
    for (index, element) in list.by_ref().take(max).enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        text.push_str(element.as_ref());
    }
    let more = list.count();
    if more > 0 {
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}and {more} more");
    }
    text
}

/// The text as one line for a report. Replaces U+FFFE and U+FFFF, which XML 1.0 forbids (section
/// 2.2), and the last two code points of every other plane.
pub fn one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { shown(c) };
    text.chars().map(shown).collect()
}

fn shown(c: char) -> char {
    let is_no_character = u32::from(c) & 0xfffe == 0xfffe;
    if c.is_control() || is_no_character || is_bidirectional(c) {
        REPLACEMENT
    } else {
        c
    }
}

/// Whether a character turns the order of other characters around (Unicode Standard Annex 9).
fn is_bidirectional(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_commands_are_shown() {
        assert_eq!(printable("a\u{1b}[2J\nb\u{202e}c\u{200f}"), "a�[2J\nb�c�");
        assert_eq!(brief("a\u{1b}\nb", 4), "a��b");
        assert_eq!(
            one_line("a\n\t\u{fffe}\u{ffff}\u{1ffff}\u{fffd}\u{2066}b"),
            "a  �����b"
        );
    }

    #[test]
    fn long_texts_are_cut() {
        for (text, max, expected) in [
            ("", 3, ""),
            ("abc", 3, "abc"),
            ("abcd", 3, "ab…"),
            ("äöüß", 2, "ä…"),
        ] {
            assert_eq!(brief(text, max), expected);
        }
        let long = "x".repeat(1 << 20);
        assert_eq!(brief(&long, 100).chars().count(), 100);
        assert_eq!(brief_list(["a", "b"], ", ", 2), "a, b");
        assert_eq!(
            brief_list(["a", "b", "c", "d"], "; ", 2),
            "a; b; and 2 more"
        );
    }
}
