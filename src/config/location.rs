//! Where a key is in the text of a configuration, for errors about values that contradict each
//! other.

use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor},
};
use serde_saphyr::{Location, Spanned};

/// The place of the first of these keys (`a.b.c`) that the text has.
pub(super) fn locate(text: &str, keys: &[&str]) -> Option<Location> {
    keys.iter().find_map(|key| {
        let path: Vec<&str> = key.split('.').collect();
        let found = serde_saphyr::with_deserializer_from_str(text, |deserializer| {
            Find(&path).deserialize(deserializer)
        });
        found.ok().flatten()
    })
}

/// Finds the value at this path of mapping keys.
#[derive(Clone, Copy)]
struct Find<'a>(&'a [&'a str]);

impl<'de> DeserializeSeed<'de> for Find<'_> {
    type Value = Option<Location>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        if self.0.is_empty() {
            let value = Spanned::<IgnoredAny>::deserialize(deserializer)?;
            return Ok(Some(value.referenced));
        }
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Find<'_> {
    type Value = Option<Location>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (wanted, rest) = self
            .0
            .split_first()
            .ok_or_else(|| A::Error::custom("no key"))?;
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == *wanted {
                found = map.next_value_seed(Find(rest))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_in_both_styles() {
        let text = "a: 1\nb:\n  c: {d: [1], e: 2}\n  f:\n    - x\n";
        for (keys, expected) in [
            (&["a"][..], Some((1, 4))),
            (&["b.c.e"], Some((3, 18))),
            (&["b.f"], Some((5, 5))),
            (&["b.g", "b.c.d"], Some((3, 10))),
            (&["b.g", "x.y"], None),
            (&["a.b"], None),
        ] {
            let found = locate(text, keys);
            let found = found.map(|place| (place.line(), place.column()));
            assert_eq!(found, expected, "{keys:?}");
        }
    }
}
