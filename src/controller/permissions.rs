//! The permissions that `archaware run` needs.

use crate::{
    cluster::{ADMISSION_SECRET, NAME, access::Permission},
    config::{Config, DaemonSets, Misplaced},
};

/// The permissions for this configuration.
pub(super) fn needed(namespace: &str, config: &Config) -> Vec<Permission> {
    let everywhere = |group, resource, verbs: &[&'static str]| {
        verbs
            .iter()
            .map(move |verb| Permission {
                group,
                resource,
                verb,
                namespace: None,
                name: None,
            })
            .collect::<Vec<_>>()
    };
    let daemon_sets: &[_] = if config.daemon_sets == DaemonSets::Manage {
        &["list", "watch", "patch"]
    } else {
        &["list", "watch"]
    };
    let lease = |verb, name| Permission {
        group: "coordination.k8s.io",
        resource: "leases",
        verb,
        namespace: Some(namespace.to_owned()),
        name,
    };
    let admission = admission(namespace, config);
    let evicts = config.misplaced == Misplaced::Evict;
    [
        everywhere("", "nodes", &["list", "watch", "patch"]),
        everywhere("", "pods", &["get", "list", "watch", "patch"]),
        everywhere("", "namespaces", &["list", "watch"]),
        everywhere("apps", "daemonsets", daemon_sets),
        everywhere(
            "events.k8s.io",
            "events",
            &["create", "patch", "list", "watch"],
        ),
        // A rule with `resourceNames` cannot allow `create`, because the authorizer does not know
        // the name then.
        vec![
            lease("create", None),
            lease("get", Some(NAME)),
            lease("patch", Some(NAME)),
        ],
        admission,
        if config.affinity.recreate_pods || evicts {
            everywhere("", "pods/eviction", &["create"])
        } else {
            Vec::new()
        },
        if evicts {
            let volumes = everywhere("", "persistentvolumes", &["get"]);
            [everywhere("", "persistentvolumeclaims", &["get"]), volumes].concat()
        } else {
            Vec::new()
        },
    ]
    .concat()
}

/// Additional permissions for the webhook.
fn admission(namespace: &str, config: &Config) -> Vec<Permission> {
    let admission = &config.admission;
    let files = &admission.certificates;
    let own_certificate = files.certificate.as_os_str().is_empty();
    let writes_ca_bundle = own_certificate || !files.authority.as_os_str().is_empty();
    let configuration = |verb| Permission {
        group: "admissionregistration.k8s.io",
        resource: "mutatingwebhookconfigurations",
        verb,
        namespace: None,
        name: Some(NAME),
    };
    let secret = |verb| Permission {
        group: "",
        resource: "secrets",
        verb,
        namespace: Some(namespace.to_owned()),
        name: (verb != "create").then_some(ADMISSION_SECRET),
    };
    let mut needed = Vec::new();
    if admission.enabled {
        // archaware reads the configuration to find out whether it exists.
        needed.extend(["get", "list", "watch"].map(configuration));
    }
    if admission.enabled && (admission.manage_configuration || writes_ca_bundle) {
        needed.push(configuration("patch"));
    }
    if admission.enabled && own_certificate {
        needed.extend(["create", "get", "patch"].map(secret));
    }
    needed
}

/// Permissions to read every pod's pull secrets. Without them, pull secrets are read only in
/// namespaces with a `RoleBinding`.
pub(super) fn pull_secrets() -> Vec<Permission> {
    vec![Permission {
        group: "",
        resource: "secrets",
        verb: "get",
        namespace: None,
        name: None,
    }]
}
