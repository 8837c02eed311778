//! Kernels of the `xmx` family, for devices with a matrix engine and sub-groups of 16 (Intel Arc).
//!
//! The engine multiplies f16 and adds in f32. Codes of weights are exact in f16, scales are applied in f32, so all that is
//! rounded is an activation, to eleven bits and after scaling by a power of two ([`XmxRows`]). The same source runs on any
//! device with sub-groups, where `cl/xmx/device.h` makes the engine's instruction of plain code: that is how the kernels are
//! tested without such a device. [`programs`](xmx_programs) lists them with what a compiler for one must make of each.
//!
//! Models make their products by it where [`Kernels`](crate::ops::Kernels) do: [`Products::Xmx`](crate::ops::Products).

mod arrange;
mod attention;
mod combine;
mod cost;
mod experts;
mod head;
mod kernels;
mod loops;
mod matmul;
mod programs;
mod rows;

pub use arrange::{xmx_arrange, xmx_takes};
pub use attention::{XmxAttention, XmxCache, xmx_attention_work};
pub use cost::{XmxCard, XmxLoop, XmxTime, XmxWork};
pub use experts::{xmx_expert_work, xmx_experts_work};
pub use head::{XmxHeadState, xmx_head_work};
pub use kernels::Xmx;
pub use loops::{xmx_loop, xmx_loops, xmx_loops_line, xmx_recorded_loops};
pub use matmul::{xmx_matmul_work, xmx_slices};
pub use programs::{XmxExpected, XmxProgram, xmx_programs};
pub use rows::{XmxRows, XmxTerms};
