//! What the metadata says about feed-forward networks.

use super::families::Family;
use super::reader::Keys;
use crate::model::error::ModelError;

/// A layer's feed-forward network.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One gated network.
    Dense {
        /// Its inner values.
        inner: usize,
    },
    /// The same, and experts beside it; what either makes is normed, and their sum once more.
    Both {
        /// Inner values of the one network.
        inner: usize,
        /// The experts.
        experts: ExpertsConfig,
    },
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub count: usize,
    /// How many of them a row goes to.
    pub used: usize,
    /// Inner values of each.
    pub inner: usize,
}

impl FeedForward {
    /// Inner values of the dense network.
    pub fn inner(&self) -> usize {
        match self {
            Self::Dense { inner } | Self::Both { inner, .. } => *inner,
        }
    }

    /// The experts, if there are any.
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        match self {
            Self::Dense { .. } => None,
            Self::Both { experts, .. } => Some(experts),
        }
    }
}

/// The feed-forward network of each layer.
pub(super) fn read(keys: &Keys<'_>, family: &Family, layers: usize) -> Result<Vec<FeedForward>, ModelError> {
    const WIDEST: usize = 1 << 22;
    const COUNT: &str = "expert_count";
    let inner = keys.sizes("feed_forward_length", layers, WIDEST)?;
    if !family.experts_beside || matches!(keys.optional_count(COUNT)?, None | Some(0)) {
        return Ok(inner.into_iter().map(|inner| FeedForward::Dense { inner }).collect());
    }
    let experts = ExpertsConfig {
        count: keys.size(COUNT, 4096)?,
        used: keys.size("expert_used_count", 64)?,
        inner: keys.size("expert_feed_forward_length", WIDEST)?,
    };
    if experts.used > experts.count {
        return Err(keys.unsupported(format!(
            "{} is {}, {} only {}",
            keys.full("expert_used_count"),
            experts.used,
            keys.full(COUNT),
            experts.count
        )));
    }
    Ok(inner.into_iter().map(|inner| FeedForward::Both { inner, experts }).collect())
}
