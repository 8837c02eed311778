//! One typed launcher for each kernel, with its CPU reference beside it.
//!
//! Kernels of the `vector` family: one work-item does a vector's work by hand. A row's result has the same bits
//! however many rows a pass has; [`Kernels::narrow`] and [`Kernels::matmul`] are two ways to the same numbers. [`Kernels`]
//! may make products by the `xmx` family instead, matrix by matrix ([`Matrix::family`]).

mod attention;
mod cache;
mod check;
mod choice;
mod format;
mod head;
mod kernels;
mod latent;
mod matmul;
mod moe;
mod peak;
mod phases;
mod rows;
mod self_test;
mod stream;
mod xmx;

pub use attention::{ATTENTION_START, Attention, Pairing, ROTATE_START, Rotation, attention_reference};
pub use cache::{Cache, CacheKind, MOST_HEAD_SIZE};
pub use choice::{RowTop, TOP, choice_reference, choice_values, read_choices};
pub use format::{Format, Lanes, ROW_MULTIPLE, Scales, TILE};
pub use head::{
    HEAD_BARRED, HEAD_CANVAS, HEAD_GREEDY, HEAD_SEED_HI, HEAD_SEED_LO, HEAD_STEP, HEAD_TEMPERATURE,
    HeadOptions, HeadReference, HeadRow, HeadRun, HeadState, MOST_BARRED, embed_reference, head_noise,
    head_reference,
};
pub use kernels::{Family, Kernels, OpsError, Products};
pub use latent::{HeadMatrices, HeadRows, LATENT_START, LatentRotation};
pub use matmul::{Activation, Finish, Matrix, Output, PackedRows, RowInput, activate, prepare_reference};
pub use moe::{
    COMBINE_SCALAR, CombineInput, ExpertChoice, ExpertGroups, Experts, Router, Routing, Scoring,
    combine_reference, expert_reference, route_reference, router_reference,
};
pub use peak::{Peak, seconds};
pub use phases::{Joined, Joiner, Positioned};
pub use self_test::{
    Heads, LatentHeads, self_test, self_test_choice, self_test_fused, self_test_head, self_test_latent,
    self_test_moe, self_test_products, self_test_router, self_test_stream,
};
pub use stream::{Join, Parts, cap_reference, gate_reference, join_reference, mix_reference};
pub use xmx::{
    Xmx, XmxCard, XmxExpected, XmxHeadState, XmxLoop, XmxProgram, XmxRows, XmxTerms, XmxTime, XmxWork,
    xmx_arrange, xmx_attention_work, xmx_expert_work, xmx_experts_work, xmx_head_work, xmx_loop, xmx_loops,
    xmx_loops_line, xmx_matmul_work, xmx_programs, xmx_queries, xmx_recorded_loops, xmx_slices, xmx_takes,
};

/// Values by which activation rows are padded: the widest block of a weight format.
pub const STRIDE_MULTIPLE: usize = 256;

/// Rows of a block of packed rows, which a work-item takes together; `ROW_BLOCK` in `cl/include/common.h`.
const ROW_BLOCK: usize = 64;

/// The least multiple of `step` that is not less than `n`.
pub const fn round_up(n: usize, step: usize) -> usize {
    n.div_ceil(step) * step
}
