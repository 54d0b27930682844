//! A real Chromium, by the protocol of `WebDriver` (W3C), which chromedriver speaks.

use std::{path::Path, time::Duration};

use base64::Engine;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::free_port;

use super::{Process, eventually};

/// The key of an element in answers, as the standard defines it.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one window. Ends with its test.
pub struct Browser {
    http: Client,
    session: String,
    _dir: TempDir,
    _process: Process,
}

impl Browser {
    /// Starts one without network: every request but those for local files fails. `dark`: what the
    /// system prefers.
    pub async fn start(dark: bool) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let (port_flag, log) = (format!("--port={port}"), dir.path().join("log"));
        // In a PID namespace, so that its Chromium ends with it, however the test ends.
        let arguments = [
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "chromedriver",
            &port_flag,
        ];
        let process = Process::start("unshare", &arguments, &log, false);
        let http = Client::builder()
            .timeout(Duration::from_mins(1))
            .tls_certs_only([])
            .build()
            .unwrap();
        let server = format!("http://127.0.0.1:{port}");
        let profile = format!("--user-data-dir={}", dir.path().join("profile").display());
        let mut flags = vec![
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1200,1000",
            &profile,
        ];
        if dark {
            flags.push("--blink-settings=preferredColorScheme=0");
        }
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}}});
        let session = eventually("a browser", || async {
            let request = http.post(format!("{server}/session"));
            let answer = request.body(capabilities.to_string()).send().await.ok()?;
            let answer: Value = serde_json::from_slice(&answer.bytes().await.ok()?).ok()?;
            Some(answer["value"]["sessionId"].as_str()?.to_owned())
        })
        .await;
        Self {
            session: format!("{server}/session/{session}"),
            http,
            _dir: dir,
            _process: process,
        }
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let mut request = self.http.request(
            method,
            format!("{}/{path}", self.session).trim_end_matches('/'),
        );
        if let Some(body) = body {
            request = request.body(body.to_string());
        }
        let answer = request.send().await.unwrap().bytes().await.unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        let value = answer["value"].clone();
        assert!(value["error"].is_null(), "{path}: {value}");
        value
    }

    /// Opens a file, with something after `#`.
    pub async fn open(&self, file: &Path, hash: &str) {
        // Another address first: a change after # alone does not load the page again.
        self.send(Method::POST, "url", Some(json!({"url": "about:blank"})))
            .await;
        let url = format!("file://{}{hash}", file.display());
        self.send(Method::POST, "url", Some(json!({ "url": url })))
            .await;
    }

    /// The value of an expression in the page.
    pub async fn evaluate(&self, expression: &str) -> Value {
        let script = format!("return {expression};");
        let body = json!({"script": script, "args": []});
        self.send(Method::POST, "execute/sync", Some(body)).await
    }

    /// Types into the element that has the focus. `\u{E004}` is Tab, `\u{E007}` Enter.
    pub async fn keys(&self, text: &str) {
        let element = self.send(Method::GET, "element/active", None).await;
        let id = element[ELEMENT].as_str().unwrap();
        let body = json!({ "text": text });
        self.send(Method::POST, &format!("element/{id}/value"), Some(body))
            .await;
    }

    /// Clicks on the element of a CSS selector.
    pub async fn click(&self, selector: &str) {
        let body = json!({"using": "css selector", "value": selector});
        let element = self.send(Method::POST, "element", Some(body)).await;
        let id = element[ELEMENT].as_str().unwrap();
        self.send(
            Method::POST,
            &format!("element/{id}/click"),
            Some(json!({})),
        )
        .await;
    }

    /// The page as PDF, on the paper that it asks for.
    pub async fn print(&self) -> Vec<u8> {
        let pdf = self.send(Method::POST, "print", Some(json!({}))).await;
        let engine = base64::engine::general_purpose::STANDARD;
        engine.decode(pdf.as_str().unwrap()).unwrap()
    }

    /// Changes the size of the window, in pixels.
    pub async fn resize(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height});
        self.send(Method::POST, "window/rect", Some(size)).await;
    }

    /// A screenshot of the window, as PNG.
    pub async fn screenshot(&self) -> Vec<u8> {
        let image = self.send(Method::GET, "screenshot", None).await;
        let engine = base64::engine::general_purpose::STANDARD;
        engine.decode(image.as_str().unwrap()).unwrap()
    }

    /// What the page printed on its console: errors, too.
    pub async fn console(&self) -> Vec<String> {
        let log = self
            .send(Method::POST, "se/log", Some(json!({"type": "browser"})))
            .await;
        let lines = log.as_array().unwrap().iter();
        lines
            .map(|line| line["message"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Closes it.
    pub async fn close(self) {
        self.send(Method::DELETE, "", None).await;
    }
}
