//! Referrers: artifacts that are attached to an image (`subject`; OCI distribution specification 1.1).

use http::{Method, header::LINK};

use crate::{
    image::{credentials::Credential, digest::Digest, error::ImageError, reference::Reference},
    platform::Referrers,
};

use super::{
    client::{Failed, Registry},
    hosts::{Host, Role},
    request::RegistryRequest,
};

/// Maximum number of pages: an image has few artifacts of one type.
const MAX_PAGES: usize = 8;

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
            let first = self.referrers_page(host, reference, &path, credentials);
            let (mut all, mut next) = match first.await {
                Ok(page) => page,
                Err(ImageError::NotFound { .. } | ImageError::MethodRefused { .. }) => continue,
                Err(error) => return Err(error),
            };
            for _ in 1..MAX_PAGES {
                let Some(query) = next else { break };
                let path = format!("referrers/{digest}?{query}");
                let page = self.referrers_page(host, reference, &path, credentials);
                let (further, after) = page.await?;
                all.0.extend(further.0);
                next = after;
            }
            return Ok(all);
        }
        Ok(Referrers::default())
    }

    /// A page, and the query of the next one.
    async fn referrers_page(
        &self,
        host: &Host,
        reference: &Reference,
        path: &str,
        credentials: &[Credential],
    ) -> Result<(Referrers, Option<String>), ImageError> {
        let request = RegistryRequest {
            method: Method::GET,
            repository: reference.repository(),
            path,
            manifest: true,
        };
        let answer = self.request(host, &request, credentials).await?;
        let parsed = Referrers::parse(&answer.body);
        let parsed = parsed.map_err(|source| ImageError::Document {
            what: request.describe(host),
            source,
        })?;
        let link = answer.headers.get(LINK).and_then(|link| link.to_str().ok());
        Ok((parsed, link.and_then(next_query)))
    }
}

/// The query of the next page (`Link: </v2/…?n=…&last=…>; rel="next"`). Only the query is taken: a registry cannot send the
/// request, and its credential, elsewhere.
fn next_query(link: &str) -> Option<String> {
    let (target, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
    let is_next = parameters.contains("rel=\"next\"") || parameters.contains("rel=next");
    let (_, query) = target.split_once('?')?;
    let query = query.split('#').next()?;
    (is_next && !query.is_empty()).then(|| query.to_owned())
}
