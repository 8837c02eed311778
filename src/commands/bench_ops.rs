//! `axed bench-ops`

mod head;
mod latent;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use axe::config::Config;
use axe::device::{Arg, Buffer, Device, Launch, Purpose};
use axe::ops::{
    ATTENTION_START, Activation, Attention, Cache, CacheKind, CombineInput, Experts, Family, Finish, Format,
    Join, Kernels, Matrix, Output, Pairing, Parts, Peak, ROTATE_START, ROW_MULTIPLE, Rotation, Routing,
    RowInput, STRIDE_MULTIPLE, TILE, choice_values, round_up, seconds,
};
use clap::Args;

/// Time every kernel at the sizes of real models, against what the device can do at best.
#[derive(Debug, Args)]
pub struct Options {
    /// Rows of the many-row kernels.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub rows: u32,
    /// Rounds, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Only lines that contain this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Configuration file, for the device to use [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Distinct weights that a one-row measurement goes through, as a model's layers do: more than caches keep.
const WORKING_SET: usize = 128 << 20;

/// What weights are filled with: in every format's scales neither zero nor denormal.
const EVERYWHERE_A_NUMBER: u32 = 0x3c3c_3c3c;

/// Outputs, inputs and format of the matrices of a model.
type Shapes = &'static [(&'static str, usize, usize, Format)];

const SMOLLM2: Shapes = &[
    ("qkv", 960, 576, Format::Q4_1),
    ("output", 576, 576, Format::Q4_1),
    ("gate and up", 3072, 576, Format::Q4_1),
    ("down", 576, 1536, Format::Q4_1),
    ("head", 49152, 576, Format::Q8_0),
];
const GEMMA3: Shapes = &[
    ("q and k", 1280, 640, Format::Q5_0),
    ("v", 256, 640, Format::Q8_0),
    ("output", 640, 1024, Format::Q4K),
    ("gate and up", 4096, 640, Format::Q5_0),
    ("down", 640, 2048, Format::Q6K),
    ("down", 640, 2048, Format::Q4K),
    ("head", 262_144, 640, Format::Q8_0),
];
/// The widest matrices of a 26B mixture's dense part, in the formats nobody above uses.
const OTHERS: Shapes = &[
    ("square", 2816, 2816, Format::Q4_0),
    ("square", 2816, 2816, Format::Q5_1),
    ("square", 2816, 2816, Format::Q5K),
    ("square", 2816, 2816, Format::Q2K),
    ("square", 2816, 2816, Format::Q3K),
    ("square", 2816, 2816, Format::Iq4Nl),
    ("square", 2816, 2816, Format::Iq4Xs),
    ("square", 2816, 2816, Format::Mxfp4),
    ("square", 2816, 2816, Format::Tq2),
    ("square", 2816, 2816, Format::F16),
    ("square", 2816, 2816, Format::Bf16),
    ("square", 2816, 2816, Format::F32),
];

/// What causal models multiply.
const CAUSAL: [(&str, Shapes, Activation); 3] = [
    ("smollm2-135m", SMOLLM2, Activation::Silu),
    ("gemma-3-270m", GEMMA3, Activation::GeluTanh),
    ("others", OTHERS, Activation::Silu),
];

/// A layer of experts.
struct Mixture {
    experts: usize,
    top: usize,
    hidden: usize,
    inner: usize,
}

/// A quarter of the experts of a 26B mixture, of half its hidden size.
const MIXTURE: Mixture = Mixture { experts: 32, top: 8, hidden: 1408, inner: 704 };

/// The experts of a layer of Qwen3-30B-A3B.
const QWEN3_MIXTURE: Mixture = Mixture { experts: 128, top: 8, hidden: 2048, inner: 768 };

struct Bench<'a> {
    device: Device,
    kernels: Kernels,
    peak: Peak,
    rows: usize,
    rounds: usize,
    only: &'a str,
}

/// Prints a table: what a kernel reads and computes, its time, and its share of the device's limits.
pub fn run(options: &Options) -> Result<()> {
    super::unless_closed(measure(options))
}

fn measure(options: &Options) -> Result<()> {
    // Line by line, for people who watch.
    let mut out = std::io::stdout();
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    axe::device::runtime::locate(config.device.threads)?;
    let device = axe::load::open_device(&config.device)?;
    let kernels = Kernels::new(&device)?;
    let peak = kernels.peak(&device)?;
    writeln!(out, "{}, driver {}", device.info(), device.info().driver_version)?;
    println!(
        "pure read {:.1} GB/s, pure multiply-add {:.0} GFLOP/s; shares are of these",
        peak.read / 1e9,
        peak.multiply_add / 1e9
    );
    writeln!(
        out,
        "{:<44} {:>10} {:>9} {:>7} {:>6} {:>9} {:>6}",
        "kernel", "bytes", "time us", "GB/s", "share", "GFLOP/s", "share"
    )?;
    let unit = Kernels::with_matrix_unit(&device)?;
    let integers = Kernels::with_integers(&device)?;
    let mut bench = Bench {
        device,
        kernels,
        peak,
        rows: options.rows as usize,
        rounds: options.rounds as usize,
        only: &options.only,
    };
    bench.causal()?;
    bench.sequence("smollm2-135m", 9, 3, 64)?;
    bench.sequence("gemma-3-270m", 4, 1, 256)?;
    for rows in [1, 2, 8, 16] {
        bench.mixture(&QWEN3_MIXTURE, Format::Q4K, rows)?;
    }
    for (start, rows) in [(511, 1), (511, 8), (0, bench.rows)] {
        latent::measure(&bench, start, rows)?;
    }
    bench.whole_rows()?;
    bench.choices("smollm2-135m", 49152)?;
    bench.choices("gemma-3-270m", 262_144)?;
    bench.diffusion()?;
    if let Some(kernels) = unit {
        bench.kernels = kernels;
        writeln!(out, "by the matrix unit; shares are of what vectors can do, and may be above 100 %")?;
        for format in [Format::W4, Format::Bf16, Format::Q8_0] {
            bench.products("diffusion", "square", 2816, 2816, format, Activation::GeluTanh)?;
        }
        bench.diffusion()?;
    }
    if let Some(kernels) = integers {
        bench.kernels = kernels;
        writeln!(out, "by integers; shares are of what vectors can do, and may be above 100 %")?;
        bench.causal()?;
        for rows in [1, 2, 8, 16] {
            bench.mixture(&QWEN3_MIXTURE, Format::Q4K, rows)?;
        }
    }
    Ok(())
}

impl Bench<'_> {
    /// Buffers for packed rows and their sums.
    fn packed(&self, rows: usize, stride: usize) -> Result<[Buffer; 2]> {
        let products = self.kernels.products();
        Ok([
            self.zeros(products.packed_values(rows, stride))?,
            self.zeros(products.sums_values(rows, stride))?,
        ])
    }

    /// The matrices of causal models.
    fn causal(&self) -> Result<()> {
        for (model, shapes, activation) in CAUSAL {
            for &(part, rows, columns, format) in shapes {
                self.products(model, part, rows, columns, format, activation)?;
            }
        }
        Ok(())
    }

    /// What only diffusion models do.
    fn diffusion(&self) -> Result<()> {
        for format in [Format::W4, Format::Bf16] {
            self.mixture(&MIXTURE, format, self.rows)?;
        }
        head::measure(self)
    }

    fn zeros(&self, values: usize) -> Result<Buffer> {
        let buffer = self.device.alloc(Purpose::Scratch, values * 4)?;
        self.device.fill(&buffer, 0)?;
        Ok(buffer)
    }

    /// Times `launches` and prints the line of one of them.
    fn line(&self, name: &str, launches: &[Launch], bytes: f64, operations: f64) -> Result<()> {
        let time = seconds(&self.device, launches, self.rounds)? / launches.len() as f64;
        self.print(name, time, bytes, operations)
    }

    /// Times `launches` that make one op together, and prints their line.
    fn group(&self, name: &str, launches: &[Launch], bytes: f64, operations: f64) -> Result<()> {
        self.print(name, seconds(&self.device, launches, self.rounds)?, bytes, operations)
    }

    fn print(&self, name: &str, time: f64, bytes: f64, operations: f64) -> Result<()> {
        let (read, computed) = (bytes / time, operations / time);
        writeln!(
            std::io::stdout(),
            "{name:<44} {bytes:>10.0} {:>9.1} {:>7.1} {:>5.0}% {:>9.1} {:>5.0}%",
            time * 1e6,
            read / 1e9,
            100.0 * read / self.peak.read,
            computed / 1e9,
            100.0 * computed / self.peak.multiply_add
        )?;
        Ok(())
    }

    fn products(
        &self,
        model: &str,
        part: &str,
        rows: usize,
        columns: usize,
        format: Format,
        activation: Activation,
    ) -> Result<()> {
        let name = |kernel: &str| format!("{model} {part} {rows}x{columns} {} {kernel}", format.name());
        if ![name("narrow"), name("matmul")].iter().any(|name| name.contains(self.only)) {
            return Ok(());
        }
        let bytes = format.matrix_bytes(rows, columns);
        let matrices: Vec<Matrix> = (0..WORKING_SET.div_ceil(bytes))
            .map(|_| {
                let buffer = self.device.alloc(Purpose::Weights, bytes)?;
                self.device.fill(&buffer, EVERYWHERE_A_NUMBER)?;
                Ok(Matrix { buffer, format, rows, columns, family: Family::Vector })
            })
            .collect::<Result<_>>()?;
        let stride = round_up(columns, STRIDE_MULTIPLE);
        let (out_stride, norm) = (round_up(rows, STRIDE_MULTIPLE), self.zeros(stride)?);
        let x = self.zeros(stride * self.rows)?;
        let few = self.zeros(out_stride * self.kernels.narrow_rows(&matrices[0]))?;
        let input =
            RowInput { rows: &x, at: 0, branch: None, norm: Some(&norm), n: columns, stride, epsilon: 1e-5 };
        let finish = if part == "gate and up" { Finish::Gated(activation) } else { Finish::Store };
        let output = Output { rows: &few, at: 0, stride: out_stride };
        let operations = 2.0 * rows as f64 * columns as f64;
        for count in [1, 2, 4, 8, 16] {
            let fits = count <= self.kernels.narrow_rows(&matrices[0]).min(self.rows);
            if !fits {
                continue;
            }
            let launches = matrices
                .iter()
                .map(|matrix| {
                    Ok(self.kernels.narrow(&self.device, matrix, &input, count, finish, &output)?)
                })
                .collect::<Result<Vec<_>>>()?;
            let name = format!("{} ({count})", name("narrow"));
            self.line(&name, &launches, bytes as f64, operations * count as f64)?;
        }
        if part == "head" {
            return Ok(()); // only rows that are sampled from go through it
        }
        let many = self.zeros(out_stride * self.rows)?;
        let output = Output { rows: &many, at: 0, stride: out_stride };
        let [packed, sums] = self.packed(self.rows, stride)?;
        let matmul =
            self.kernels.matmul(&self.device, &matrices[0], &packed, &sums, self.rows, finish, &output)?;
        let name = format!("{} ({} rows)", name("matmul"), self.rows);
        self.line(&name, &[matmul], bytes as f64, operations * self.rows as f64)?;
        let pack = self.kernels.pack_rows(&self.device, &input, self.rows, Family::Vector, &packed, &sums)?;
        let moved = (2 * columns * self.rows * 4) as f64;
        self.line(&format!("{model} pack_rows {columns} ({} rows)", self.rows), &[pack], moved, moved)
    }

    /// The largest logits of rows.
    fn choices(&self, model: &str, vocabulary: usize) -> Result<()> {
        for rows in [1, 8] {
            let name = format!("{model} top_of_rows {vocabulary} ({rows} rows)");
            if !name.contains(self.only) {
                continue;
            }
            let (logits, choices) = (self.zeros(rows * vocabulary)?, self.zeros(choice_values(rows))?);
            let launch =
                self.kernels.choose(&self.device, &logits, vocabulary, vocabulary, rows, &choices)?;
            let values = (rows * vocabulary) as f64;
            self.line(&name, &[launch], values * 4.0, values * 2.0)?;
        }
        Ok(())
    }

    /// Rotation and attention of a layer.
    fn sequence(&self, model: &str, heads: usize, kv_heads: usize, head_size: usize) -> Result<()> {
        const CONTEXT: usize = 4096;
        let (k_at, v_at) = (heads * head_size, (heads + kv_heads) * head_size);
        let stride = round_up((heads + 2 * kv_heads) * head_size, STRIDE_MULTIPLE);
        let qkv = self.zeros(stride * self.rows)?;
        let out = self.zeros(stride * self.rows)?;
        let angles = self.zeros(CONTEXT * head_size)?;
        for (kind, start, rows) in [
            (CacheKind::F16, 511, 1),
            (CacheKind::F16, 511, 2),
            (CacheKind::F16, 511, 4),
            (CacheKind::F16, 511, 8),
            (CacheKind::F16, 511, 16),
            (CacheKind::F16, CONTEXT - 16, 1),
            (CacheKind::F16, CONTEXT - 16, 4),
            (CacheKind::F32, 511, 1),
            (CacheKind::F16, 0, self.rows.min(CONTEXT)),
        ] {
            let cache = Cache::new(&self.device, kind, kv_heads, head_size, CONTEXT)?;
            let rotation = Rotation {
                qkv: &qkv,
                stride,
                q_heads: heads,
                k_at,
                v_at,
                bias: None,
                angles: &angles,
                half_rotated: head_size / 2,
                pairing: Pairing::RotatedHalves,
                norms: None,
                value_norms: false,
                queries_only: false,
                queries: None,
                epsilon: 1e-5,
            };
            let looks = Attention {
                q: &qkv,
                stride,
                out: &out,
                out_stride: stride,
                q_heads: heads,
                window: None,
                canvas: false,
                scale: 0.1,
                softcap: 0.0,
            };
            let mut rotate = self.kernels.rotate_and_cache(&self.device, &rotation, &cache, rows)?;
            rotate.set(ROTATE_START, Arg::I32(start as i32))?;
            let mut attend = self.kernels.attention(&self.device, &looks, &cache, rows)?;
            attend.set(ATTENTION_START, Arg::I32(start as i32))?;
            let width = ((heads + 2 * kv_heads) * head_size * rows) as f64;
            let name = format!("{model} {heads}:{kv_heads}x{head_size} {kind}");
            if name.contains(self.only) || "attention rotate".contains(self.only) {
                let at = format!("{name} rotate_and_cache ({rows} rows)");
                self.line(&at, &[rotate], width * 4.0, width * 3.0)?;
                let seen: f64 = (0..rows).map(|row| (start + row + 1) as f64).sum();
                let cached = (start + rows) as f64 * (2 * kv_heads * head_size) as f64;
                self.line(
                    &format!("{name} attention ({rows} rows at {start})"),
                    &[attend],
                    cached * if kind == CacheKind::F16 { 2.0 } else { 4.0 },
                    seen * (4 * heads * head_size) as f64,
                )?;
            }
        }
        Ok(())
    }

    /// What is done to whole rows between products, at the sizes of a Gemma 4 E2B: stream, layers' inputs, vocabulary.
    fn whole_rows(&self) -> Result<()> {
        const LAYERS: usize = 35;
        const SIZE: usize = 256;
        const VOCABULARY: usize = 262_144;
        /// Rows with logits: a block.
        const LOGITS: usize = 16;
        let (hidden, width, rows) = (1536, LAYERS * SIZE, self.rows);
        let name = |kernel: &str, rows: usize| format!("gemma-4-e2b {kernel} ({rows} rows)");
        if !["join_rows", "gate_rows", "mix_parts"]
            .iter()
            .any(|kernel| name(kernel, rows).contains(self.only))
            && !name("cap_rows", LOGITS).contains(self.only)
        {
            return Ok(());
        }
        let (stream, branch) = (self.zeros(rows * hidden)?, self.zeros(rows * hidden)?);
        let (parts, embedded) = (self.zeros(rows * width)?, self.zeros(rows * width)?);
        let (gate, norm) = (self.zeros(rows * SIZE)?, self.zeros(hidden)?);
        let logits = self.zeros(LOGITS * VOCABULARY)?;
        let epsilon = 1e-6;
        let (n, stride) = (hidden, hidden);
        let join = Join { rows: &stream, branch: &branch, weight: &norm, scalar: 0.5, n, stride, epsilon };
        let mixing = Parts {
            parts: &parts,
            embedded: &embedded,
            weight: &norm,
            scale: 0.1,
            share: 0.7,
            count: LAYERS,
            size: SIZE,
            stride: width,
            epsilon,
        };
        let (device, kernels, inputs) = (&self.device, &self.kernels, (&parts, width));
        let activation = Activation::GeluTanh;
        let bytes = |floats: usize| (floats * 4) as f64;
        let launch = kernels.join_rows(device, &join, rows, &stream)?;
        self.line(&name("join_rows", rows), &[launch], bytes(3 * rows * hidden), (6 * rows * hidden) as f64)?;
        let launch = kernels.gate_rows(device, activation, &gate, SIZE, inputs, SIZE, rows, SIZE)?;
        self.line(&name("gate_rows", rows), &[launch], bytes(3 * rows * SIZE), (8 * rows * SIZE) as f64)?;
        let launch = kernels.mix_parts(device, &mixing, rows)?;
        self.line(&name("mix_parts", rows), &[launch], bytes(3 * rows * width), (7 * rows * width) as f64)?;
        let launch = kernels.cap_rows(device, &logits, LOGITS, VOCABULARY, VOCABULARY, 30.0)?;
        let values = LOGITS * VOCABULARY;
        self.line(&name("cap_rows", LOGITS), &[launch], bytes(2 * values), (8 * values) as f64)
    }

    /// Every kernel of a mixture of experts.
    fn mixture(&self, mixture: &Mixture, format: Format, rows: usize) -> Result<()> {
        let &Mixture { experts, top, hidden, inner } = mixture;
        let name = |kernel: &str| {
            let format = format.name();
            format!("{experts}/{top} experts {hidden}:{inner} {format} {kernel} ({} rows)", rows)
        };
        let kernels =
            ["route", "pack_for_experts", "expert_gate_up", "expert_down", "combine", "add_experts"];
        if !kernels.iter().any(|kernel| name(kernel).contains(self.only)) {
            return Ok(());
        }
        let slots = rows * top;
        let stacked = |rows_each: usize, columns: usize, outputs: usize| -> Result<Experts> {
            let rows = experts * rows_each;
            let buffer = self.device.alloc(Purpose::Weights, format.matrix_bytes(rows, columns))?;
            self.device.fill(&buffer, 0)?;
            Ok(Experts {
                matrix: Matrix { buffer, format, rows, columns, family: Family::Vector },
                experts,
                outputs,
            })
        };
        let gate_up = stacked(2 * round_up(inner, TILE), hidden, inner)?;
        let down = stacked(round_up(hidden, ROW_MULTIPLE), inner, hidden)?;
        let (stride, inner_stride) = (round_up(hidden, STRIDE_MULTIPLE), round_up(inner, STRIDE_MULTIPLE));
        let (norm, scales) = (self.zeros(stride)?, self.zeros(experts)?);
        // Every expert gets its share of the rows, not quite the same.
        let scores: Vec<f32> = (0..rows * experts)
            .map(|i| {
                (i as u32).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519) as f32
            })
            .map(|spread| spread / u32::MAX as f32)
            .collect();
        let scores_buffer = self.zeros(scores.len())?;
        self.device.write(&scores_buffer, 0, bytemuck::cast_slice(&scores))?;
        let routing = Routing::new(&self.device, experts, top, rows)?;
        let chosen = self.zeros(slots)?;
        let (x, mlp) = (self.zeros(stride * rows)?, self.zeros(stride * rows)?);
        let [packed, sums] = self.packed(slots, stride)?;
        let [inner_packed, inner_sums] = self.packed(slots, inner_stride)?;
        let out = self.zeros(stride * slots)?;
        let input =
            RowInput { rows: &x, at: 0, branch: None, norm: Some(&norm), n: hidden, stride, epsilon: 1e-6 };
        let join = CombineInput {
            out: &out,
            out_stride: stride,
            mlp: &mlp,
            residual: &x,
            moe_norm: &norm,
            mlp_norm: &norm,
            join_norm: &norm,
            scalar: 1.0,
            n: hidden,
            stride,
            epsilon: 1e-6,
            next: None,
        };
        let device = &self.device;
        let launches = [
            self.kernels.route(device, &scores_buffer, experts, &scales, &chosen, &routing, rows)?,
            self.kernels.pack_for_experts(
                device,
                &input,
                &chosen,
                &routing,
                rows,
                Family::Vector,
                &packed,
                &sums,
            )?,
            self.kernels.expert_gate_up(
                device,
                &gate_up,
                Activation::GeluTanh,
                &routing,
                rows,
                &packed,
                &sums,
                &inner_packed,
                &inner_sums,
            )?,
            self.kernels.expert_down(
                device,
                &down,
                &routing,
                rows,
                &inner_packed,
                &inner_sums,
                &out,
                stride,
            )?,
            self.kernels.combine(device, &join, &routing, rows, &x)?,
            self.kernels.add_experts(device, &out, stride, &routing, rows, &x, hidden, stride)?,
        ];
        let values = |floats: usize| (floats * 4) as f64;
        let product = |outputs: usize| 2.0 * slots as f64 * (outputs * hidden) as f64;
        let costs = [
            (values(rows * experts), (rows * experts * (top + 2)) as f64),
            (values((rows + slots) * hidden), (rows * hidden * 4 + slots * hidden * 3) as f64),
            (gate_up.matrix.bytes() as f64, product(2 * inner)),
            (down.matrix.bytes() as f64, product(inner)),
            (values((slots + 3 * rows) * hidden), ((2 * slots + 12 * rows) * hidden) as f64),
            (values((slots + 2 * rows) * hidden), ((2 * slots + rows) * hidden) as f64),
        ];
        for ((kernel, launch), (bytes, operations)) in kernels.into_iter().zip(launches).zip(costs) {
            self.line(&name(kernel), &[launch], bytes, operations)?;
        }
        Ok(())
    }
}
