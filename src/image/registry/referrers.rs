//! Referrers: artifacts that are attached to an image (`subject`; OCI distribution specification 1.1).

use http::Method;

use crate::{
    image::{credentials::Credential, digest::Digest, error::ImageError, reference::Reference},
    platform::Referrers,
};

use super::{
    client::{Failed, Registry},
    hosts::{Host, Role},
    request::RegistryRequest,
};

impl Registry {
    /// The artifacts of a type that are attached to a manifest, from the first host that knows some.
    pub(crate) async fn referrers(
        &self,
        reference: &Reference,
        digest: &Digest,
        artifact_type: &str,
        credentials: &[Credential],
    ) -> Result<Referrers, ImageError> {
        let hosts = self.hosts_of(reference).await?;
        let mut failed = Failed::default();
        let mut is_answered = false;
        for host in hosts.iter().filter(|host| host.pulls) {
            if failed.skips(host) {
                continue;
            }
            let credentials = self.effective_credentials(host, credentials);
            let asked = self.referrers_at(host, reference, digest, artifact_type, credentials);
            match asked.await {
                Ok(mut found) => {
                    // A mirror may know nothing of what is attached.
                    is_answered |= host.role == Role::Origin;
                    // A registry may ignore the filter.
                    found.0.retain(|one| one.artifact_type == artifact_type);
                    if !found.0.is_empty() {
                        return Ok(found);
                    }
                }
                Err(error) => failed.add(host, error),
            }
        }
        if is_answered || !failed.is_any() {
            return Ok(Referrers::default());
        }
        Err(failed.into_error(reference))
    }

    async fn referrers_at(
        &self,
        host: &Host,
        reference: &Reference,
        digest: &Digest,
        artifact_type: &str,
        credentials: &[Credential],
    ) -> Result<Referrers, ImageError> {
        let by_api = format!("referrers/{digest}?artifactType={artifact_type}");
        // Where a registry lacks the API, clients maintain an index with this tag ("referrers tag schema").
        let by_tag = format!("manifests/{}", digest.to_string().replace(':', "-"));
        for path in [by_api, by_tag] {
            let request = RegistryRequest {
                method: Method::GET,
                repository: reference.repository(),
                path: &path,
                manifest: true,
            };
            match self.request(host, &request, credentials).await {
                Ok(answer) => {
                    let parsed = Referrers::parse(&answer.body);
                    return parsed.map_err(|source| ImageError::Document {
                        what: request.describe(host),
                        source,
                    });
                }
                Err(ImageError::NotFound { .. } | ImageError::MethodRefused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Referrers::default())
    }
}
