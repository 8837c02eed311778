//! The family's programs: their sources, and what a compiler for the matrix engine must make of each kernel.

use half::f16;

use super::arrange::code_bits;
use crate::ops::Format;

const DEVICE: &str = include_str!("../../../cl/xmx/device.h");
const WEIGHTS: &str = include_str!("../../../cl/xmx/weights.h");
const PRODUCTS: &str = include_str!("../../../cl/xmx/products.h");
const FINISH: &str = include_str!("../../../cl/xmx/finish.h");
const PREPARE: &str = include_str!("../../../cl/xmx/prepare.cl");
const MATMUL: &str = include_str!("../../../cl/xmx/matmul.cl");

/// Options of every program, on every device.
pub(super) const OPTIONS: &str = "-cl-std=CL3.0";
/// Asks Intel's compiler for GPUs for 256 registers a thread, half as many threads: what accumulators need.
pub(super) const MANY_REGISTERS: &str = "-cl-intel-256-GRF-per-thread";

/// What a compiler for the matrix engine must make of a kernel; a test compares it with its binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XmxExpected {
    /// The kernel.
    pub name: &'static str,
    /// Registers of 64 bytes a thread may have.
    pub registers: u32,
    /// Bytes of local memory that it declares.
    pub local: u32,
    /// Matrix instructions in its innermost loop; 0 for kernels without products.
    pub multiply_adds: u32,
    /// Bytes of weights that the innermost loop reads; 0 for kernels without products.
    pub weight_bytes: u32,
    /// Loads that gather from each lane's own address; blocks are one load for all lanes.
    pub scattered_loads: u32,
}

/// A program of the family.
#[derive(Debug, Clone)]
pub struct XmxProgram {
    /// File and weight format.
    pub label: String,
    /// The whole source.
    pub source: String,
    /// Options for Intel's compiler for GPUs.
    pub options: String,
    /// Its kernels.
    pub kernels: Vec<XmxExpected>,
}

/// Which program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Which {
    Prepare,
    Matmul(Format),
}

/// The formats that kernels exist for, as they are on the device.
pub(super) const FORMATS: [Format; 6] =
    [Format::W4, Format::Q4_0, Format::Q4_1, Format::Q4K, Format::Q8_0, Format::F16];

/// All programs of the family.
pub fn xmx_programs() -> Vec<XmxProgram> {
    let mut all = vec![Which::Prepare];
    all.extend(FORMATS.map(Which::Matmul));
    all.into_iter().map(Which::program).collect()
}

impl Which {
    pub(super) fn label(self) -> String {
        match self {
            Self::Prepare => "xmx/prepare.cl".to_owned(),
            Self::Matmul(format) => format!("xmx/matmul.cl ({})", format.name()),
        }
    }

    pub(super) fn source(self) -> String {
        match self {
            Self::Prepare => format!("{DEVICE}{PREPARE}"),
            Self::Matmul(format) => {
                format!("{}{DEVICE}{WEIGHTS}{PRODUCTS}{FINISH}{MATMUL}", layout(format, self.span_groups()))
            }
        }
    }

    /// Groups of 32 columns in a span; see `cl/xmx/weights.h`. The accumulators of `wide` leave no registers for two.
    pub(super) fn span_groups(self) -> usize {
        1
    }

    /// Whether its kernels need the most registers that a thread can have.
    pub(super) fn many_registers(self) -> bool {
        self != Self::Prepare
    }

    fn program(self) -> XmxProgram {
        let options =
            if self.many_registers() { format!("{OPTIONS} {MANY_REGISTERS}") } else { OPTIONS.to_owned() };
        XmxProgram { label: self.label(), source: self.source(), options, kernels: self.kernels() }
    }

    fn kernels(self) -> Vec<XmxExpected> {
        let product = |name, format, local, blocks: u32| {
            let groups = self.span_groups() as u32;
            XmxExpected {
                name,
                registers: 256,
                local,
                multiply_adds: blocks * 4 * groups,
                weight_bytes: 2 * groups * code_bits(format).unwrap_or_default() as u32 * 64,
                scattered_loads: 0,
            }
        };
        match self {
            Self::Prepare => vec![XmxExpected {
                name: "prepare",
                registers: 128,
                local: 64,
                multiply_adds: 0,
                weight_bytes: 0,
                scattered_loads: 0,
            }],
            Self::Matmul(format) => vec![
                product("narrow_1", format, 8 << 10, 1),
                product("narrow_2", format, 16 << 10, 2),
                product("narrow_4", format, 32 << 10, 4),
                product("wide", format, 0, 4),
            ],
        }
    }
}

/// What `cl/xmx/weights.h` asks the host for.
fn layout(format: Format, span_groups: usize) -> String {
    let bits = code_bits(format).unwrap_or_default();
    let groups = format.block_groups();
    let (group_bytes, block_bytes) = (bits * 64, format.tile_bytes(groups * 32));
    let scale_bytes = block_bytes - groups * group_bytes;
    let centre =
        |bias: f32, code: f32| format!("#define CENTRE_BITS {:#x}\n", f16::from_f32(-bias - code).to_bits());
    let scales = match format {
        Format::W4 => "#define SCALES_WHOLE\n#define ZERO_POINT\n".to_owned(),
        Format::Q4_0 => format!("#define SCALES_HALVES\n{}", centre(16.0, 8.0)),
        Format::Q4_1 => "#define SCALES_WHOLE\n#define OFFSET\n".to_owned(),
        Format::Q4K => "#define SCALES_GROUPS\n#define OFFSET\n".to_owned(),
        Format::Q8_0 => format!("#define SCALES_HALVES\n{}", centre(1024.0, 128.0)),
        _ => "#define SCALES_NONE\n".to_owned(),
    };
    format!(
        "#define SPAN_GROUPS {span_groups}\n#define CODE_BITS {bits}\n#define BLOCK_GROUPS {groups}\n\
         #define SCALE_BYTES {scale_bytes}\n#define GROUP_BYTES {group_bytes}\n#define BLOCK_BYTES {block_bytes}\n{scales}"
    )
}
