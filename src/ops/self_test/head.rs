//! Both ends of a diffusion model.

use super::{Sequence, compare, download, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::{Device, Purpose};
use crate::ops::head::{HeadOptions, HeadRun, HeadState, embed_reference, head_noise, head_reference};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::matmul::{Matrix, RowInput, prepare_reference};
use crate::ops::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};

/// Runs the kernels at the two ends of a diffusion model for the format of its table.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_head(device: &Device, kernels: &Kernels, format: Format) -> Result<(), OpsError> {
    const ROWS: usize = 11; // whole row blocks of either size, and a rest
    const VOCABULARY: usize = 9 * ROW_MULTIPLE + 5; // more pairs of tiles than slices
    const TEMPERATURE: f32 = 0.6;
    const SEED: u64 = 0x0123_4567_89ab_cdef;
    let hidden = match format {
        Format::W4 => 64,
        _ if format.block_groups() == 8 => 256,
        _ => 96,
    };
    let stride = round_up(hidden, STRIDE_MULTIPLE);
    let mut sequence = Sequence(format as u32 + 101);
    let tiles = random_tiles(format, VOCABULARY, hidden, &mut sequence);
    let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
    device.write(&buffer, 0, &tiles)?;
    let table = Matrix { buffer, format, rows: VOCABULARY, columns: hidden, family: Family::Vector };
    let wrong = |kernel: &str, what: String| OpsError::SelfTest {
        kernel: format!("{kernel} {}", format.name()),
        device: device.info().name.clone(),
        what,
    };

    let ids: Vec<i32> = (0..ROWS as i32).map(|i| i * 29).collect();
    let id_buffer = device.alloc(Purpose::Scratch, ROWS * 4)?;
    device.write(&id_buffer, 0, bytemuck::cast_slice(&ids))?;
    let x = poisoned(device, ROWS * stride)?;
    device.enqueue(&kernels.embed(device, &table, &id_buffer, ROWS, 1.5, &x, stride)?)?;
    let rows = download(device, &x)?;
    for (row, &id) in rows.chunks_exact(stride).zip(&ids) {
        let mut expected = embed_reference(format, &tiles, hidden, id as usize, 1.5);
        expected.resize(stride, 0.0);
        if let Some(i) = (0..stride).find(|&i| row[i] != expected[i]) {
            let what = format!("value {i} of token {id} is {}, the reference says {}", row[i], expected[i]);
            return Err(wrong("embed", what));
        }
    }

    norm_rows(device, kernels, hidden)?;
    // Rows of a length that gives logits of all sizes below the cap.
    let norm = vec![0.05f32; stride];
    let norm_buffer = upload(device, &norm)?;
    let input =
        RowInput { rows: &x, at: 0, branch: None, norm: Some(&norm_buffer), n: hidden, stride, epsilon: 0.0 };
    let [packed, sums] = poisoned_packed(device, kernels, ROWS, stride)?;
    device.enqueue(&kernels.pack_rows(device, &input, ROWS, Family::Vector, &packed, &sums)?)?;
    let norm: Vec<f64> = norm.iter().take(hidden).map(|&v| f64::from(v)).collect();
    let width = round_up(VOCABULARY, ROW_MULTIPLE);
    let logits = poisoned(device, ROWS * width)?;
    let options = HeadOptions { softcap: 30.0, vocabulary: VOCABULARY, scale: (hidden as f32).sqrt() };
    for launch in
        kernels.plain_logits(device, &table, &packed, &sums, ROWS, options.softcap, &logits, width)?
    {
        device.enqueue(&launch)?;
    }
    let state = HeadState::new(device, ROWS, hidden, true)?;
    device.fill(&state.results, f32::NAN.to_bits())?;
    device.fill(&state.soft, f32::NAN.to_bits())?;
    let mut launches = kernels.streaming_head(device, &table, &packed, &sums, ROWS, &options, &state)?;
    let barred = [0u32, 29];
    let run = HeadRun {
        temperature: TEMPERATURE,
        seed: SEED,
        canvas: 2,
        step: 7,
        greedy: false,
        barred: &barred,
        soft: true,
    };
    run.set(device, &mut launches, &state)?;
    for launch in &launches {
        device.enqueue(launch)?;
    }
    let results = state.read(device, ROWS)?;
    let (logits, soft) = (download(device, &logits)?, download(device, &state.soft)?);
    let size = format.tile_bytes(hidden);
    let weight = |token: usize, column: usize| -> f64 {
        f64::from(format.weight(&tiles[token / TILE * size..][..size], token % TILE, column))
    };
    for (row, found) in results.iter().enumerate() {
        let row_values: Vec<f64> = rows[row * stride..][..hidden].iter().map(|&v| f64::from(v)).collect();
        let (_, normed) = prepare_reference(&row_values, None, Some(&norm), 0.0);
        let capped: Vec<f64> = (0..VOCABULARY)
            .map(|token| {
                let dot: f64 = normed.iter().enumerate().map(|(i, v)| weight(token, i) * v).sum();
                30.0 * (dot / 30.0).tanh()
            })
            .collect();
        compare(device, "plain_logits", &logits[row * width..][..VOCABULARY], &capped, 2e-5)?;
        // From here on by the device's own logits, so that near ties fall the same way.
        let processed: Vec<f64> =
            logits[row * width..][..VOCABULARY].iter().map(|&l| f64::from(l / TEMPERATURE)).collect();
        let chosen = |token: &usize| row > 0 || !barred.contains(&(*token as u32));
        let noisy = |token: usize| processed[token] + head_noise(SEED, 2, 7, row as u32, token as u32);
        let argmax = (0..VOCABULARY)
            .filter(chosen)
            .fold(None, |best, token| match best {
                Some(best) if processed[best] >= processed[token] => Some(best),
                _ => Some(token),
            })
            .unwrap_or(0);
        let drawn = (0..VOCABULARY).filter(chosen).map(noisy).fold(f64::NEG_INFINITY, f64::max);
        let sampled = usize::try_from(found.sampled).ok().filter(|&t| t < VOCABULARY && chosen(&t));
        if found.bad != 0 || found.argmax != argmax as i32 {
            return Err(wrong("stream_head", format!("row {row} gives {found:?}, argmax is {argmax}")));
        }
        if sampled.is_none_or(|token| noisy(token) < drawn - 1e-4) {
            return Err(wrong("stream_head", format!("row {row} draws {}", found.sampled)));
        }
        let reference = head_reference(&processed, hidden, weight);
        let expected: Vec<f64> = reference.soft.iter().map(|v| v * f64::from(options.scale)).collect();
        compare(device, "stream_head's peak", &[found.peak], &[reference.peak], 1e-6)?;
        compare(device, "stream_head's entropy", &[found.entropy + 1.0], &[reference.entropy + 1.0], 1e-5)?;
        compare(device, "stream_head's soft rows", &soft[row * stride..][..hidden], &expected, 2e-5)?;
        compare(
            device,
            "stream_head's soft rows",
            &soft[row * stride + hidden..][..stride - hidden],
            &vec![0.0; stride - hidden],
            0.0,
        )?;
    }

    let out = poisoned(device, ROWS * stride)?;
    let given = upload(device, &logits)?;
    for launch in kernels.soft_embedding(device, &table, &given, width, ROWS, &options, &out, stride)? {
        device.enqueue(&launch)?;
    }
    let plain = download(device, &out)?;
    for row in 0..ROWS {
        let processed: Vec<f64> = logits[row * width..][..VOCABULARY].iter().map(|&l| f64::from(l)).collect();
        let mut expected: Vec<f64> = head_reference(&processed, hidden, weight)
            .soft
            .iter()
            .map(|v| v * f64::from(options.scale))
            .collect();
        expected.resize(stride, 0.0);
        compare(device, "soft_embedding", &plain[row * stride..][..stride], &expected, 2e-5)?;
    }
    Ok(())
}

fn norm_rows(device: &Device, kernels: &Kernels, columns: usize) -> Result<(), OpsError> {
    const ROWS: usize = 3;
    const EPSILON: f32 = 1e-3;
    let stride = round_up(columns, STRIDE_MULTIPLE) + STRIDE_MULTIPLE;
    let mut sequence = Sequence(5);
    let rows: Vec<f32> =
        (0..ROWS * stride).map(|i| if i % stride < columns { sequence.next() } else { 0.0 }).collect();
    let buffer = upload(device, &rows)?;
    device.enqueue(&kernels.norm_rows(device, &buffer, ROWS, columns, stride, EPSILON)?)?;
    let found = download(device, &buffer)?;
    for (row, found) in rows.chunks_exact(stride).zip(found.chunks_exact(stride)) {
        let row: Vec<f64> = row[..columns].iter().map(|&v| f64::from(v)).collect();
        let ones = vec![1.0; columns];
        let (_, mut expected) = prepare_reference(&row, None, Some(&ones), f64::from(EPSILON));
        compare(device, "norm_rows", &found[..columns], &expected, 1e-6)?;
        expected.fill(0.0);
        expected.resize(stride - columns, 0.0);
        compare(device, "norm_rows", &found[columns..], &expected, 0.0)?;
    }
    Ok(())
}
