//! Weights of preferences, as the API has them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The weight of a preference, from 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "u8")]
#[schemars(with = "u8", extend("minimum" = 1, "maximum" = 100))]
pub struct Weight(u8);

impl Weight {
    /// From 1 to 100.
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Weight {
    type Error = &'static str;

    fn try_from(weight: u8) -> Result<Self, &'static str> {
        if (1..=100).contains(&weight) {
            Ok(Self(weight))
        } else {
            Err("a weight is a number from 1 to 100")
        }
    }
}
