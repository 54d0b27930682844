//! Client of the server that chooses among nodes by a model. It uses the protocol of ocifit-k8s. If
//! the server fails, the rules of the document decide.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use reqwest::Url;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    config::PredictorConfig, error::chain, expiring_cache::ExpiringCache, lines::SharedPlaces,
    single_flight::SingleFlight,
};

use super::compatibility::{LabelKeys, Model};

/// Lifetime of a cached answer: the pods of a rollout send equal questions.
const TTL: Duration = Duration::from_mins(1);
/// Lifetime of a cached failure: a server that hangs must not cost each pod its timeout.
const FAILURE_TTL: Duration = Duration::from_secs(10);
/// Maximum number of cached answers, by their questions.
const MAX_ANSWERS: usize = 64;
/// Maximum number of concurrent requests, and of those for one tenant.
const MAX_REQUESTS: usize = 8;
const MAX_PER_TENANT: usize = 2;
/// Maximum bytes of a question, because questions are cached with their answers.
const MAX_QUESTION: usize = 256 * 1024;
/// Maximum bytes of an answer; a usual answer has some hundred.
const MAX_ANSWER: usize = 64 * 1024;

/// Asks the server. Cheap to clone.
#[derive(Clone)]
pub(super) struct Predictor(Arc<Inner>);

struct Inner {
    url: Url,
    labels: LabelKeys,
    http: reqwest::Client,
    answers: ExpiringCache<Arc<str>, Answer>,
    flights: SingleFlight<Arc<str>, Answer>,
    places: SharedPlaces,
}

type Answer = Result<Prediction, Arc<str>>;

/// Why `selection.predictor` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PredictorError {
    /// The text is not a URL. The error does not show it, because it may hold a password.
    #[error("selection.predictor.url is no URL")]
    Url,
    /// The file cannot be read.
    #[error("selection.predictor.caBundle: cannot read {}", file.display())]
    Unreadable {
        file: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The file has no certificate.
    #[error("selection.predictor.caBundle: {} has no certificate in PEM", .0.display())]
    NoCertificate(PathBuf),
    /// No TLS client can be made.
    #[error("selection.predictor: cannot set up TLS")]
    Tls(#[source] reqwest::Error),
}

/// The answer of the server: the nodes with this label, and their architecture.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Prediction {
    /// The key of a label.
    #[serde(rename = "instance-selector")]
    pub label: String,
    /// The value of the label. A model that was trained with numbers answers a number.
    #[serde(rename = "instance", deserialize_with = "label_value")]
    pub value: String,
    /// The architecture whose image is used.
    #[serde(rename = "arch")]
    pub architecture: String,
}

impl Prediction {
    /// The error does not repeat the answer.
    fn parse(answer: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(answer).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            format!("its answer is not JSON with instance-selector, instance and arch (line {line}, column {column})")
        })
    }
}

/// Reads a string or a number as the value of a label.
fn label_value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Value {
        Text(String),
        Number(serde_json::Number),
    }
    Ok(match Value::deserialize(deserializer)? {
        Value::Text(text) => text,
        Value::Number(number) => number.to_string(),
    })
}

#[derive(Serialize)]
struct Question<'a> {
    metric_name: &'a str,
    directionality: &'a str,
    features: Vec<BTreeMap<&'a str, &'a str>>,
}

impl Predictor {
    /// A client for this configuration; `None` if no server is configured.
    ///
    /// # Errors
    ///
    /// When the URL or the CA bundle is invalid.
    pub(super) fn new(config: &PredictorConfig) -> Result<Option<Self>, PredictorError> {
        if config.url.is_empty() {
            return Ok(None);
        }
        let url = config.url.parse().map_err(|_| PredictorError::Url)?;
        let mut builder = reqwest::Client::builder()
            .timeout(config.timeout)
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(MAX_REQUESTS)
            .referer(false);
        if !config.ca_bundle.as_os_str().is_empty() {
            builder = builder.tls_certs_merge(authorities(&config.ca_bundle)?);
        }
        let mut labels = Model::labels();
        for pattern in &config.labels {
            let pattern = String::from(pattern.clone());
            let is_prefix = pattern.ends_with('/');
            let patterns = if is_prefix {
                &mut labels.prefixes
            } else {
                &mut labels.keys
            };
            patterns.insert(pattern);
        }
        Ok(Some(Self(Arc::new(Inner {
            url,
            labels,
            http: builder.build().map_err(PredictorError::Tls)?,
            answers: ExpiringCache::new(MAX_ANSWERS),
            flights: SingleFlight::default(),
            places: SharedPlaces::new(MAX_REQUESTS, MAX_PER_TENANT),
        }))))
    }

    /// The labels of nodes that requests to the server contain.
    pub(super) fn labels(&self) -> &LabelKeys {
        &self.0.labels
    }

    /// Asks which of these nodes a model prefers. `tenant`: the namespace of the pod.
    ///
    /// # Errors
    ///
    /// The failure in words, for users.
    pub(super) async fn ask(
        &self,
        tenant: &str,
        model: &Model,
        mut features: Vec<BTreeMap<&str, &str>>,
    ) -> Result<Prediction, Arc<str>> {
        // Equal nodes count once, so that their number does not change the question.
        features.sort_unstable();
        features.dedup();
        let question = Question {
            metric_name: &model.metric,
            directionality: &model.direction,
            features,
        };
        let question = serde_json::to_string(&question).map_err(|error| error.to_string())?;
        if question.len() > MAX_QUESTION {
            return Err("the labels of the nodes have more than 256 KiB".into());
        }
        let question: Arc<str> = question.into();
        if let Some(answer) = self.0.answers.get(&question) {
            return answer;
        }
        let (inner, body, tenant) = (self.0.clone(), question.clone(), tenant.to_owned());
        let work = move || async move { inner.request(&tenant, body).await }.boxed();
        self.0.flights.run(question, work).await
    }
}

impl Inner {
    async fn request(&self, tenant: &str, question: Arc<str>) -> Answer {
        let answer = self.send(tenant, &question).await;
        let answer = answer.map_err(|error| -> Arc<str> {
            tracing::warn!(%error, "selection.predictor failed; documents decide by their rules, and containers without rules keep their image");
            error.into()
        });
        let life = if answer.is_ok() { TTL } else { FAILURE_TTL };
        self.answers.insert(question, answer.clone(), life);
        answer
    }

    async fn send(&self, tenant: &str, question: &str) -> Result<Prediction, String> {
        let _place = self.places.enter(tenant).await;
        let request = self.http.post(self.url.clone());
        let request = request
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(question.to_owned());
        // The error must not show the URL, which may hold a password.
        let text = |error: reqwest::Error| chain(&error.without_url());
        let mut response = request.send().await.map_err(text)?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("it answered {status}"));
        }
        let mut body = Vec::new();
        while let Some(part) = response.chunk().await.map_err(text)? {
            body.extend_from_slice(&part);
            if body.len() > MAX_ANSWER {
                return Err("its answer has more than 64 KiB".to_owned());
            }
        }
        Prediction::parse(&body)
    }
}

fn authorities(file: &Path) -> Result<Vec<reqwest::Certificate>, PredictorError> {
    let unreadable = |source| PredictorError::Unreadable {
        file: file.to_owned(),
        source,
    };
    let pem = std::fs::read(file).map_err(unreadable)?;
    let certificates = reqwest::Certificate::from_pem_bundle(&pem).unwrap_or_default();
    if certificates.is_empty() {
        return Err(PredictorError::NoCertificate(file.to_owned()));
    }
    Ok(certificates)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use testsupport::mutated;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    proptest! {
        #[test]
        fn any_answer_is_a_prediction_or_an_error(answer in mutated(serde_json::json!({
            "selected_instance": {}, "instance": "secret", "arch": "arm64", "score": 0.1,
            "instance_index": 0, "instance-selector": "secret",
        }))) {
            if let Err(error) = Prediction::parse(answer.to_string().as_bytes()) {
                prop_assert!(!error.contains("secret") && error.len() < 100, "{error}");
            }
        }
    }

    #[test]
    fn a_number_is_a_label_value() {
        for (instance, expected) in [(r#""m5""#, Some("m5")), ("85", Some("85")), ("null", None)] {
            let text = format!(
                r#"{{"instance-selector": "cpu-model.id", "instance": {instance}, "arch": "amd64"}}"#
            );
            let prediction: Option<Prediction> = serde_json::from_str(&text).ok();
            assert_eq!(
                prediction.map(|prediction| prediction.value).as_deref(),
                expected,
                "{instance}"
            );
        }
    }

    /// A server that sends `answer` to each request. Returns its URL and the requests that it gets.
    async fn server(answer: &'static str) -> (String, Arc<parking_lot::Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/predict", listener.local_addr().unwrap());
        let questions: Arc<parking_lot::Mutex<Vec<String>>> = Arc::default();
        let question_log = questions.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = Vec::new();
                // The question is one JSON object.
                while !request.ends_with(b"}") {
                    let mut part = [0; 1024];
                    let Ok(length @ 1..) = stream.read(&mut part).await else {
                        break;
                    };
                    request.extend_from_slice(part.get(..length).unwrap_or_default());
                }
                question_log
                    .lock()
                    .push(String::from_utf8(request).unwrap());
                let _ = stream.write_all(answer.as_bytes()).await;
                if answer.is_empty() {
                    tokio::time::sleep(Duration::from_mins(1)).await;
                }
            }
        });
        (url, questions)
    }

    fn predictor(url: String) -> Predictor {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = PredictorConfig {
            url,
            timeout: Duration::from_millis(500),
            ..PredictorConfig::default()
        };
        Predictor::new(&config).unwrap().unwrap()
    }

    fn model() -> Model {
        Model {
            tag: "cost".to_owned(),
            metric: "price".to_owned(),
            direction: "minimize".to_owned(),
            images: BTreeMap::new(),
        }
    }

    fn labels(key: &str) -> BTreeMap<&str, &str> {
        [(key, "x")].into()
    }

    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 80\r\nconnection: close\r\n\r\n{\"instance\": \"m7g\", \"arch\": \"arm64\", \"instance-selector\": \"type\", \"score\": 0.5}\n";

    #[test]
    fn labels_of_the_configuration_are_told_too() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = |labels: &str| {
            let text = format!(r#"{{"url": "http://localhost/predict", "labels": {labels}}}"#);
            serde_json::from_str::<PredictorConfig>(&text)
        };
        let is_sent = |labels: &str, key: &str| {
            let predictor = Predictor::new(&config(labels).unwrap()).unwrap().unwrap();
            predictor.labels().contains(key)
        };
        let labels = r#"["example.com/tier", "nvidia.com/"]"#;
        for (key, by_default, configured) in [
            ("kubernetes.io/arch", true, true),
            ("node.kubernetes.io/instance-type", true, true),
            ("feature.node.kubernetes.io/cpu-model.id", true, true),
            ("kubernetes.io/hostname", false, false),
            ("example.com/tier", false, true),
            ("example.com/tier-2", false, false),
            ("nvidia.com/gpu.product", false, true),
        ] {
            let found = (is_sent("[]", key), is_sent(labels, key));
            assert_eq!(found, (by_default, configured), "{key}");
        }
        for invalid in ["/", "Example.com/", "a/b/", "-x", ""] {
            assert!(config(&format!("[{invalid:?}]")).is_err(), "{invalid}");
        }
    }

    #[tokio::test]
    async fn the_same_question_is_asked_once() {
        let (url, questions) = server(ANSWER).await;
        let (predictor, model) = (predictor(url), model());
        let (a, b) = (labels("a"), labels("b"));
        let count = AtomicUsize::new(0);
        let ask = async |features| {
            count.fetch_add(1, Ordering::Relaxed);
            predictor.ask("n", &model, features).await
        };
        let expected = Prediction {
            label: "type".to_owned(),
            value: "m7g".to_owned(),
            architecture: "arm64".to_owned(),
        };
        let answers = futures::join!(
            ask(vec![a.clone(), b.clone()]),
            ask(vec![b.clone(), a.clone(), a.clone()])
        );
        assert_eq!(answers, (Ok(expected.clone()), Ok(expected.clone())));
        assert_eq!(ask(vec![a, b]).await, Ok(expected));
        assert_eq!((count.into_inner(), questions.lock().len()), (3, 1));
        let question = questions.lock().first().cloned().unwrap();
        let (head, body) = question.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("POST /predict HTTP/1.1"), "{head}");
        assert_eq!(
            body,
            r#"{"metric_name":"price","directionality":"minimize","features":[{"a":"x"},{"b":"x"}]}"#
        );
    }

    #[tokio::test]
    async fn failures_are_told_and_not_repeated_at_once() {
        for (answer, part) in [
            ("", "timed out"),
            ("HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "500"),
            (
                "HTTP/1.1 302 No\r\nlocation: /\r\ncontent-length: 0\r\n\r\n",
                "302",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
                "its answer is not JSON with",
            ),
            ("nonsense", ""),
        ] {
            let (url, questions) = server(answer).await;
            let (predictor, model, node) = (predictor(url), model(), labels("a"));
            let error = predictor
                .ask("n", &model, vec![node.clone()])
                .await
                .unwrap_err();
            assert!(error.contains(part), "{answer}: {error}");
            assert_eq!(
                predictor.ask("n", &model, vec![node]).await.unwrap_err(),
                error
            );
            assert!(questions.lock().len() <= 1, "{answer}");
        }
    }

    /// The client trusts the server's self-signed certificate only with the configured CA bundle.
    #[tokio::test]
    async fn a_bundle_is_trusted() {
        let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(issued.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![issued.cert.der().clone()], key.unwrap())
            .unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A client that does not trust the certificate aborts the TLS handshake.
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    continue;
                };
                let mut request = Vec::new();
                while !request.ends_with(b"}") {
                    let Ok(byte) = stream.read_u8().await else {
                        break;
                    };
                    request.push(byte);
                }
                let _ = stream.write_all(ANSWER.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        let bundle = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(bundle.path(), issued.cert.pem()).unwrap();
        for (ca_bundle, trusted) in [(bundle.path(), true), (Path::new(""), false)] {
            let config = PredictorConfig {
                url: format!("https://localhost:{port}/predict"),
                timeout: Duration::from_secs(10),
                ca_bundle: ca_bundle.to_owned(),
                labels: Vec::new(),
            };
            let predictor = Predictor::new(&config).unwrap().unwrap();
            let answer = predictor.ask("n", &model(), vec![labels("a")]).await;
            assert_eq!(answer.is_ok(), trusted, "{answer:?}");
        }
    }

    #[test]
    fn a_bundle_that_cannot_be_used_is_an_error() {
        let new = |ca_bundle: &Path| {
            Predictor::new(&PredictorConfig {
                url: "https://predictor.example.com".to_owned(),
                ca_bundle: ca_bundle.to_owned(),
                ..PredictorConfig::default()
            })
        };
        let text = |file: &Path| new(file).err().map(|error| error.to_string()).unwrap();
        assert!(text(Path::new("/nowhere.pem")).contains("cannot read /nowhere.pem"));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(text(empty.path()).contains("has no certificate"));
        assert!(
            Predictor::new(&PredictorConfig::default())
                .unwrap()
                .is_none()
        );
    }
}
