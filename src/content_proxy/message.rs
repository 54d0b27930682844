//! The few messages that are looked into. containerd reads a nested message without asking whether it is
//! there: one that is missing ends the whole daemon (1.6 to 2.x), and with it every pull on the node.

use containerd_client::services::v1::{
    AddResourceRequest, CreateImageRequest, DeleteResourceRequest, UpdateImageRequest,
    UpdateRequest,
};
use prost::Message;

/// Whether the only message of a call holds what its method reads.
pub(super) fn is_whole(path: &str, body: &[u8]) -> bool {
    match path {
        "/containerd.services.content.v1.Content/Update" => {
            decode(body).is_some_and(|update: UpdateRequest| update.info.is_some())
        }
        "/containerd.services.leases.v1.Leases/AddResource" => {
            decode(body).is_some_and(|add: AddResourceRequest| add.resource.is_some())
        }
        "/containerd.services.leases.v1.Leases/DeleteResource" => {
            decode(body).is_some_and(|delete: DeleteResourceRequest| delete.resource.is_some())
        }
        "/containerd.services.images.v1.Images/Create" => {
            let target = |create: CreateImageRequest| create.image?.target;
            decode(body).and_then(target).is_some()
        }
        "/containerd.services.images.v1.Images/Update" => {
            let target = |update: UpdateImageRequest| update.image?.target;
            decode(body).and_then(target).is_some()
        }
        _ => true,
    }
}

/// One uncompressed message: a zero, its length, its bytes (gRPC over HTTP/2, `Length-Prefixed-Message`).
fn decode<M: Message + Default>(body: &[u8]) -> Option<M> {
    let (head, message) = body.split_at_checked(5)?;
    let (compressed, length) = head.split_first()?;
    let length = u32::from_be_bytes(length.try_into().ok()?);
    let single = *compressed == 0 && usize::try_from(length).ok()? == message.len();
    single.then(|| M::decode(message).ok())?
}

#[cfg(test)]
mod tests {
    use containerd_client::services::v1::Info;
    use proptest::prelude::*;

    use super::*;

    const UPDATE: &str = "/containerd.services.content.v1.Content/Update";

    fn framed(message: &impl Message) -> Vec<u8> {
        let bytes = message.encode_to_vec();
        let length = u32::try_from(bytes.len()).unwrap().to_be_bytes();
        [&[0], &length[..], &bytes].concat()
    }

    #[test]
    fn a_missing_part_does_not_pass() {
        let whole = UpdateRequest {
            info: Some(Info::default()),
            update_mask: None,
        };
        assert!(is_whole(UPDATE, &framed(&whole)));
        for odd in [
            framed(&UpdateRequest::default()),
            [framed(&whole), framed(&UpdateRequest::default())].concat(),
            framed(&whole)[..6].to_vec(),
            Vec::new(),
            vec![1, 0, 0, 0, 0],
        ] {
            assert!(!is_whole(UPDATE, &odd), "{odd:?}");
        }
        assert!(is_whole(
            "/containerd.services.content.v1.Content/Info",
            b""
        ));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = is_whole(UPDATE, &bytes);
        }
    }
}
