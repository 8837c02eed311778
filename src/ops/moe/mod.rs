//! A mixture of experts: the choice of experts for each row, the way of rows to them and back, and the products of all
//! experts in one launch each.
//!
//! A row at one of its experts is a *slot*; `cl/moe.cl` says how slots lie. A pass goes through the launchers in the order
//! `route`, `pack_for_experts`, `expert_gate_up`, `expert_down`, `combine`, all for the same number of rows;
//! the host reads nothing back in between.

mod combine;
mod products;
mod router;
mod routing;

pub(in crate::ops) use combine::CombineBuffers;
pub use combine::{COMBINE_SCALAR, CombineInput, combine_reference};
pub use products::{Experts, expert_reference};
pub use router::{ExpertChoice, ExpertGroups, Router, Scoring, route_reference, router_reference};
pub use routing::Routing;
pub(in crate::ops) use routing::most_blocks;
