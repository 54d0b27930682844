//! Reports with hostile text, read by the programs that people read them with.

use super::*;

/// Who may push a manifest for review may write any text into it.
#[tokio::test]
async fn hostile_text_stays_text() {
    let name = r#""a\e[2J\uFFFE\u202E=1""#;
    let broken = format!(
        "{{kind: Deployment, metadata: {{name: {name}}}, spec: {{template: {{spec: {{containers: 7}}}}}}}}"
    );
    let output = report(&broken, &["-f", "-"]).await;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("Deployment a"), "{error}");
    assert!(!error.contains('\u{1b}'), "{error}");
    let pod = "{spec: {containers: [{name: a, image: \"\\e[2J\\uFFFF;=1\"}]}}";
    let hostile = format!(
        "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: {name}}}, spec: {{replicas: 18446744073709551615, template: {pod}}}}}"
    );
    let both = format!("{hostile}\n---\n{}", deployment("b", 3, &[]));
    for format in ["table", "html", "markdown", "csv", "junit"] {
        let output = report(&both, &["-f", "-", "-o", format]).await;
        let text = stdout(&output);
        for c in ['\u{1b}', '\u{fffe}', '\u{ffff}', '\u{202e}'] {
            assert!(!text.contains(c), "{c:?} in {format}: {text:?}");
        }
        if format == "junit" {
            assert_eq!(cases(&output).await, "2 2 0", "{text}");
        }
    }
    // As many replicas as the API allows.
    let json = report(&both, &["-f", "-", "-o", "json"]).await;
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        json["summaries"][0]["total"]["pods"],
        3 + i64::from(i32::MAX)
    );
}

/// The test cases in a `JUnit` file, by an XML parser: all, failures and skipped ones.
pub(super) async fn cases(junit: &Output) -> String {
    let count = "import sys, xml.etree.ElementTree as t; r = t.fromstring(sys.stdin.buffer.read()); \
        print(len(r.findall('.//testcase')), len(r.findall('.//failure')), len(r.findall('.//skipped')))";
    let schema = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/servers/report/junit.xsd"
    );
    read_with(
        "xmllint",
        &["--noout", "--schema", schema, "-"],
        &junit.stdout,
    )
    .await;
    let counted = read_with("python3", &["-c", count], &junit.stdout).await;
    counted.trim().to_owned()
}

/// Standard output of a program that reads this text.
async fn read_with(program: &str, arguments: &[&str], text: &[u8]) -> String {
    let mut reader = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = reader.stdin.take().unwrap();
    input.write_all(text).await.unwrap();
    drop(input);
    let output = reader.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{program}: {:?}", output.status);
    stdout(&output).to_owned()
}

/// Names that mean something in Markdown, or in what code hosts make of it.
const MARKUP: [&str; 12] = [
    "a | b",
    "<script>alert(1)</script>",
    "[a](https://example.com)",
    "![a](https://example.com/a.png)",
    "https://example.com/x",
    "www.example.com",
    "team@example.com",
    "mailto:team@example.com",
    "**bold** _a_ ~~b~~ $c$",
    "`code` \\ &amp;",
    "<!-- comment",
    "@team #1",
];

/// The renderer of GitHub Flavored Markdown.
#[tokio::test]
async fn markdown_shows_every_name_as_it_is() {
    let names = MARKUP.map(|name| deployment(name, 1, &[]));
    let output = report(&names.concat(), &["-f", "-", "-o", "markdown"]).await;
    let extensions = ["table", "autolink", "strikethrough"];
    let arguments = extensions.map(|name| ["-e", name]);
    // With raw HTML, as the code hosts pass it to their own filters.
    let arguments = [&["--unsafe"], arguments.as_flattened()].concat();
    let page = read_with("cmark-gfm", &arguments, &output.stdout).await;
    let cells = "import sys, html.parser, json\n\
        class Reader(html.parser.HTMLParser):\n\
        \x20 tags, cells = set(), []\n\
        \x20 def handle_starttag(self, tag, attributes):\n\
        \x20   self.tags.add(tag)\n\
        \x20   if tag == 'td': self.cells.append('')\n\
        \x20 def handle_data(self, data):\n\
        \x20   if self.cells: self.cells[-1] += data\n\
        reader = Reader()\n\
        reader.feed(sys.stdin.read())\n\
        print(json.dumps({'tags': sorted(reader.tags), 'cells': [cell.strip() for cell in reader.cells]}))";
    let read = read_with("python3", &["-c", cells], page.as_bytes()).await;
    let read: Value = serde_json::from_str(&read).unwrap();
    let tags = ["h1", "h2", "p", "table", "tbody", "td", "th", "thead", "tr"];
    assert_eq!(read["tags"], json!(tags), "{page}");
    for name in MARKUP {
        let cell = json!(format!("shop/deployment/{name}"));
        assert!(
            read["cells"].as_array().unwrap().contains(&cell),
            "{cell}\n{page}"
        );
    }
}

/// A terminal obeys control characters; `cat -v` shows them.
#[tokio::test]
async fn a_terminal_gets_no_command_from_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("\u{1b}]0;title\u{7}.yaml");
    // To the title, clears the screen, answers with text, in 7 and in 8 bits.
    let hostile = r#""a\e]0;title\a\e[2J\e[6n\x9b2J\r\b""#;
    let broken =
        "{kind: Deployment, metadata: {name: NAME}, spec: {template: {spec: {containers: 7}}}}";
    let whole = "{kind: Deployment, metadata: {name: NAME}, spec: {template: {spec: {containers: [{name: a, image: NAME}]}}}}";
    let text = format!("{broken}\n---\n{whole}").replace("NAME", hostile);
    std::fs::write(&file, text).unwrap();
    let command = format!(
        "'{}' report --no-cache -f '{}'",
        testsupport::program().display(),
        file.display()
    );
    let terminal = tokio::process::Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("XDG_CACHE_HOME", folder.path())
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let shown = read_with("cat", &["-v"], &terminal.stdout).await;
    assert!(shown.contains("Deployment"), "{shown}");
    // Colours, and the lines of the progress bar, are archaware's own.
    let own = regex::Regex::new(r"\^\[\[[0-9;]*[mK]|\^\[\[\d*[AG]|\^\[\[\?25[lh]|\^M").unwrap();
    let rest = own.replace_all(&shown, "");
    assert!(
        !rest.contains("^[") && !rest.contains("^G") && !rest.contains("^H"),
        "{rest}"
    );
}
