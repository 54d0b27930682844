//! Parses `WWW-Authenticate` challenges (RFC 9110, 11.6.1, and token authentication of the
//! distribution specification).

use http::{HeaderMap, header::WWW_AUTHENTICATE};
use reqwest::Url;

/// The authentication that a registry requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer {
        realm: Url,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Selects the challenge to answer from all `WWW-Authenticate` headers: Bearer before Basic.
    pub(super) fn choose(headers: &HeaderMap) -> Option<Self> {
        let mut basic = None;
        for header in headers.get_all(WWW_AUTHENTICATE) {
            let Ok(text) = header.to_str() else { continue };
            let Ok(challenges) = http_auth::parse_challenges(text) else {
                // Parameters of a Basic challenge are not needed and often malformed.
                let scheme = text.split_whitespace().next().unwrap_or_default();
                if scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                }
                continue;
            };
            for challenge in challenges {
                let parameter = |name: &str| {
                    challenge
                        .params
                        .iter()
                        .find(|(key, _)| key.eq_ignore_ascii_case(name))
                        .map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                } else if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let realm = parameter("realm").and_then(|realm| Url::parse(&realm).ok());
                    if let Some(realm) = realm {
                        let (service, scope) = (parameter("service"), parameter("scope"));
                        return Some(Self::Bearer {
                            realm,
                            service,
                            scope,
                        });
                    }
                }
            }
        }
        basic
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn choose(headers: &[&str]) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for header in headers {
            map.append(WWW_AUTHENTICATE, header.parse().unwrap());
        }
        Challenge::choose(&map)
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic(text in r#"[a-zA-Z =",\\:/.?&-]{0,120}"#, odd in "[ -~]{0,200}") {
            let _ = choose(&[&text, &odd]);
            let _ = choose(&[&format!("Bearer realm=\"{odd}\",{text}")]);
        }

        #[test]
        fn parameters_are_found_in_any_order(
            order in Just(vec![r#"realm="https://auth/t?a=b""#, r#"service="a \"b\", c""#, r#"scope="repository:a:pull""#, "error=invalid"]).prop_shuffle(),
            scheme in "(Bearer|bearer|BEARER)",
        ) {
            let chosen = choose(&[&format!("{scheme} {}", order.join(", "))]);
            prop_assert_eq!(chosen, Some(Challenge::Bearer {
                realm: Url::parse("https://auth/t?a=b").unwrap(),
                service: Some(r#"a "b", c"#.to_owned()),
                scope: Some("repository:a:pull".to_owned()),
            }));
        }
    }

    #[test]
    fn reads_challenges_in_any_order_and_number() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            Some(Challenge::Bearer {
                realm: Url::parse(realm).unwrap(),
                service: service.map(str::to_owned),
                scope: scope.map(str::to_owned),
            })
        };
        let full = bearer(
            "https://auth/t",
            Some("reg"),
            Some("repository:a:pull,push"),
        );
        for headers in [
            &[r#"Bearer realm="https://auth/t",service="reg",scope="repository:a:pull,push""#][..],
            &[r#"bearer scope="repository:a:pull,push", service="reg", realm="https://auth/t""#],
            &[
                "Basic realm=x",
                r#"Bearer realm="https://auth/t",service=reg,scope="repository:a:pull,push""#,
            ],
            &[
                r#"Basic realm="x", Bearer realm="https://auth/t",service="reg",scope="repository:a:pull,push""#,
            ],
        ] {
            assert_eq!(choose(headers), full, "{headers:?}");
        }
        assert_eq!(
            choose(&[r#"Bearer realm="https://auth/t""#]),
            bearer("https://auth/t", None, None)
        );
        for basic in [
            r#"Basic realm="x""#,
            "Basic realm=Registry Realm",
            "basic realm=",
        ] {
            assert_eq!(choose(&[basic]), Some(Challenge::Basic), "{basic}");
        }
        for nothing in [
            &[][..],
            &["Bearer"],
            &["Negotiate"],
            &["Bearer realm=\"not a url\""],
            &["\"\"\""],
        ] {
            assert_eq!(choose(nothing), None, "{nothing:?}");
        }
    }
}
