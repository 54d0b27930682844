//! Prints a configuration as YAML, with the doc comment of each key beside the key.
//! docs/configuration.md shows the defaults in this form.

use serde_json::Value;

use super::{Config, schema};

/// Where comments begin, unless the value is longer.
const COLUMN: usize = 32;

/// A configuration as YAML, with the documentation of each key as a comment.
///
/// # Errors
///
/// Never for a configuration that was read from YAML.
pub fn commented(config: &Config) -> Result<String, serde_saphyr::ser::Error> {
    let schema = Value::from(schema());
    let mut text = String::new();
    // The properties of the objects around a line, from the outermost.
    let mut enclosing_properties: Vec<&Value> = vec![properties(&schema)];
    for line in serde_saphyr::to_string(config)?.lines() {
        let depth = (line.len() - line.trim_start().len()) / 2;
        enclosing_properties.truncate(depth + 1);
        let key = line.trim_start().split(':').next().unwrap_or_default();
        let keys = enclosing_properties.last().copied().unwrap_or(&Value::Null);
        let property = keys.get(key).unwrap_or(&Value::Null);
        let inner = resolved(&schema, property);
        if enclosing_properties.len() == depth + 1 {
            enclosing_properties.push(properties(inner));
        }
        match comment(property, inner) {
            Some(comment) => {
                let end = format!("{line:<COLUMN$}# {comment}");
                text += &end.replacen(&format!("{line}#"), &format!("{line} #"), 1);
            }
            None => text += line,
        }
        text += "\n";
    }
    Ok(text)
}

fn properties(object: &Value) -> &Value {
    object.get("properties").unwrap_or(&Value::Null)
}

/// The definition that a property refers to, or the property itself.
fn resolved<'a>(schema: &'a Value, property: &'a Value) -> &'a Value {
    let path = property.get("$ref").and_then(Value::as_str);
    let name = path.and_then(|path| path.rsplit('/').next());
    let definition = name.and_then(|name| schema.get("$defs")?.get(name));
    definition.unwrap_or(property)
}

/// What a property means, and the values that it takes.
fn comment(property: &Value, definition: &Value) -> Option<String> {
    let text = property["description"].as_str()?;
    // Details, for people who read the code, come after the first paragraph.
    let text = text.split("\n\n").next()?.replace(['\n'], " ");
    let text = text.trim_end_matches('.').replace('`', "");
    let values = definition["oneOf"].as_array().into_iter().flatten();
    let values: Vec<&str> = values.filter_map(|value| value["const"].as_str()).collect();
    Some(match values.as_slice() {
        [] | [_] => text,
        [all @ .., last] => format!("{text} ({} or {last})", all.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `ARCHAWARE_UPDATE_GOLDEN=1` the test writes the page.
    #[test]
    fn the_page_of_the_configuration_is_made_from_the_types() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once("```yaml\n").unwrap();
        let (found, after) = rest.split_once("```").unwrap();
        let expected = commented(&Config::default()).unwrap();
        if std::env::var_os("ARCHAWARE_UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, format!("{before}```yaml\n{expected}```{after}")).unwrap();
        } else {
            assert_eq!(
                found, expected,
                "run this test with ARCHAWARE_UPDATE_GOLDEN=1"
            );
        }
    }

    /// Helm checks `config` in the values before it renders anything. With
    /// `ARCHAWARE_UPDATE_GOLDEN=1` the test writes the file.
    #[test]
    fn the_schema_of_the_chart_contains_the_configuration() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("charts/archaware/values.schema.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let mut chart: Value = serde_json::from_str(&text).unwrap();
        // Helm's drafts of JSON schema have `definitions`.
        let schema = Value::from(schema()).to_string();
        let mut config: Value =
            serde_json::from_str(&schema.replace("#/$defs/", "#/definitions/")).unwrap();
        let fields = config.as_object_mut().unwrap();
        chart["definitions"] = fields.remove("$defs").unwrap();
        for field in ["$schema", "title", "required"] {
            fields.remove(field);
        }
        // The chart writes these itself.
        let properties = &mut config["properties"];
        properties["apiVersion"] = false.into();
        properties["kind"] = false.into();
        let admission = properties["admission"]["$ref"].take();
        properties["admission"] = serde_json::json!({
            "allOf": [{"$ref": admission}, {"properties": {"enabled": false}}]
        });
        chart["properties"]["config"] = config;
        let expected = format!("{}\n", serde_json::to_string_pretty(&chart).unwrap());
        if std::env::var_os("ARCHAWARE_UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, expected).unwrap();
        } else {
            assert!(
                text == expected,
                "run this test with ARCHAWARE_UPDATE_GOLDEN=1"
            );
        }
    }

    #[test]
    fn every_key_has_a_meaning() {
        let text = commented(&Config::default()).unwrap();
        let without = text.lines().filter(|line| !line.contains("# "));
        // Elements of lists have no key, and keys of maps (`amd64`) have no meaning of their own.
        let without: Vec<&str> = without.filter(|line| line.contains(':')).collect();
        assert_eq!(without, ["  amd64:"]);
        assert_eq!(
            super::super::parse("commented", &text).unwrap(),
            Config::default()
        );
    }
}
