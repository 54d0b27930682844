//! Referrers: artifacts that are attached to an image (`subject`; OCI distribution specification
//! 1.1).

use http::{Method, header::LINK};

use crate::{credentials::Credential, digest::Digest, error::ImageError, reference::Reference};
use archaware_platform::Referrers;

use super::{
    super::{
        hosts::{Host, Role},
        request::RegistryRequest,
    },
    Failed, Registry,
};

/// Maximum number of pages: an image has few artifacts of one type.
const MAX_PAGES: usize = 8;

impl Registry {
    /// The artifacts of a type that are attached to a manifest, from the first host that knows
    /// some.
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
                    // Only the registry's own empty answer counts: a mirror may lack the artifacts.
                    is_answered |= host.role == Role::Origin;
                    // A registry may ignore the filter.
                    found
                        .0
                        .retain(|artifact| artifact.artifact_type == artifact_type);
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
        // Where a registry lacks the API, clients maintain an index with this tag ("referrers tag
        // schema").
        let by_tag = format!("manifests/{}", digest.to_string().replace(':', "-"));
        for path in [by_api, by_tag] {
            let first = self.referrers_page(host, reference, &path, credentials);
            let (mut referrers, mut next) = match first.await {
                Ok(page) => page,
                Err(ImageError::NotFound { .. } | ImageError::MethodRefused { .. }) => continue,
                Err(error) => return Err(error),
            };
            for _ in 1..MAX_PAGES {
                let Some(query) = next.take().filter(|_| path.starts_with("referrers/")) else {
                    break;
                };
                let path = format!("referrers/{digest}?{query}");
                let page = self.referrers_page(host, reference, &path, credentials);
                let (more, after) = page.await?;
                referrers.0.extend(more.0);
                next = after;
            }
            if next.is_some() {
                let repository = reference.name();
                tracing::warn!(%repository, %digest, "more than {MAX_PAGES} pages of referrers: the rest is not read");
            }
            return Ok(referrers);
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
        let links = answer.headers.get_all(LINK).iter();
        let mut links = links.filter_map(|link| link.to_str().ok());
        Ok((parsed, links.find_map(next_query)))
    }
}

/// The query of the next page (`Link: </v2/…?n=…&last=…>; rel="next"`). Only the query is used, so
/// that a registry cannot direct the request and its credential to another host.
fn next_query(header: &str) -> Option<String> {
    // Several links are separated by commas; the text in <…> may contain commas, too.
    header.split('<').skip(1).find_map(|link| {
        let (target, parameters) = link.split_once('>')?;
        let is_next = |parameter: &str| {
            let value = parameter.trim().trim_end_matches(',').trim_end();
            value == "rel=\"next\"" || value == "rel=next"
        };
        let (_, query) = target.split_once('?')?;
        let query = query.split('#').next()?;
        let found = parameters.split(';').any(is_next) && !query.is_empty();
        found.then(|| query.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A registry chooses the `Link` header.
        #[test]
        fn any_header_has_a_query_or_none(header in "[ -~]{0,60}|([<>;,=?#\" a-z]{0,40}rel=next)") {
            if let Some(query) = next_query(&header) {
                prop_assert!(!query.is_empty() && header.contains(&query) && !query.contains('#'));
            }
        }
    }

    #[test]
    fn the_next_page_is_linked() {
        for (header, expected) in [
            (
                r#"</v2/a/referrers/x?n=1&last=2>; rel="next""#,
                Some("n=1&last=2"),
            ),
            ("<https://other/v2/a?last=2#x>;rel=next", Some("last=2")),
            (
                r#"</v2/a?p=1>; rel="prev", </v2/a?p=3,4>; title="t"; rel="next""#,
                Some("p=3,4"),
            ),
            (
                r#"</v2/a?p=3>; rel="next", </v2/a?p=1>; rel="prev""#,
                Some("p=3"),
            ),
            (r#"</v2/a?p=1>; rel="prev""#, None),
            (r#"</v2/a>; rel="next""#, None),
            (r#"/v2/a?p=1; rel="next""#, None),
            ("", None),
        ] {
            assert_eq!(next_query(header).as_deref(), expected, "{header}");
        }
    }
}
