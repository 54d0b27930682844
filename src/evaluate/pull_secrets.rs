//! Reads a pod's pull secrets by name when one of its images needs them, and caches them briefly.
//! Secrets are neither listed nor watched, so archaware holds a Secret only after a pod or template
//! has named it.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use futures::FutureExt;
use k8s_openapi::{
    ByteString, NamespaceResourceScope,
    api::core::v1::{LocalObjectReference, Secret, ServiceAccount},
};
use kube::Resource;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;

use crate::{
    cluster::{
        api::{ApiClient, ApiError},
        name::NamespacedName,
        objects::PodSpec,
    },
    expiring_cache::ExpiringCache,
    image::credentials::{
        CredentialSource, Keyring, LazyKeyring, MAX_ENTRIES, MAX_PATTERNS, docker_cfg,
        docker_config_json,
    },
    single_flight::SingleFlight,
};

/// How long a Secret is cached. A rollout creates many pods with the same Secret.
const USABLE_TTL: Duration = Duration::from_mins(1);
/// How long an unusable Secret is cached; its owner may be fixing it.
const UNUSABLE_TTL: Duration = Duration::from_secs(10);
/// Maximum number of cached Secrets.
const MAX_CACHED: usize = 128;
/// Maximum bytes of a value in a Secret. The API allows 1 MiB, but users must not fill archaware's
/// memory. The pull secret of a large cluster has some KiB.
const MAX_CONTENT: usize = 128 * 1024;
/// Maximum number of pull secrets per pod. The kubelet has no limit, but users must not make
/// archaware read thousands.
const MAX_OF_POD: usize = 32;

/// Why archaware skips a Secret that it may not read. This is expected where access is granted per
/// namespace.
const FORBIDDEN: &str =
    "archaware may not read it; bind the ClusterRole archaware-pull-secrets in its namespace";
/// Why a Secret beyond the limit is skipped.
const TOO_MANY: &str = "the pull secrets of the pod together have more than 256 entries, or more than 32 entries with patterns";

/// Reads and caches pull secrets. Cheap to clone.
#[derive(Clone)]
pub struct PullSecrets(Arc<PullSecretsInner>);

struct PullSecretsInner {
    api: ApiClient,
    secrets: ReadObjects<Keyring>,
    accounts: ReadObjects<Vec<String>>,
}

/// The parsed object, or the reason why it cannot be used.
type Read<T> = Result<Arc<T>, Arc<str>>;

struct ReadObjects<T> {
    known: ExpiringCache<NamespacedName, Read<T>>,
    flights: SingleFlight<NamespacedName, Read<T>>,
}

/// A pull secret that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnusablePullSecret {
    /// Name of the Secret.
    pub secret: String,
    /// The reason, without any content of the Secret.
    pub why: String,
}

impl fmt::Display for UnusablePullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pull secret {} is skipped: {}", self.secret, self.why)
    }
}

impl UnusablePullSecret {
    /// Whether the permission to read it is missing.
    pub fn is_forbidden(&self) -> bool {
        self.why == FORBIDDEN
    }
}

/// The credentials of one pod or template, loaded when needed.
#[derive(Clone)]
pub struct PodCredentials {
    /// The keyring for the resolver.
    pub keyring: LazyKeyring,
    unusable: Arc<Mutex<BTreeSet<UnusablePullSecret>>>,
}

impl PodCredentials {
    /// The Secrets that could not be used, if they were needed.
    pub fn unusable(&self) -> BTreeSet<UnusablePullSecret> {
        self.unusable.lock().clone()
    }
}

impl PullSecrets {
    /// Creates an empty cache.
    pub fn new(api: ApiClient) -> Self {
        Self(Arc::new(PullSecretsInner {
            api,
            secrets: ReadObjects::new(),
            accounts: ReadObjects::new(),
        }))
    }

    /// If a pod's spec has no pull secrets, adds those of the pod's ServiceAccount, as the
    /// admission plugin `ServiceAccount` does when a pod is created. Returns whether the permission
    /// to read the ServiceAccount is missing.
    pub async fn add_of_account(&self, namespace: &str, spec: &mut PodSpec) -> bool {
        if !names(&spec.image_pull_secrets).is_empty() {
            return false;
        }
        match self.0.account(namespace, account_of(spec)).await {
            Ok(secret_names) => {
                let secrets = secret_names.iter().cloned();
                let secrets = secrets.map(|name| LocalObjectReference { name });
                spec.image_pull_secrets = secrets.collect();
                false
            }
            Err(why) => &*why == FORBIDDEN,
        }
    }

    /// The credentials of a pod in `namespace`. Pods of a template without pull secrets get the
    /// pull secrets of their ServiceAccount; in an existing pod, the `ServiceAccount` admission
    /// plugin has added them already.
    pub fn for_pod(&self, namespace: &str, spec: &PodSpec, is_template: bool) -> PodCredentials {
        let unusable: Arc<Mutex<BTreeSet<UnusablePullSecret>>> = Arc::default();
        let pod_secrets = names(&spec.image_pull_secrets);
        let account = (is_template && pod_secrets.is_empty()).then(|| account_of(spec));
        let (inner, namespace, skipped) = (self.0.clone(), namespace.to_owned(), unusable.clone());
        let keys = async move {
            let names = match account {
                Some(account) => {
                    let account_secrets = inner.account(&namespace, account).await;
                    account_secrets.map_or_else(|_| Vec::new(), |names| names.to_vec())
                }
                None => pod_secrets,
            };
            let mut keyrings = Vec::new();
            let (mut entries, mut patterns) = (0, 0);
            for name in names {
                let result = inner.secret(&namespace, name.clone()).await;
                let fits = result.and_then(|keyring| {
                    let size = keyring.size();
                    (entries, patterns) = (entries + size.0, patterns + size.1);
                    if entries > MAX_ENTRIES || patterns > MAX_PATTERNS {
                        return Err(TOO_MANY.into());
                    }
                    Ok(keyring)
                });
                match fits {
                    Ok(keyring) => keyrings.push(keyring),
                    Err(why) => {
                        let why = why.as_ref().to_owned();
                        skipped
                            .lock()
                            .insert(UnusablePullSecret { secret: name, why });
                    }
                }
            }
            Arc::new(Keyring::union(keyrings.iter().map(|keyring| &**keyring)))
        };
        PodCredentials {
            keyring: keys.boxed().shared(),
            unusable,
        }
    }
}

fn account_of(spec: &PodSpec) -> String {
    let name = spec.service_account_name.as_deref();
    let name = name.filter(|name| !name.is_empty());
    name.unwrap_or("default").to_owned()
}

fn names(references: &[LocalObjectReference]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for reference in references
        .iter()
        .filter(|reference| !reference.name.is_empty())
    {
        if !names.contains(&reference.name) && names.len() < MAX_OF_POD {
            names.push(reference.name.clone());
        }
    }
    names
}

impl PullSecretsInner {
    async fn secret(self: &Arc<Self>, namespace: &str, name: String) -> Read<Keyring> {
        let source = CredentialSource::PullSecret(name.as_str().into());
        let (name, api) = (NamespacedName::new(namespace, &name), self.api.clone());
        let read_secret = |name: NamespacedName| async move {
            let secret: Secret = get(&api, &name).await?;
            let data = secret.data.unwrap_or_default();
            if data
                .values()
                .any(|ByteString(bytes)| bytes.len() > MAX_CONTENT)
            {
                return Err("it is larger than 128 KiB".into());
            }
            let content = |key: &str| data.get(key).map(|ByteString(bytes)| &**bytes);
            match secret.type_.as_deref() {
                Some("kubernetes.io/dockerconfigjson") => {
                    docker_config_json(content(".dockerconfigjson"))
                }
                Some("kubernetes.io/dockercfg") => docker_cfg(content(".dockercfg")),
                _ => return Err("its type is neither kubernetes.io/dockerconfigjson nor kubernetes.io/dockercfg".into()),
            }
            .map(|keyring| Arc::new(keyring.from_source(&source)))
            .map_err(|error| error.to_string().into())
        };
        self.secrets.read(name, read_secret).await
    }

    /// The names of a ServiceAccount's pull secrets.
    async fn account(self: &Arc<Self>, namespace: &str, name: String) -> Read<Vec<String>> {
        let (name, api) = (NamespacedName::new(namespace, &name), self.api.clone());
        let read_account = |name: NamespacedName| async move {
            let account: ServiceAccount = get(&api, &name).await?;
            Ok(Arc::new(names(
                &account.image_pull_secrets.unwrap_or_default(),
            )))
        };
        self.accounts.read(name, read_account).await
    }
}

impl<T: Send + Sync + 'static> ReadObjects<T> {
    fn new() -> Self {
        Self {
            known: ExpiringCache::new(MAX_CACHED),
            flights: SingleFlight::default(),
        }
    }

    /// Returns the cached object or reads it with `read_object`.
    async fn read<F>(
        &self,
        name: NamespacedName,
        read_object: impl FnOnce(NamespacedName) -> F,
    ) -> Read<T>
    where
        F: Future<Output = Read<T>> + Send + 'static,
    {
        if let Some(cached) = self.known.get(&name) {
            return cached;
        }
        // Expired entries are removed at each cache miss, because they may contain secrets.
        self.known.remove_expired();
        let answer = self
            .flights
            .run(name.clone(), || read_object(name.clone()).boxed());
        let answer = answer.await;
        let life = if answer.is_ok() {
            USABLE_TTL
        } else {
            UNUSABLE_TTL
        };
        self.known.insert(name, answer.clone(), life);
        answer
    }
}

/// Reads an object. Events of the pods that name the object show the error.
async fn get<K>(api: &ApiClient, name: &NamespacedName) -> Result<K, Arc<str>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned,
{
    match api.find(name).await {
        Ok(Some(object)) => Ok(object),
        Ok(None) => Err("it does not exist".into()),
        Err(ApiError::Forbidden(_)) => Err(FORBIDDEN.into()),
        Err(error) => Err(error.to_string().into()),
    }
}
