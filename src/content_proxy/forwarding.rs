//! Decides which calls are forwarded. A gRPC call is an HTTP/2 request whose path names the method,
//! and a header names the namespace, so most decisions need no message (gRPC over HTTP/2,
//! containerd's `namespaces/grpc.go`).

use http::{HeaderMap, HeaderName, HeaderValue, Method, header::CONTENT_TYPE, request};

/// The header with the namespace of a call.
const NAMESPACE: HeaderName = HeaderName::from_static("containerd-namespace");
const LEASE: HeaderName = HeaderName::from_static("containerd-lease");
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The only method that needs no namespace.
const VERSION: &str = "/containerd.services.version.v1.Version/Version";
/// Methods for reading.
const READ: &[&str] = &[
    "/containerd.services.images.v1.Images/Get",
    "/containerd.services.images.v1.Images/List",
    "/containerd.services.content.v1.Content/Info",
    "/containerd.services.content.v1.Content/Read",
];
const WRITE: &str = "/containerd.services.content.v1.Content/Write";
/// Methods for persisting documents in archaware's own namespace.
const OWN_NAMESPACE_METHODS: &[&str] = &[
    WRITE,
    "/containerd.services.content.v1.Content/List",
    "/containerd.services.content.v1.Content/Update",
    "/containerd.services.content.v1.Content/Delete",
    "/containerd.services.content.v1.Content/Status",
    "/containerd.services.content.v1.Content/ListStatuses",
    "/containerd.services.content.v1.Content/Abort",
    "/containerd.services.leases.v1.Leases/Create",
    "/containerd.services.leases.v1.Leases/Delete",
    "/containerd.services.leases.v1.Leases/List",
    "/containerd.services.leases.v1.Leases/AddResource",
    "/containerd.services.leases.v1.Leases/DeleteResource",
    "/containerd.services.leases.v1.Leases/ListResources",
    "/containerd.services.images.v1.Images/Create",
    "/containerd.services.images.v1.Images/Update",
    "/containerd.services.images.v1.Images/Delete",
];

/// The namespaces that clients may use.
#[derive(Clone, Debug)]
pub struct Forwarding {
    /// Namespaces that may be read.
    pub read: Vec<String>,
    /// The containerd namespace of archaware, to which clients may also write.
    pub own: Option<String>,
}

/// A call that may be forwarded.
#[derive(Debug)]
pub(super) struct AllowedCall {
    /// The forwarded headers; all other headers are dropped.
    pub(super) headers: HeaderMap,
    /// Size limit of the request.
    pub(super) size: Size,
}

/// Size limit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    /// Names, digests, labels.
    Small,
    /// A document: those that archaware persists for an image have at most 512 KiB in total.
    Large,
}

impl Size {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Small => 64 * 1024,
            Self::Large => 2 * 1024 * 1024,
        }
    }
}

impl Forwarding {
    /// The call to forward, or why it is refused.
    pub(super) fn check(&self, request: &request::Parts) -> Result<AllowedCall, &'static str> {
        if request.method != Method::POST || request.uri.query().is_some() {
            return Err("not a gRPC call");
        }
        let kind = only_value(&request.headers, &CONTENT_TYPE)?.ok_or("not a gRPC call")?;
        if !kind.as_bytes().starts_with(b"application/grpc") {
            return Err("not a gRPC call");
        }
        let path = request.uri.path();
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(http::header::TE, HeaderValue::from_static("trailers"));
        if let Some(timeout) = only_value(&request.headers, &TIMEOUT)? {
            headers.insert(TIMEOUT, timeout.clone());
        }
        if path == VERSION {
            return Ok(AllowedCall {
                headers,
                size: Size::Small,
            });
        }
        let namespace =
            only_value(&request.headers, &NAMESPACE)?.ok_or("the namespace header is missing")?;
        let is_namespace = |name: &String| namespace.as_bytes() == name.as_bytes();
        let is_own = self.own.as_ref().is_some_and(is_namespace);
        let is_read = READ.contains(&path);
        if !(is_read || OWN_NAMESPACE_METHODS.contains(&path)) {
            return Err("the method is not allowed");
        }
        if !is_own && !self.read.iter().any(is_namespace) {
            return Err("the namespace is not allowed");
        }
        if !is_own && !is_read {
            return Err("the namespace is read-only");
        }
        headers.insert(NAMESPACE, namespace.clone());
        if let Some(lease) = only_value(&request.headers, &LEASE)?.filter(|_| is_own) {
            headers.insert(LEASE, lease.clone());
        }
        let size = if path == WRITE {
            Size::Large
        } else {
            Size::Small
        };
        Ok(AllowedCall { headers, size })
    }
}

/// The only value of a header. containerd uses the first of several, so the checked value must be
/// the only one.
fn only_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'a HeaderValue>, &'static str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (value, None) => Ok(value),
        _ => Err("a header is given twice"),
    }
}

#[cfg(test)]
mod tests {
    use http::Request;
    use proptest::prelude::*;

    use super::*;

    const READ_CONTENT: &str = "/containerd.services.content.v1.Content/Read";

    fn forwarding() -> Forwarding {
        Forwarding {
            read: vec!["k8s.io".into(), "other".into()],
            own: Some("archaware".into()),
        }
    }

    fn call(path: &str, headers: &[(&str, &str)]) -> request::Parts {
        let mut request = Request::post(path).header("content-type", "application/grpc");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn passes(path: &str, headers: &[(&str, &str)]) -> bool {
        forwarding().check(&call(path, headers)).is_ok()
    }

    #[test]
    fn reads_pass_where_they_are_allowed_and_writes_in_the_own_namespace() {
        for path in READ {
            for (namespace, allowed) in [
                ("k8s.io", true),
                ("other", true),
                ("archaware", true),
                ("moby", false),
                ("", false),
            ] {
                assert_eq!(
                    passes(path, &[("containerd-namespace", namespace)]),
                    allowed,
                    "{path} {namespace}"
                );
            }
            assert!(!passes(path, &[]));
        }
        for path in OWN_NAMESPACE_METHODS {
            for (namespace, allowed) in [("k8s.io", false), ("archaware", true), ("moby", false)] {
                assert_eq!(
                    passes(path, &[("containerd-namespace", namespace)]),
                    allowed,
                    "{path} {namespace}"
                );
            }
        }
        assert!(passes(VERSION, &[]));
    }

    #[test]
    fn what_is_checked_is_what_counts() {
        for twice in [
            [
                ("containerd-namespace", "archaware"),
                ("containerd-namespace", "k8s.io"),
            ],
            [
                ("containerd-namespace", "archaware"),
                ("content-type", "application/grpc"),
            ],
        ] {
            assert!(!passes(WRITE, &twice), "{twice:?}");
        }
        for odd in [
            "archaware,k8s.io",
            " archaware",
            "archaware\u{a0}",
            "ARCHAWARE",
            "k8s.io/../archaware",
        ] {
            assert!(!passes(WRITE, &[("containerd-namespace", odd)]), "{odd}");
        }
        let headers = [
            ("containerd-namespace", "k8s.io"),
            ("containerd-lease", "theirs"),
            ("containerd-namespace-ttrpc", "moby"),
            ("authorization", "x"),
        ];
        let passed = forwarding()
            .check(&call(READ_CONTENT, &headers))
            .unwrap()
            .headers;
        let names: Vec<_> = passed.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["content-type", "te", "containerd-namespace"]);
        let own_headers = [
            ("containerd-namespace", "archaware"),
            ("containerd-lease", "mine"),
        ];
        let passed = forwarding().check(&call(WRITE, &own_headers)).unwrap();
        assert_eq!(
            (&passed.headers[LEASE], passed.size),
            (&"mine".parse::<HeaderValue>().unwrap(), Size::Large)
        );
    }

    #[test]
    fn other_requests_do_not_pass() {
        let own_namespace = ("containerd-namespace", "archaware");
        assert!(!passes(&format!("{READ_CONTENT}?x"), &[own_namespace]));
        assert!(!passes(&format!("{READ_CONTENT}/"), &[own_namespace]));
        assert!(!passes(&READ_CONTENT.to_lowercase(), &[own_namespace]));
        let mut get = call(READ_CONTENT, &[own_namespace]);
        get.method = Method::GET;
        assert!(forwarding().check(&get).is_err());
        let mut plain = call(READ_CONTENT, &[own_namespace]);
        plain
            .headers
            .insert(CONTENT_TYPE, "text/plain".parse().unwrap());
        assert!(forwarding().check(&plain).is_err());
        let closed = Forwarding {
            own: None,
            ..forwarding()
        };
        assert!(closed.check(&call(WRITE, &[own_namespace])).is_err());
    }

    proptest! {
        #[test]
        fn no_path_but_the_known_ones_passes(path in "/[a-zA-Z.]{0,40}/[a-zA-Z]{0,20}", namespace in "[a-z.]{1,12}") {
            let is_known = path == VERSION || READ.contains(&&*path) || OWN_NAMESPACE_METHODS.contains(&&*path);
            prop_assert!(is_known || !passes(&path, &[("containerd-namespace", &namespace)]));
        }
    }
}
