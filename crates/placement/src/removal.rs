//! Removes recorded additions from lists.

use std::{collections::HashMap, hash::Hash};

/// Removes each of the `added` elements once, because the author may have written an equal element.
/// Of several equal elements it removes the last. Returns the indexes of the removed elements in
/// descending order, so that each index is still right after the removals before it.
///
/// Counts the added elements in a map instead of searching the list for each of them, because a
/// forged record may name an element a thousand times.
pub(super) fn remove_each<T: Hash + Eq>(
    list: &mut Vec<T>,
    added: impl IntoIterator<Item = T>,
) -> Vec<usize> {
    let mut wanted: HashMap<T, usize> = HashMap::new();
    for element in added {
        *wanted.entry(element).or_default() += 1;
    }
    let mut found = Vec::new();
    for (index, element) in list.iter().enumerate().rev() {
        if let Some(count) = wanted.get_mut(element).filter(|count| **count > 0) {
            *count -= 1;
            found.push(index);
        }
    }
    for index in &found {
        list.remove(*index);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_elements_are_counted() {
        let mut list = vec!["a", "b", "a", "c", "a"];
        assert_eq!(
            remove_each(&mut list, ["a", "c", "a", "missing"]),
            [4, 3, 2]
        );
        assert_eq!(list, ["a", "b"]);
        assert!(remove_each(&mut list, []).is_empty());
    }
}
