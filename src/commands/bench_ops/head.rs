//! The head of a diffusion model, which reads its table once for a whole canvas.

use anyhow::Result;
use axe::device::Purpose;
use axe::ops::{
    Family, Format, HeadOptions, HeadRun, HeadState, Matrix, RowInput, STRIDE_MULTIPLE, round_up,
};

use super::Bench;

/// Rows of a canvas.
const ROWS: usize = 256;

/// The widest tables a minute's measurement can afford: half the width and a quarter of the vocabulary of a 26B mixture.
const TABLES: &[(usize, usize, Format)] =
    &[(65_536, 1408, Format::Bf16), (65_536, 1408, Format::Q8_0), (65_536, 1408, Format::Q6K)];

/// Times the streaming head over rows whose distribution is flat: every token has weight and might be drawn, which is
/// the most there can be to do.
pub(super) fn measure(bench: &Bench<'_>) -> Result<()> {
    for &(vocabulary, hidden, format) in TABLES {
        let name = format!("diffusion head {vocabulary}x{hidden} {}", format.name());
        if !name.contains(bench.only) {
            continue;
        }
        let bytes = format.matrix_bytes(vocabulary, hidden);
        let buffer = bench.device.alloc(Purpose::Weights, bytes)?;
        // Zeros: every logit is the same.
        bench.device.fill(&buffer, 0)?;
        let table = Matrix { buffer, format, rows: vocabulary, columns: hidden, family: Family::Vector };
        let stride = round_up(hidden, STRIDE_MULTIPLE);
        let x = bench.zeros(stride * ROWS)?;
        let [packed, sums] = bench.packed(ROWS, stride)?;
        let input = RowInput { rows: &x, at: 0, branch: None, norm: None, n: hidden, stride, epsilon: 1e-6 };
        bench.device.enqueue(&bench.kernels.pack_rows(
            &bench.device,
            &input,
            ROWS,
            Family::Vector,
            &packed,
            &sums,
        )?)?;
        let state = HeadState::new(&bench.device, ROWS, hidden, true)?;
        let options = HeadOptions { softcap: 30.0, vocabulary, scale: 1.0 };
        let product = 2.0 * vocabulary as f64 * hidden as f64 * ROWS as f64;
        for (soft, part) in [(true, "with soft rows"), (false, "without")] {
            let mut launches = bench.kernels.streaming_head(
                &bench.device,
                &table,
                &packed,
                &sums,
                ROWS,
                &options,
                &state,
            )?;
            let run =
                HeadRun { temperature: 0.8, seed: 1, canvas: 0, step: 0, greedy: false, barred: &[], soft };
            run.set(&bench.device, &mut launches, &state)?;
            let operations = if soft { 2.0 * product } else { product };
            bench.group(&format!("{name} {part} ({ROWS} rows)"), &launches, bytes as f64, operations)?;
        }
    }
    Ok(())
}
