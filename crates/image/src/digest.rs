//! Content digests, parsed as `opencontainers/go-digest` does.

use std::{fmt, str::FromStr};

use base16ct::lower::encode_string;
use sha2::{Digest as _, Sha256, Sha384, Sha512};

/// `algorithm:hex` with a supported algorithm, lower-case hex and the right length.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Digest(Repr);

/// Nearly every digest is sha256. It is stored as bytes to keep a cache of many images small.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Repr {
    Sha256([u8; 32]),
    Other(Box<str>),
}

/// Why text is not a digest. The error does not quote the text, because it may come from a
/// registry's document and contain anything, and the error appears in events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// Not `algorithm:hex`, or hex of the wrong length or case.
    #[error("malformed digest")]
    Malformed,
    /// Well-formed, but with an algorithm that go-digest does not support.
    #[error("its digest algorithm is not supported (sha256, sha384 and sha512 are)")]
    Algorithm,
}

impl Digest {
    /// The sha256 digest of `bytes`.
    pub fn sha256(bytes: &[u8]) -> Self {
        Self(Repr::Sha256(Sha256::digest(bytes).into()))
    }

    /// Whether `bytes` have this digest.
    pub fn verify(&self, bytes: &[u8]) -> bool {
        match &self.0 {
            Repr::Sha256(expected) => Sha256::digest(bytes)[..] == expected[..],
            Repr::Other(text) => match text.split_once(':') {
                Some(("sha384", expected)) => encode_string(&Sha384::digest(bytes)) == expected,
                Some(("sha512", expected)) => encode_string(&Sha512::digest(bytes)) == expected,
                _ => false,
            },
        }
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let (algorithm, encoded) = text.split_once(':').ok_or(DigestError::Malformed)?;
        let length = match algorithm {
            "sha256" => 64,
            "sha384" => 96,
            "sha512" => 128,
            other => {
                let word = |part: &str| {
                    part.starts_with(|c: char| c.is_ascii_alphabetic())
                        && part.chars().all(|c| c.is_ascii_alphanumeric())
                };
                let well_formed = other.split(['-', '_', '+', '.']).all(word)
                    && encoded.len() >= 32
                    && encoded.chars().all(|c| c.is_ascii_hexdigit());
                return Err(if well_formed {
                    DigestError::Algorithm
                } else {
                    DigestError::Malformed
                });
            }
        };
        let mut bytes = [0; 64];
        let bytes =
            base16ct::lower::decode(encoded, &mut bytes).map_err(|_| DigestError::Malformed)?;
        if encoded.len() != length {
            return Err(DigestError::Malformed);
        }
        Ok(Self(match bytes.try_into() {
            Ok(bytes) => Repr::Sha256(bytes),
            Err(_) => Repr::Other(text.into()),
        }))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Sha256(bytes) => write!(f, "sha256:{}", encode_string(bytes)),
            Repr::Other(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_go_reads() {
        let hex64 = "a".repeat(64);
        for text in [
            format!("sha256:{}", "0f".repeat(32)),
            format!("sha512:{hex64}{hex64}"),
        ] {
            assert_eq!(text.parse::<Digest>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "sha256",
            "sha256:",
            "sha256:abc",
            &format!("sha256:{}", "A".repeat(64)),
        ] {
            assert!(
                matches!(bad.parse::<Digest>(), Err(DigestError::Malformed)),
                "{bad}"
            );
        }
        let unknown = format!("blake3:{hex64}").parse::<Digest>();
        assert!(matches!(unknown, Err(DigestError::Algorithm)));
    }

    #[test]
    fn verifies_content() {
        let digest = Digest::sha256(b"hello");
        assert!(digest.verify(b"hello"));
        assert!(!digest.verify(b"hellO"));
        let sha512 = format!("sha512:{}", encode_string(&Sha512::digest(b"x")))
            .parse::<Digest>()
            .unwrap();
        assert!(sha512.verify(b"x"));
    }
}
