//! Parsing with a limited number of elements, for input that other people write. Memory depends on
//! the elements of an input, not on its bytes: a list of a hundred thousand small objects has one
//! megabyte as JSON, and hundreds of megabytes as values.
//!
//! The limit works while the input is being parsed. Elements beyond the limit are skipped, so that
//! a list stays readable if one of its objects is too large.

use std::{cell::Cell, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeSeed, EnumAccess, Error, IgnoredAny, MapAccess, SeqAccess, VariantAccess,
        Visitor,
    },
};

/// How much of an input may be kept. The value of a field that the parsed type ignores costs
/// nothing; its name counts.
#[derive(Debug)]
pub struct Budget {
    /// The initial budget: elements and bytes.
    whole: (usize, usize),
    elements: Cell<usize>,
    bytes: Cell<usize>,
    is_exceeded: Cell<bool>,
}

impl Budget {
    /// `elements`: elements of lists and entries of objects. `bytes`: all text together.
    pub fn new(elements: usize, bytes: usize) -> Self {
        Self {
            whole: (elements, bytes),
            elements: Cell::new(elements),
            bytes: Cell::new(bytes),
            is_exceeded: Cell::new(false),
        }
    }

    /// Whether the input exceeded the budget, so that parts of it are missing.
    pub fn is_exceeded(&self) -> bool {
        self.is_exceeded.get()
    }

    /// The elements and bytes of what was parsed.
    pub fn used(&self) -> (usize, usize) {
        let (elements, bytes) = self.whole;
        (elements - self.elements.get(), bytes - self.bytes.get())
    }

    /// Parses as much of an input as fits.
    ///
    /// # Errors
    ///
    /// When the input is malformed, or a part of it is missing that `T` requires.
    pub fn parse<'de, T, D>(&self, input: D) -> Result<T, D::Error>
    where
        T: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        T::deserialize(self.wrap(input))
    }

    fn wrap<T>(&self, inner: T) -> Bounded<'_, T> {
        Bounded {
            inner,
            budget: self,
        }
    }

    fn take_element(&self) {
        self.take(&self.elements, 1);
    }

    fn take_text(&self, text: &str) {
        self.take(&self.bytes, text.len());
    }

    fn take(&self, left: &Cell<usize>, cost: usize) {
        match left.get().checked_sub(cost) {
            Some(rest) if !self.is_exceeded() => left.set(rest),
            _ => self.is_exceeded.set(true),
        }
    }

    /// Whether no further element fits.
    fn is_used_up(&self) -> bool {
        self.is_exceeded() || self.elements.get() == 0
    }
}

/// Wraps a serde deserializer, visitor, seed or access, and counts elements and text.
struct Bounded<'b, T> {
    inner: T,
    budget: &'b Budget,
}

macro_rules! pass_on {
    ($($method:ident($($argument:ident: $type:ty),*)),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method($($argument,)* self.budget.wrap(visitor))
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Bounded<'_, D> {
    type Error = D::Error;

    pass_on! {
        deserialize_any(), deserialize_bool(), deserialize_char(), deserialize_unit(),
        deserialize_i8(), deserialize_i16(), deserialize_i32(), deserialize_i64(), deserialize_i128(),
        deserialize_u8(), deserialize_u16(), deserialize_u32(), deserialize_u64(), deserialize_u128(),
        deserialize_f32(), deserialize_f64(), deserialize_str(), deserialize_string(),
        deserialize_bytes(), deserialize_byte_buf(), deserialize_option(), deserialize_seq(),
        deserialize_map(), deserialize_identifier(),
        deserialize_unit_struct(name: &'static str), deserialize_newtype_struct(name: &'static str),
        deserialize_tuple(len: usize), deserialize_tuple_struct(name: &'static str, len: usize),
        deserialize_struct(name: &'static str, fields: &'static [&'static str]),
        deserialize_enum(name: &'static str, variants: &'static [&'static str]),
    }

    /// Not counted, because ignored input is not kept.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! scalars {
    ($($method:ident: $type:ty),* $(,)?) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Bounded<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    scalars! {
        visit_bool: bool, visit_char: char,
        visit_i8: i8, visit_i16: i16, visit_i32: i32, visit_i64: i64, visit_i128: i128,
        visit_u8: u8, visit_u16: u16, visit_u32: u32, visit_u64: u64, visit_u128: u128,
        visit_f32: f32, visit_f64: f64,
        visit_bytes: &[u8], visit_borrowed_bytes: &'de [u8], visit_byte_buf: Vec<u8>,
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.budget.take_text(text);
        self.inner.visit_str(text)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        self.budget.take_text(text);
        self.inner.visit_borrowed_str(text)
    }

    fn visit_string<E: Error>(self, text: String) -> Result<V::Value, E> {
        self.budget.take_text(&text);
        self.inner.visit_string(text)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, some: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(self.budget.wrap(some))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(self.budget.wrap(inner))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(self.budget.wrap(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(self.budget.wrap(object))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, choice: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(self.budget.wrap(choice))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Bounded<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(self.budget.wrap(input))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        // The end of a list costs nothing, so a list that fits exactly is complete.
        if self.budget.is_used_up() {
            while self.inner.next_element::<IgnoredAny>()?.is_some() {
                self.budget.is_exceeded.set(true);
            }
            return Ok(None);
        }
        let element = self.inner.next_element_seed(self.budget.wrap(seed))?;
        if element.is_some() {
            self.budget.take_element();
        }
        Ok(element)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        if self.budget.is_used_up() {
            while self.inner.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                self.budget.is_exceeded.set(true);
            }
            return Ok(None);
        }
        let key = self.inner.next_key_seed(self.budget.wrap(seed))?;
        if key.is_some() {
            self.budget.take_element();
        }
        Ok(key)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.next_value_seed(self.budget.wrap(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'b, 'de, A: EnumAccess<'de>> EnumAccess<'de> for Bounded<'b, A> {
    type Error = A::Error;
    type Variant = Bounded<'b, A::Variant>;

    fn variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<(T::Value, Self::Variant), A::Error> {
        let (value, variant) = self.inner.variant_seed(self.budget.wrap(seed))?;
        Ok((value, self.budget.wrap(variant)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Bounded<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.newtype_variant_seed(self.budget.wrap(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.inner.tuple_variant(len, self.budget.wrap(visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.inner.struct_variant(fields, self.budget.wrap(visitor))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Parsed {
        list: Vec<Value>,
        map: Option<BTreeMap<String, u8>>,
        last: Option<String>,
    }

    fn parse(text: &str, elements: usize, bytes: usize) -> (Parsed, bool) {
        let budget = Budget::new(elements, bytes);
        let mut input = serde_json::Deserializer::from_str(text);
        let parsed = budget.parse(&mut input).unwrap();
        input.end().unwrap();
        (parsed, budget.is_exceeded())
    }

    #[test]
    fn what_fits_is_complete() {
        let text = r#"{"list": [1, {"a": [true]}], "map": {"x": 1, "y": 2}, "last": "end", "ignored": [1, 2, 3]}"#;
        let whole: Parsed = serde_json::from_str(text).unwrap();
        // Four fields, two elements, one entry with one element, two entries.
        let (elements, bytes) = (10, "listamapxylastendignored".len());
        assert_eq!(parse(text, elements, bytes), (whole, false));
        let budget = Budget::new(1000, 1000);
        let input = &mut serde_json::Deserializer::from_str(text);
        budget.parse::<Parsed, _>(input).unwrap();
        assert_eq!(budget.used(), (elements, bytes));
        assert!(parse(text, elements - 1, bytes).1);
        assert!(parse(text, elements, bytes - 1).1);
    }

    #[test]
    fn the_rest_is_skipped() {
        let list = vec![json!({"key": "a"}); 1000];
        let text = json!({"list": list, "map": {"x": 1}, "last": "end"}).to_string();
        let (parsed, is_exceeded) = parse(&text, 11, usize::MAX);
        assert!(is_exceeded);
        // 11: the fields `last` and `list` (sorted by name), then each object and its key.
        assert_eq!(parsed.list.len(), 5);
        assert_eq!((parsed.map, parsed.last.as_deref()), (None, Some("end")));
        let (parsed, is_exceeded) = parse(&text, usize::MAX, 100);
        assert!(
            is_exceeded && (20..30).contains(&parsed.list.len()),
            "{}",
            parsed.list.len()
        );
    }

    #[test]
    fn every_kind_of_value_passes() {
        #[derive(Debug, PartialEq, Deserialize)]
        enum Kind {
            Unit,
            Newtype(u8),
            Tuple(u8, u8),
            Struct { a: u8 },
        }
        #[derive(Debug, PartialEq, Deserialize)]
        #[serde(untagged)]
        enum Untagged {
            Number(f64),
            Text(String),
        }
        type All = (Vec<Kind>, [Untagged; 2], (i64, bool, char, ()), Option<u8>);
        let text = r#"[["Unit", {"Newtype": 1}, {"Tuple": [1, 2]}, {"Struct": {"a": 1}}], [1.5, "x"], [-1, true, "c", null], 7]"#;
        let budget = Budget::new(100, 100);
        let parsed: All = budget
            .parse(&mut serde_json::Deserializer::from_str(text))
            .unwrap();
        assert_eq!(parsed, serde_json::from_str(text).unwrap());
        assert!(!budget.is_exceeded());
    }
}
