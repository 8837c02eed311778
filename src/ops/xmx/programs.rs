//! The family's programs: their sources, and what a compiler for the matrix engine must make of each kernel.

use half::f16;

use super::arrange::code_bits;
use super::attention::HEAD_SIZES;
use super::rows::XmxTerms;
use crate::ops::Format;

const DEVICE: &str = include_str!("../../../cl/xmx/device.h");
const WEIGHTS: &str = include_str!("../../../cl/xmx/weights.h");
const PRODUCTS: &str = include_str!("../../../cl/xmx/products.h");
const FINISH: &str = include_str!("../../../cl/xmx/finish.h");
const TEAM: &str = include_str!("../../../cl/xmx/team.h");
const COMBINE: &str = include_str!("../../../cl/xmx/combine.cl");
const PREPARE: &str = include_str!("../../../cl/xmx/prepare.cl");
const MATMUL: &str = include_str!("../../../cl/xmx/matmul.cl");
const EXPERTS: &str = include_str!("../../../cl/xmx/experts.cl");
const HEAD: &str = include_str!("../../../cl/xmx/head.cl");
const ATTENTION: &str = include_str!("../../../cl/xmx/attention.cl");

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
    Combine,
    Matmul(Format, XmxTerms),
    Experts(Format, XmxTerms),
    Head(Format, XmxTerms),
    /// By the size of a head.
    Attention(usize),
}

/// The formats that kernels exist for, as they are on the device.
pub(super) const FORMATS: [Format; 16] = [
    Format::W4,
    Format::Q2K,
    Format::Q3K,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q4K,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q5K,
    Format::Q6K,
    Format::Q8_0,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Mxfp4,
    Format::Tq2,
    Format::F16,
];

/// All programs of the family.
pub fn xmx_programs() -> Vec<XmxProgram> {
    let mut all = vec![Which::Prepare, Which::Combine];
    for terms in [XmxTerms::One, XmxTerms::Two] {
        all.extend(FORMATS.map(|format| Which::Matmul(format, terms)));
        all.extend(FORMATS.map(|format| Which::Experts(format, terms)));
        all.extend(FORMATS.map(|format| Which::Head(format, terms)));
    }
    all.extend(HEAD_SIZES.map(Which::Attention));
    all.into_iter().map(Which::program).collect()
}

impl Which {
    pub(super) fn label(self) -> String {
        match self {
            Self::Prepare => "xmx/prepare.cl".to_owned(),
            Self::Combine => "xmx/combine.cl".to_owned(),
            Self::Matmul(format, terms) => product_label("matmul", format, terms),
            Self::Experts(format, terms) => product_label("experts", format, terms),
            Self::Head(format, terms) => product_label("head", format, terms),
            Self::Attention(head_size) => format!("xmx/attention.cl ({head_size})"),
        }
    }

    pub(super) fn source(self) -> String {
        match self {
            Self::Prepare => format!("{DEVICE}{TEAM}{PREPARE}"),
            Self::Combine => format!("{DEVICE}{TEAM}{COMBINE}"),
            Self::Matmul(format, terms) => {
                format!(
                    "{}{DEVICE}{WEIGHTS}{PRODUCTS}{FINISH}{MATMUL}",
                    layout(format, terms, self.span_groups())
                )
            }
            Self::Experts(format, terms) => {
                format!(
                    "{}{DEVICE}{WEIGHTS}{PRODUCTS}{FINISH}{EXPERTS}",
                    layout(format, terms, self.span_groups())
                )
            }
            Self::Attention(head_size) => format!("#define HEAD_SIZE {head_size}\n{DEVICE}{ATTENTION}"),
            Self::Head(format, terms) => format!(
                "#define SPANS_IN_A_CHAIN\n#define HEAD_SLICES {}\n{}{DEVICE}{WEIGHTS}{PRODUCTS}{HEAD}",
                super::head::SLICES,
                layout(format, terms, self.span_groups())
            ),
        }
    }

    /// Groups of 32 columns in a span; see `cl/xmx/weights.h`. The accumulators of `wide` leave no registers for two.
    pub(super) fn span_groups(self) -> usize {
        match self {
            Self::Experts(Format::W4, _) => 2,
            _ => 1,
        }
    }

    /// Format of its weights, and the terms of activations.
    fn weights(self) -> Option<(Format, XmxTerms)> {
        match self {
            Self::Matmul(format, terms) | Self::Experts(format, terms) | Self::Head(format, terms) => {
                Some((format, terms))
            }
            Self::Prepare | Self::Combine | Self::Attention(_) => None,
        }
    }

    /// Matrix instructions for each step of 8 rows, 16 outputs and 16 columns, of each term: 2 where 16 columns have an offset
    /// of their own, which is multiplied, too.
    pub(super) fn products_each(self) -> u32 {
        match self.weights() {
            Some((Format::Q2K, _)) => 2,
            _ => 1,
        }
    }

    /// Whether its kernels need the most registers that a thread can have.
    pub(super) fn many_registers(self) -> bool {
        !matches!(self, Self::Prepare | Self::Combine)
    }

    fn program(self) -> XmxProgram {
        let options =
            if self.many_registers() { format!("{OPTIONS} {MANY_REGISTERS}") } else { OPTIONS.to_owned() };
        XmxProgram { label: self.label(), source: self.source(), options, kernels: self.kernels() }
    }

    fn kernels(self) -> Vec<XmxExpected> {
        let product = |name, local, blocks: u32| {
            let terms = self.weights().map_or(0, |(_, terms)| terms as u32);
            let groups = self.span_groups() as u32 * terms * self.products_each();
            XmxExpected {
                name,
                registers: 256,
                local,
                multiply_adds: blocks * 4 * groups,
                scattered_loads: 0,
            }
        };
        let plain = |name, registers, local| XmxExpected {
            name,
            registers,
            local,
            multiply_adds: 0,
            scattered_loads: 0,
        };
        match self {
            // Choices and counts, once a row.
            Self::Prepare => vec![XmxExpected { scattered_loads: 1, ..plain("prepare", 128, 320) }],
            Self::Combine => vec![plain("combine", 128, 96)],
            // Queries and new keys are a pass's: few, beside a cache.
            Self::Attention(head_size) => vec![
                XmxExpected { scattered_loads: 1, ..plain("pack_queries", 256, 0) },
                XmxExpected { scattered_loads: 2, ..plain("store_keys", 256, 0) },
                XmxExpected {
                    // Of heads of 64, the loop over values has one turn and is none.
                    multiply_adds: if head_size == 64 { 16 } else { 32 },
                    ..plain("attend", 256, head_size as u32 / 32 * 2304)
                },
            ],
            // Parts are structures, which a row's lane reads by itself: once a pass, and little.
            Self::Head(..) => vec![
                product("stream_head", 32 * 16 * 33 * 4, 4),
                XmxExpected { scattered_loads: 64, ..plain("merge_head", 256, 0) },
            ],
            Self::Experts(..) => vec![
                product("expert_gate_up", 0, 4),
                product("expert_down", 0, 4),
                plain("sum_inner", 256, 0),
            ],
            Self::Matmul(..) => vec![
                product("narrow_1", 8 << 10, 1),
                product("narrow_2", 16 << 10, 2),
                product("narrow_4", 32 << 10, 4),
                product("wide", 0, 4),
            ],
        }
    }
}

fn product_label(file: &str, format: Format, terms: XmxTerms) -> String {
    let terms = if terms == XmxTerms::Two { ", 2 terms" } else { "" };
    format!("xmx/{file}.cl ({}{terms})", format.name())
}

/// The numbers that codes of IQ4 stand for are the whole numbers next to a curve over the code less 8. Its factors from that of
/// the fourth power down, as bits of f16.
const IQ4_CURVE: [u16; 5] = [0x167f, 0x2d3d, 0xa44e, 0x49b8, 0x3dbb];
const IQ4_CENTRE: f32 = 8.0;

fn curve() -> String {
    let defined = |(power, bits): (usize, &u16)| format!("#define CURVE_{power} {bits:#x}\n");
    IQ4_CURVE.iter().rev().enumerate().map(defined).collect()
}

/// What `cl/xmx/weights.h` and `cl/xmx/products.h` ask the host for.
fn layout(format: Format, terms: XmxTerms, span_groups: usize) -> String {
    let bits = code_bits(format).unwrap_or_default();
    let groups = format.block_groups();
    let (group_bytes, block_bytes) = (bits * 64, format.tile_bytes(groups * 32));
    let scale_bytes = block_bytes - groups * group_bytes;
    let centre = |code: f32| {
        // As in `cl/xmx/weights.h`.
        let bias = if bits == 8 { 1024.0 } else { (1 << bits) as f32 };
        format!("#define CENTRE_BITS {:#x}\n", f16::from_f32(-bias - code).to_bits())
    };
    let scales = match format {
        Format::W4 => "#define SCALES_WHOLE\n#define ZERO_POINT\n".to_owned(),
        Format::Q2K => format!("#define SCALES_STEPS\n#define STEP_OFFSETS\n{}", centre(0.0)),
        Format::Q3K => format!("#define SCALES_STEPS\n{}", centre(4.0)),
        Format::Q4_0 => format!("#define SCALES_HALVES\n{}", centre(8.0)),
        Format::Q5_0 => format!("#define SCALES_HALVES\n{}", centre(16.0)),
        Format::Q4_1 | Format::Q5_1 => "#define SCALES_WHOLE\n#define OFFSET\n".to_owned(),
        Format::Q4K | Format::Q5K => "#define SCALES_BYTES\n#define OFFSET\n".to_owned(),
        Format::Q6K => format!("#define SCALES_STEPS\n{}", centre(32.0)),
        Format::Q8_0 => format!("#define SCALES_HALVES\n{}", centre(128.0)),
        Format::Mxfp4 => "#define SCALES_EXPONENTS\n#define E2M1\n".to_owned(),
        Format::Tq2 => format!("#define SCALES_WHOLE\n{}", centre(1.0)),
        Format::Iq4Nl => format!("#define SCALES_HALVES\n{}{}", centre(IQ4_CENTRE), curve()),
        Format::Iq4Xs => format!("#define SCALES_SIGNED\n{}{}", centre(IQ4_CENTRE), curve()),
        Format::F32 | Format::F16 | Format::Bf16 => "#define SCALES_NONE\n".to_owned(),
    };
    format!(
        "#define TERMS {}\n#define SPAN_GROUPS {span_groups}\n#define CODE_BITS {bits}\n#define BLOCK_GROUPS {groups}\n\
         #define SCALE_BYTES {scale_bytes}\n#define GROUP_BYTES {group_bytes}\n#define BLOCK_BYTES {block_bytes}\n{scales}",
        terms as u32
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In f16, as on a card, whether its multiply-adds round once or twice.
    #[test]
    fn codes_of_iq4_stand_for_what_the_curve_says() {
        let numbers = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
        let rounded = |x: f64| f16::from_f64(x).to_f64();
        for (code, number) in numbers.into_iter().enumerate() {
            let x = code as f64 - f64::from(IQ4_CENTRE);
            let (mut once, mut twice) = (0.0, 0.0);
            for factor in IQ4_CURVE.map(|bits| f16::from_bits(bits).to_f64()) {
                once = rounded(once * x + factor);
                twice = rounded(rounded(twice * x) + factor);
            }
            for y in [once, twice] {
                assert_eq!(rounded(rounded(y + 1536.0) - 1536.0), f64::from(number), "code {code}: {y}");
            }
        }
    }
}
