//! Objects whose content may be secret. kube logs a body that it cannot parse, so these are read as text.

use k8s_openapi::NamespaceResourceScope;
use kube::{
    Client, Resource,
    api::{GetParams, PostParams},
    core::Request,
};
use serde::{Serialize, de::DeserializeOwned};

use super::CALL_TIMEOUT;

/// Why there is no object.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// No such object.
    #[error("it does not exist")]
    NotFound,
    /// There is one of that name already, or it has changed meanwhile.
    #[error("somebody else has changed it")]
    Conflict,
    /// Validation; its words may hold content.
    #[error("the API server refuses the change: is it immutable?")]
    Refused,
    /// RBAC.
    #[error("archaware may not read or change it")]
    Forbidden,
    /// Any other refusal.
    #[error("the API server answered {0}")]
    Status(u16),
    /// Not to be parsed.
    #[error("the API server's answer is malformed")]
    Malformed,
    /// The name cannot be asked for.
    #[error("its name is malformed")]
    Name,
    /// No connection, or no HTTP.
    #[error("{}", crate::image::chain(.0))]
    Failed(kube::Error),
    /// No answer within [`CALL_TIMEOUT`].
    #[error("the API server does not answer in time")]
    TimedOut,
}

/// Reads an object.
pub async fn get<K>(client: Client, namespace: &str, name: &str) -> Result<K, SecretError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned,
{
    // Names come from pods that nobody has validated yet, and become part of a path.
    if !is_name(namespace) || !is_name(name) {
        return Err(SecretError::Name);
    }
    let request = Request::new(K::url_path(&(), Some(namespace)));
    let request = request.get(name, &GetParams::default());
    let text = send(client, request.map_err(|_| SecretError::Name)?).await?;
    serde_json::from_str(&text).map_err(|_| SecretError::Malformed)
}

/// Creates an object.
pub async fn create<K>(client: Client, namespace: &str, object: &K) -> Result<(), SecretError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Serialize,
{
    let body = serde_json::to_vec(object).map_err(|_| SecretError::Malformed)?;
    let request = Request::new(K::url_path(&(), Some(namespace)));
    let request = request.create(&PostParams::default(), body);
    send(client, request.map_err(|_| SecretError::Name)?)
        .await
        .map(drop)
}

/// Patches an object.
pub async fn patch<K>(
    client: Client,
    namespace: &str,
    name: &str,
    patch: super::patch::JsonPatch,
) -> Result<(), SecretError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let operations = serde_json::from_value(patch.into_operations());
    let patch = kube::api::Patch::<()>::Json(operations.map_err(|_| SecretError::Malformed)?);
    let request = Request::new(K::url_path(&(), Some(namespace)));
    let request = request.patch(name, &super::writer::parameters(), &patch);
    send(client, request.map_err(|_| SecretError::Name)?)
        .await
        .map(drop)
}

/// A DNS subdomain, as names of objects are (`IsDNS1123Subdomain` of `k8s.io/apimachinery`).
fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&text.len())
        && text.chars().all(plain)
        && !text.starts_with('.')
        && !text.contains("..")
}

async fn send(client: Client, request: http::Request<Vec<u8>>) -> Result<String, SecretError> {
    match tokio::time::timeout(CALL_TIMEOUT, client.request_text(request)).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(kube::Error::Api(status))) => Err(match status.code {
            404 => SecretError::NotFound,
            409 => SecretError::Conflict,
            // A failed test; a refusal names what it refuses.
            422 if status
                .details
                .as_ref()
                .is_none_or(|details| details.causes.is_empty()) =>
            {
                SecretError::Conflict
            }
            422 => SecretError::Refused,
            403 => SecretError::Forbidden,
            code => SecretError::Status(code),
        }),
        Ok(Err(error)) => Err(SecretError::Failed(error)),
        Err(_) => Err(SecretError::TimedOut),
    }
}
