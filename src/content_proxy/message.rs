//! Checks the few messages that could harm containerd, which trusts its clients.
//!
//! containerd does not check that nested messages are present, nor that the expected digest of a
//! write is valid. A call that violates this crashes the daemon (1.6 to 2.x), and every pull on the
//! node fails. A write without content attaches content of any other namespace
//! (`content_sharing_policy = "shared"`), so a client could read namespaces that are not allowed.

use containerd_client::services::v1::{
    AddResourceRequest, CreateImageRequest, DeleteResourceRequest, UpdateImageRequest,
    UpdateRequest, WriteAction, WriteContentRequest,
};
use prost::Message;

use crate::image::digest::Digest;

/// Whether the single message of a call contains the fields that its method requires.
pub(super) fn is_well_formed(path: &str, body: &[u8]) -> bool {
    match path {
        // A whole document in one message, whose digest containerd verifies. archaware writes in no
        // other way.
        "/containerd.services.content.v1.Content/Write" => {
            decode(body).is_some_and(|write: WriteContentRequest| {
                write.action() == WriteAction::Commit
                    && write.offset == 0
                    && !write.data.is_empty()
                    && write.expected.parse::<Digest>().is_ok()
            })
        }
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

/// Decodes one uncompressed message: a zero, its length, its bytes (gRPC over HTTP/2,
/// `Length-Prefixed-Message`).
fn decode<M: Message + Default>(body: &[u8]) -> Option<M> {
    let (head, message) = body.split_at_checked(5)?;
    let (compressed, length) = head.split_first()?;
    let length = u32::from_be_bytes(length.try_into().ok()?);
    let single = *compressed == 0 && usize::try_from(length).ok()? == message.len();
    single.then(|| M::decode(message).ok())?
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

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
        assert!(is_well_formed(UPDATE, &framed(&whole)));
        for odd in [
            framed(&UpdateRequest::default()),
            [framed(&whole), framed(&UpdateRequest::default())].concat(),
            framed(&whole)[..6].to_vec(),
            Vec::new(),
            vec![1, 0, 0, 0, 0],
        ] {
            assert!(!is_well_formed(UPDATE, &odd), "{odd:?}");
        }
        assert!(is_well_formed(
            "/containerd.services.content.v1.Content/Info",
            b""
        ));
    }

    #[test]
    fn writes_are_whole_documents() {
        let path = "/containerd.services.content.v1.Content/Write";
        let write = WriteContentRequest {
            action: WriteAction::Commit.into(),
            r#ref: "a".to_owned(),
            total: 1,
            expected: Digest::sha256(b"x").to_string(),
            offset: 0,
            data: b"x".to_vec(),
            labels: HashMap::new(),
        };
        assert!(is_well_formed(path, &framed(&write)));
        for odd in [
            WriteContentRequest {
                expected: "nocolon".to_owned(),
                ..write.clone()
            },
            WriteContentRequest {
                expected: String::new(),
                ..write.clone()
            },
            WriteContentRequest {
                data: Vec::new(),
                ..write.clone()
            },
            WriteContentRequest {
                offset: 1,
                ..write.clone()
            },
            WriteContentRequest {
                action: WriteAction::Write.into(),
                ..write.clone()
            },
            WriteContentRequest {
                action: 7,
                ..write.clone()
            },
        ] {
            assert!(!is_well_formed(path, &framed(&odd)), "{odd:?}");
        }
        assert!(!is_well_formed(
            path,
            &[framed(&write), framed(&write)].concat()
        ));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = is_well_formed(UPDATE, &bytes);
        }
    }
}
