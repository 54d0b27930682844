//! Eviction of pods, so that their controllers make them anew.

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, EvictParams},
};

use crate::{
    cluster::{CALL_TIMEOUT, objects::Pod},
    image::chain,
};

pub(super) async fn evict(client: &Client, pod: &Pod) -> Result<(), String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<core::Pod> = Api::namespaced(client.clone(), namespace);
    // The uid keeps a successor of the same name (a StatefulSet's) from being evicted for it.
    let uid = pod.metadata.uid.clone();
    let preconditions = kube::api::Preconditions {
        uid,
        resource_version: None,
    };
    let options = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let parameters = EvictParams {
        delete_options: Some(options),
        ..EvictParams::default()
    };
    let name = pod.name_any();
    match tokio::time::timeout(CALL_TIMEOUT, api.evict(&name, &parameters)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 || status.code == 409 => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 429 => {
            Err("a PodDisruptionBudget does not allow it now".to_owned())
        }
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err("the API server did not answer in time".to_owned()),
    }
}
