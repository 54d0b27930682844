//! Parses JSON objects that other programs wrote.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::Value;

/// A value that is a JSON object. serde's derived structs also accept a list with their fields in
/// order, but no format that archaware reads has such lists.
#[derive(Debug, Default)]
pub struct Object<T>(pub T);

/// Parses a JSON object.
///
/// # Errors
///
/// When the bytes are not JSON, not an object, or of another structure.
pub fn object<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(bytes).map(|Object(value)| value)
}

/// Removes the fields that are null: Go's decoder, for which most formats are made, treats a field
/// that is null like a missing field, and its encoder writes null for an empty list or map.
pub fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// A value that is the default if it is null, for single fields ([`remove_nulls`]).
///
/// # Errors
///
/// When the value has another type.
pub fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer
            .deserialize_map(ObjectVisitor(PhantomData))
            .map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize, Default)]
    #[serde(default)]
    struct Fields {
        a: Option<Object<Inner>>,
    }

    #[derive(Deserialize)]
    struct Inner {
        b: u8,
    }

    #[test]
    fn lists_are_no_objects() {
        let read = object::<Fields>(br#"{"a": {"b": 1}}"#).unwrap();
        assert_eq!(read.a.unwrap().0.b, 1);
        assert!(object::<Fields>(b"{}").unwrap().a.is_none());
        for bad in [
            "[]",
            "[[1]]",
            r#"{"a": [1]}"#,
            r#""a""#,
            "null",
            "",
            "{} {}",
        ] {
            assert!(object::<Fields>(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(
            serde_json::from_str::<Fields>("[]").is_ok(),
            "without the wrapper"
        );
    }
}
