//! What the metadata says about feed-forward networks.

use super::families::{Family, Routed};
use super::reader::Keys;
use crate::model::error::ModelError;
use crate::ops::{ExpertChoice, ExpertGroups, Scoring};

/// A layer's feed-forward network.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One gated network.
    Dense {
        /// Its inner values.
        inner: usize,
    },
    /// Experts, and a network that all rows go to.
    Experts {
        /// The experts.
        experts: ExpertsConfig,
        /// Inner values of the network for all rows; 0: there is none.
        shared: usize,
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub count: usize,
    /// How many of them a row goes to.
    pub used: usize,
    /// Inner values of each.
    pub inner: usize,
    /// How the router chooses.
    pub choice: ExpertChoice,
}

impl FeedForward {
    /// Inner values of the dense network, or of the one for all rows; 0: there is none.
    pub fn inner(&self) -> usize {
        match self {
            Self::Dense { inner } | Self::Both { inner, .. } | Self::Experts { shared: inner, .. } => *inner,
        }
    }

    /// The experts, if there are any.
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        match self {
            Self::Dense { .. } => None,
            Self::Both { experts, .. } | Self::Experts { experts, .. } => Some(experts),
        }
    }
}

const WIDEST: usize = 1 << 22;
const COUNT: &str = "expert_count";
const USED: &str = "expert_used_count";

/// The feed-forward network of each layer.
pub(super) fn read(keys: &Keys<'_>, family: &Family, layers: usize) -> Result<Vec<FeedForward>, ModelError> {
    if let Some(routed) = family.experts {
        return with_experts(keys, routed, layers);
    }
    let inner = keys.sizes("feed_forward_length", layers, WIDEST)?;
    if !family.experts_beside || matches!(keys.optional_count(COUNT)?, None | Some(0)) {
        return Ok(inner.into_iter().map(|inner| FeedForward::Dense { inner }).collect());
    }
    let experts = experts(keys, ExpertChoice::default())?;
    Ok(inner.into_iter().map(|inner| FeedForward::Both { inner, experts }).collect())
}

fn experts(keys: &Keys<'_>, choice: ExpertChoice) -> Result<ExpertsConfig, ModelError> {
    let (count, used) = (keys.size(COUNT, 4096)?, keys.size(USED, 64)?);
    if used > count {
        let (used_key, count_key) = (keys.full(USED), keys.full(COUNT));
        return Err(keys.unsupported(format!("{used_key} is {used}, {count_key} only {count}")));
    }
    Ok(ExpertsConfig { count, used, inner: keys.size("expert_feed_forward_length", WIDEST)?, choice })
}

/// Layers with experts, behind some without.
fn with_experts(keys: &Keys<'_>, routed: Routed, layers: usize) -> Result<Vec<FeedForward>, ModelError> {
    const DENSE: &str = "feed_forward_length";
    const LEADING: &str = "leading_dense_block_count";
    let experts = experts(keys, choice(keys, routed)?)?;
    check_groups(keys, &experts)?;
    let leading = keys.optional_count(LEADING)?.unwrap_or(0);
    let dense = match leading {
        0 => {
            keys.get(DENSE); // that of a dense model it was made from, or nothing
            Vec::new()
        }
        _ => keys.sizes(DENSE, layers, WIDEST)?,
    };
    let shared = match keys.optional_count("expert_shared_count")? {
        None | Some(0) => 0,
        Some(count) if count <= 64 => count * experts.inner,
        Some(count) => {
            let key = keys.full("expert_shared_count");
            return Err(keys.unsupported(format!("{key} is {count}; expected up to 64")));
        }
    };
    Ok((0..layers)
        .map(|layer| match dense.get(layer) {
            Some(&inner) if layer < leading => FeedForward::Dense { inner },
            _ => FeedForward::Experts { experts, shared },
        })
        .collect())
}

/// How routers choose.
fn choice(keys: &Keys<'_>, routed: Routed) -> Result<ExpertChoice, ModelError> {
    const GATING: &str = "expert_gating_func";
    let scoring = match keys.optional_count(GATING)? {
        // Files older than the key.
        None | Some(0 | 1) => Scoring::Softmax,
        Some(2) => Scoring::Sigmoid,
        Some(other) => {
            return Err(keys.unsupported(format!(
                "{} is {other}; this version knows 1 (softmax) and 2 (sigmoid)",
                keys.full(GATING)
            )));
        }
    };
    let groups = keys.optional_count("expert_group_count")?.unwrap_or(1);
    let used = keys.optional_count("expert_group_used_count")?.unwrap_or(groups);
    let scale = keys.optional_number("expert_weights_scale", 0.0, 1e4)?.unwrap_or(1.0);
    Ok(ExpertChoice {
        scoring,
        groups: (groups > 1 && used != groups).then_some(ExpertGroups { count: groups, used }),
        renormalised: keys.optional_flag("expert_weights_norm")?.unwrap_or(routed.renormalised),
        // Converters write 0 where nothing is scaled.
        scale: if scale == 0.0 { 1.0 } else { scale },
    })
}

/// Groups must be of as many experts each, and those that a row uses have enough of them.
fn check_groups(keys: &Keys<'_>, experts: &ExpertsConfig) -> Result<(), ModelError> {
    let Some(groups) = experts.choice.groups else { return Ok(()) };
    let ExpertGroups { count, used } = groups;
    let least = if experts.choice.scoring == Scoring::Sigmoid { 2 } else { 1 };
    let each = experts.count / count;
    let fits = count <= 64
        && (1..=count).contains(&used)
        && experts.count.is_multiple_of(count)
        && each >= least
        && experts.used <= used * each;
    if fits {
        return Ok(());
    }
    Err(keys.unsupported(format!(
        "{} of {} experts cannot come from {used} of {count} groups of as many each ({}, {})",
        experts.used,
        experts.count,
        keys.full("expert_group_count"),
        keys.full("expert_group_used_count")
    )))
}
