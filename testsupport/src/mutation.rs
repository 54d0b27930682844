//! Random changes of JSON documents, for property tests of their parsers: a parser sees documents
//! that are valid for the most part, so that its later steps are tested, too.

use proptest::{collection, prelude::*, sample::Index};
use serde_json::Value;

/// Maximum number of changes of a document.
const CHANGES: usize = 4;

/// `sample`, with some of its values replaced by random JSON that uses the same keys.
pub fn mutated(sample: Value) -> impl Strategy<Value = Value> {
    let mut keys = vec!["other".to_owned()];
    let mut pointers = Vec::new();
    visit(&sample, "", &mut keys, &mut pointers);
    let changes = collection::vec((any::<Index>(), any_json(keys)), 0..=CHANGES);
    changes.prop_map(move |changes| {
        let mut changed = sample.clone();
        for (index, value) in changes {
            // An earlier change may have removed the place.
            if let Some(place) = changed.pointer_mut(&pointers[index.index(pointers.len())]) {
                *place = value;
            }
        }
        changed
    })
}

/// Collects the keys, and the pointers of all values.
fn visit(value: &Value, pointer: &str, keys: &mut Vec<String>, pointers: &mut Vec<String>) {
    pointers.push(pointer.to_owned());
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                keys.push(key.clone());
                let key = key.replace('~', "~0").replace('/', "~1");
                visit(value, &format!("{pointer}/{key}"), keys, pointers);
            }
        }
        Value::Array(elements) => {
            for (index, value) in elements.iter().enumerate() {
                visit(value, &format!("{pointer}/{index}"), keys, pointers);
            }
        }
        _ => {}
    }
}

fn any_json(keys: Vec<String>) -> impl Strategy<Value = Value> {
    let key = prop_oneof![3 => prop::sample::select(keys), 1 => "\\PC{0,8}"];
    let text = prop_oneof![
        key.clone(),
        Just(String::new()),
        ".{0,40}".prop_map(String::from)
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            collection::btree_map(key.clone(), inner, 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}
