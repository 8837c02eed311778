//! Heads that see one latent, as DeepSeek-V2-Lite has them.

use anyhow::Result;
use axe::device::{Arg, Purpose};
use axe::ops::{
    ATTENTION_START, Attention, Cache, CacheKind, Family, Format, HeadMatrices, HeadRows, LATENT_START,
    LatentRotation, Matrix, Pairing, STRIDE_MULTIPLE, round_up,
};

use super::Bench;

const CONTEXT: usize = 4096;
const HEADS: usize = 16;
const LATENT: usize = 512;
const TURNS: usize = 64;
/// Values of a query that do not turn, and of a value.
const PLAIN: usize = 128;

/// Times the kernels of such heads for rows from position `start` on.
pub(super) fn measure(bench: &Bench<'_>, start: usize, rows: usize) -> Result<()> {
    let name = format!("latent {HEADS}x{LATENT}+{TURNS}");
    let kernels = ["pack_heads", "head_products", "rotate_and_cache_latent", "attention"];
    if !kernels.iter().any(|kernel| format!("{name} {kernel}").contains(bench.only)) {
        return Ok(());
    }
    let (device, size, format) = (&bench.device, LATENT + TURNS, Format::Q8_0);
    let stride = round_up((HEADS + 1) * size, STRIDE_MULTIPLE);
    let raw_stride = HEADS * (PLAIN + TURNS);
    let (queries, raw) = (bench.zeros(stride * rows)?, bench.zeros(raw_stride * rows)?);
    let out = bench.zeros(HEADS * LATENT * rows)?;
    let (angles, norm) = (bench.zeros(CONTEXT * TURNS)?, bench.zeros(LATENT)?);
    let cache = Cache::latent(device, CacheKind::F16, size, LATENT, CONTEXT)?;
    let bytes = format.matrix_bytes(HEADS * LATENT, PLAIN);
    let buffer = device.alloc(Purpose::Weights, bytes)?;
    device.fill(&buffer, 0)?;
    let matrix = Matrix { buffer, format, rows: HEADS * LATENT, columns: PLAIN, family: Family::Vector };
    let matrices = HeadMatrices { matrix, heads: HEADS, outputs: LATENT };
    let [packed, sums] = bench.packed(HEADS * rows, round_up(PLAIN, STRIDE_MULTIPLE))?;
    let input = HeadRows { rows: &raw, stride: raw_stride, at: 0, step: PLAIN + TURNS };
    let output = HeadRows { rows: &queries, stride, at: 0, step: size };
    let rotation = LatentRotation {
        rows: &queries,
        stride,
        q_heads: HEADS,
        k_at: HEADS * size,
        turning: &raw,
        turning_stride: raw_stride,
        turning_step: PLAIN + TURNS,
        turning_at: PLAIN,
        angles: &angles,
        pairing: Pairing::Neighbours,
        norm: &norm,
        epsilon: 1e-6,
    };
    let looks = Attention {
        q: &queries,
        stride,
        out: &out,
        out_stride: HEADS * LATENT,
        q_heads: HEADS,
        window: None,
        canvas: false,
        scale: 0.1,
        softcap: 0.0,
    };
    let pack = bench.kernels.pack_heads(device, &matrices, &input, rows, &packed, &sums)?;
    let products = bench.kernels.head_products(device, &matrices, &packed, &sums, rows, &output)?;
    let mut rotate = bench.kernels.rotate_and_cache_latent(device, &rotation, &cache, rows)?;
    rotate.set(LATENT_START, Arg::I32(start as i32))?;
    let mut attend = bench.kernels.attention(device, &looks, &cache, rows)?;
    attend.set(ATTENTION_START, Arg::I32(start as i32))?;
    let seen: f64 = (0..rows).map(|row| (start + row + 1) as f64).sum();
    let moved = (HEADS * PLAIN * rows * 4) as f64;
    let turned = ((HEADS * TURNS + size) * rows * 4) as f64;
    let cached = ((start + rows) * size * 2) as f64;
    let costs = [
        (2.0 * moved, moved),
        (bytes as f64, 2.0 * (HEADS * LATENT * PLAIN * rows) as f64),
        (turned, turned),
        (cached, seen * (2 * HEADS * (size + LATENT)) as f64),
    ];
    for ((kernel, launch), (bytes, operations)) in
        kernels.into_iter().zip([pack, products, rotate, attend]).zip(costs)
    {
        bench.line(&format!("{name} {kernel} ({rows} rows at {start})"), &[launch], bytes, operations)?;
    }
    Ok(())
}
