//! Every kernel once on a small input against its CPU reference, before a model relies on it.

use super::attention::{
    ATTENTION_START, Attention, Cache, CacheKind, Pairing, ROTATE_START, Rotation, attention_reference,
};
use super::head::{HeadOptions, HeadRun, HeadState, embed_reference, head_noise, head_reference};
use super::kernels::{Kernels, OpsError, Products};
use super::matmul::{Activation, Finish, Matrix, Output, RowInput, activate, prepare_reference};
use super::moe::{CombineInput, Experts, Routing, combine_reference, expert_reference, route_reference};
use super::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, Scales, TILE, round_up};
use crate::device::{Buffer, Device, Purpose};

/// Numbers in [-1, 1) that are the same every time.
struct Sequence(u32);

impl Sequence {
    fn bits(&mut self) -> u32 {
        // Linear congruential generator with the constants of Numerical Recipes; any spread will do here.
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 >> 8
    }

    fn next(&mut self) -> f32 {
        self.bits() as f32 / (1 << 23) as f32 - 1.0
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn upload(device: &Device, values: &[f32]) -> Result<Buffer, OpsError> {
    let buffer = device.alloc(Purpose::Scratch, values.len() * 4)?;
    device.write(&buffer, 0, bytes(values))?;
    Ok(buffer)
}

fn download(device: &Device, buffer: &Buffer) -> Result<Vec<f32>, OpsError> {
    let mut values = vec![0f32; buffer.size() / 4];
    device.read(buffer, 0, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// A buffer of NaN: a kernel that forgets to write a value is found out.
fn poisoned(device: &Device, values: usize) -> Result<Buffer, OpsError> {
    let buffer = device.alloc(Purpose::Scratch, values * 4)?;
    device.fill(&buffer, f32::NAN.to_bits())?;
    Ok(buffer)
}

/// Such buffers for packed rows and their sums.
fn poisoned_packed(
    device: &Device,
    kernels: &Kernels,
    rows: usize,
    stride: usize,
) -> Result<[Buffer; 2], OpsError> {
    let products = kernels.products();
    Ok([
        poisoned(device, products.packed_values(rows, stride))?,
        poisoned(device, products.sums_values(rows, stride))?,
    ])
}

/// Runs the kernels for these weight formats, this head size and this kind of cache.
///
/// # Errors
/// [`OpsError::SelfTest`] with the kernel, the device and the first wrong number; or what the device says.
pub fn self_test(
    device: &Device,
    kernels: &Kernels,
    formats: &[Format],
    head_size: usize,
    cache: CacheKind,
) -> Result<(), OpsError> {
    for &format in formats {
        products(device, kernels, format)?;
    }
    attention(device, kernels, head_size, cache)
}

fn compare(
    device: &Device,
    kernel: &str,
    found: &[f32],
    expected: &[f64],
    tolerance: f64,
) -> Result<(), OpsError> {
    let largest = expected.iter().fold(1e-3f64, |top, v| top.max(v.abs()));
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(f) - e).abs();
        if off.is_nan() || off > tolerance * largest {
            return Err(OpsError::SelfTest {
                kernel: kernel.to_owned(),
                device: device.info().name.clone(),
                what: format!("value {i} is {f}, the reference says {e}"),
            });
        }
    }
    Ok(())
}

/// A matrix of pseudo-random codes and scales, as tiles.
fn random_tiles(format: Format, rows: usize, columns: usize, sequence: &mut Sequence) -> Vec<u8> {
    let mut tiles = vec![0u8; format.matrix_bytes(rows, columns)];
    let block = format.block_codes();
    for row in 0..rows {
        let size = format.tile_bytes(columns);
        let tile = &mut tiles[row / TILE * size..][..size];
        if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
            let elements: Vec<u8> = (0..columns)
                .flat_map(|_| {
                    let value = sequence.next();
                    match format {
                        Format::F32 => value.to_le_bytes().to_vec(),
                        Format::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                        _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                    }
                })
                .collect();
            format.put_numbers(tile, row % TILE, &elements);
            continue;
        }
        let codes_below = match format {
            Format::Q8_0 => 256,
            Format::Q6K => 64,
            Format::Q5_0 | Format::Q5_1 | Format::Q5K => 32,
            _ => 16,
        };
        for first in (0..columns).step_by(block) {
            let codes: Vec<u8> =
                (first..columns.min(first + block)).map(|_| (sequence.bits() % codes_below) as u8).collect();
            let offset = match format {
                Format::W4 => (sequence.bits() % 16) as f32,
                _ => sequence.next() * 0.3,
            };
            let small: Vec<u8> = (0..16).map(|_| (sequence.bits() % 64) as u8).collect();
            format.put_codes(
                tile,
                row % TILE,
                first,
                &codes,
                Scales {
                    scale: half::f16::from_f32(sequence.next() * 0.05).to_bits(),
                    offset: half::f16::from_f32(offset).to_bits(),
                    scales: match format {
                        Format::Q6K => &small,
                        Format::Q4K | Format::Q5K => &small[..8],
                        _ => &[],
                    },
                    offsets: if matches!(format, Format::Q4K | Format::Q5K) { &small[8..] } else { &[] },
                },
            );
        }
    }
    tiles
}

fn products(device: &Device, kernels: &Kernels, format: Format) -> Result<(), OpsError> {
    const ROWS: usize = 11; // whole row blocks of either size, and a rest
    const OUTPUTS: usize = ROW_MULTIPLE + 5;
    const EPSILON: f32 = 1e-5;
    let columns = if format.block_groups() == 8 { 512 } else { 96 };
    let stride = round_up(columns, STRIDE_MULTIPLE);
    let mut sequence = Sequence(format as u32 + 1);
    let tiles = random_tiles(format, OUTPUTS, columns, &mut sequence);
    let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
    device.write(&buffer, 0, &tiles)?;
    let matrix = Matrix { buffer, format, rows: OUTPUTS, columns };
    let padded_rows = |sequence: &mut Sequence| -> Vec<f32> {
        (0..ROWS * stride).map(|i| if i % stride < columns { sequence.next() } else { 0.0 }).collect()
    };
    let (x, branch) = (padded_rows(&mut sequence), padded_rows(&mut sequence));
    let weight = |sequence: &mut Sequence| {
        let mut weight = sequence.take(columns);
        weight.resize(stride, 0.0);
        weight
    };
    let (branch_weight, norm) = (weight(&mut sequence), weight(&mut sequence));
    let out_stride = 2 * ROW_MULTIPLE;
    let other = sequence.take(ROWS * out_stride);
    let (x_buffer, branch_buffer) = (upload(device, &x)?, upload(device, &branch)?);
    let (branch_weight_buffer, norm_buffer) = (upload(device, &branch_weight)?, upload(device, &norm)?);
    let other_buffer = upload(device, &other)?;
    let new_rows = poisoned(device, ROWS * stride)?;
    let input = RowInput {
        rows: &x_buffer,
        at: 0,
        branch: Some((&branch_buffer, &branch_weight_buffer, &new_rows)),
        norm: Some(&norm_buffer),
        n: columns,
        stride,
        epsilon: EPSILON,
    };
    let [packed, sums] = poisoned_packed(device, kernels, ROWS, stride)?;

    let as_f64 = |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(v)).collect() };
    let size = format.tile_bytes(columns);
    let weights: Vec<f64> = (0..OUTPUTS * columns)
        .map(|i| {
            let (row, column) = (i / columns, i % columns);
            f64::from(format.weight(&tiles[row / TILE * size..][..size], row % TILE, column))
        })
        .collect();
    for finish in [
        Finish::Store,
        Finish::Add(&other_buffer),
        Finish::Gated(Activation::Silu),
        Finish::Gated(Activation::GeluTanh),
        Finish::GatedWith(Activation::Silu, &other_buffer),
        Finish::GatedWith(Activation::GeluTanh, &other_buffer),
    ] {
        let width = if matches!(finish, Finish::Gated(_)) { ROW_MULTIPLE } else { out_stride };
        let many = poisoned(device, ROWS * out_stride)?;
        let output = Output { rows: &many, at: 0, stride: out_stride };
        device.enqueue(&kernels.pack_rows(device, &input, ROWS, &packed, &sums)?)?;
        device.enqueue(&kernels.matmul(device, &matrix, &packed, &sums, ROWS, finish, &output)?)?;
        let many = download(device, &many)?;
        let sums_kept = download(device, &new_rows)?;
        for row in [0, ROWS - 1] {
            let slice = |v: &[f32]| as_f64(&v[row * stride..][..columns]);
            let (sum, prepared) = prepare_reference(
                &slice(&x),
                Some((&slice(&branch), &as_f64(&branch_weight[..columns]))),
                Some(&as_f64(&norm[..columns])),
                f64::from(EPSILON),
            );
            compare(device, "pack_rows", &sums_kept[row * stride..][..columns], &sum, 1e-5)?;
            let product = |output: usize| -> f64 {
                weights
                    .get(output * columns..(output + 1) * columns)
                    .map_or(0.0, |weights| weights.iter().zip(&prepared).map(|(w, v)| w * v).sum::<f64>())
            };
            let expected: Vec<f64> = (0..width)
                .map(|i| {
                    let other = f64::from(other[row * out_stride + i]);
                    match finish {
                        Finish::Store => product(i),
                        Finish::Add(_) => other + product(i),
                        Finish::Gated(activation) => {
                            let pair = i / TILE * ROW_MULTIPLE + i % TILE;
                            activate(activation, product(pair)) * product(pair + TILE)
                        }
                        Finish::GatedWith(activation, _) => activate(activation, other) * product(i),
                    }
                })
                .collect();
            let name = format!("matmul {} {finish:?}", format.name());
            compare(device, &name, &many[row * out_stride..][..width], &expected, 2e-5)?;
            if kernels.products() == Products::MatrixUnit {
                continue; // other bits than matvec's
            }

            let one = poisoned(device, out_stride)?;
            let other_row = upload(device, &self::row(&other, row, out_stride))?;
            let one_finish = match finish {
                Finish::Add(_) => Finish::Add(&other_row),
                Finish::GatedWith(activation, _) => Finish::GatedWith(activation, &other_row),
                other => other,
            };
            let input = RowInput { at: row * stride, ..input };
            let output = Output { rows: &one, at: 0, stride: out_stride };
            device.enqueue(&kernels.matvec(device, &matrix, &input, one_finish, &output)?)?;
            let one = download(device, &one)?;
            let differs = (0..width).find(|&i| one[i].to_bits() != many[row * out_stride + i].to_bits());
            if let Some(i) = differs {
                return Err(OpsError::SelfTest {
                    kernel: format!("matvec {} {finish:?}", format.name()),
                    device: device.info().name.clone(),
                    what: format!(
                        "value {i} is {}, many rows at once give {}",
                        one[i],
                        many[row * out_stride + i]
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Runs the kernels at the two ends of a diffusion model for the format of its table.
///
/// # Errors
/// As [`self_test`].
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
    let stride = super::round_up(hidden, STRIDE_MULTIPLE);
    let mut sequence = Sequence(format as u32 + 101);
    let tiles = random_tiles(format, VOCABULARY, hidden, &mut sequence);
    let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
    device.write(&buffer, 0, &tiles)?;
    let table = Matrix { buffer, format, rows: VOCABULARY, columns: hidden };
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

    // Rows of a length that gives logits of all sizes below the cap.
    let norm = vec![0.05f32; stride];
    let norm_buffer = upload(device, &norm)?;
    let input =
        RowInput { rows: &x, at: 0, branch: None, norm: Some(&norm_buffer), n: hidden, stride, epsilon: 0.0 };
    let [packed, sums] = poisoned_packed(device, kernels, ROWS, stride)?;
    device.enqueue(&kernels.pack_rows(device, &input, ROWS, &packed, &sums)?)?;
    let norm: Vec<f64> = norm.iter().take(hidden).map(|&v| f64::from(v)).collect();
    let width = super::round_up(VOCABULARY, ROW_MULTIPLE);
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

fn row(values: &[f32], row: usize, stride: usize) -> Vec<f32> {
    values[row * stride..(row + 1) * stride].to_vec()
}

fn attention(device: &Device, kernels: &Kernels, head_size: usize, kind: CacheKind) -> Result<(), OpsError> {
    const ROWS: usize = 70; // crosses a tile of the running softmax, ends inside a row block
    const Q_HEADS: usize = 2;
    const WINDOW: usize = 37;
    let mut sequence = Sequence(7);
    let (k_at, v_at) = (Q_HEADS * head_size, (Q_HEADS + 1) * head_size);
    let stride = round_up((Q_HEADS + 2) * head_size, STRIDE_MULTIPLE);
    let qkv = sequence.take(ROWS * stride);
    // No rotation (cosine 1, sine 0): the reference then needs only norms left out and plain products.
    let half = head_size / 2;
    let angles: Vec<f32> = (0..ROWS * half).flat_map(|_| [1.0, 0.0]).collect();
    let angles = upload(device, &angles)?;
    let scale = 1.0 / (head_size as f32).sqrt();
    let run = |widths: &[usize]| -> Result<Vec<f32>, OpsError> {
        let cache = Cache::new(device, kind, 1, head_size, ROWS)?;
        let nan = match kind {
            CacheKind::F16 => 0x7e00_7e00,
            CacheKind::F32 => f32::NAN.to_bits(),
        };
        device.fill(&cache.keys, nan)?;
        device.fill(&cache.values, nan)?;
        let mut results = Vec::new();
        let mut start = 0;
        for &rows in widths {
            let rows_buffer = upload(device, &qkv[start * stride..(start + rows) * stride])?;
            let out = poisoned(device, rows * stride)?;
            let rotation = Rotation {
                qkv: &rows_buffer,
                stride,
                q_heads: Q_HEADS,
                k_at,
                v_at,
                angles: &angles,
                half_rotated: half,
                pairing: Pairing::RotatedHalves,
                norms: None,
                value_norms: false,
                epsilon: 0.0,
            };
            let looks = Attention {
                q: &rows_buffer,
                stride,
                out: &out,
                out_stride: stride,
                q_heads: Q_HEADS,
                window: Some(WINDOW),
                canvas: false,
                scale,
            };
            let mut rotate = kernels.rotate_and_cache(device, &rotation, &cache, rows)?;
            rotate.set(ROTATE_START, crate::device::Arg::I32(start as i32))?;
            device.enqueue(&rotate)?;
            let mut attend = kernels.attention(device, &looks, &cache, rows)?;
            attend.set(ATTENTION_START, crate::device::Arg::I32(start as i32))?;
            device.enqueue(&attend)?;
            let out = download(device, &out)?;
            for r in 0..rows {
                results.extend_from_slice(&out[r * stride..][..Q_HEADS * head_size]);
            }
            start += rows;
        }
        Ok(results)
    };
    let together = run(&[ROWS])?;
    let head = |at: usize| -> Vec<Vec<f32>> {
        (0..ROWS).map(|r| qkv[r * stride + at..][..head_size].to_vec()).collect()
    };
    let (keys, values) = (head(k_at), head(v_at));
    for row in [0, WINDOW - 1, WINDOW, ROWS - 1] {
        for q_head in 0..Q_HEADS {
            let q = &qkv[row * stride + q_head * head_size..][..head_size];
            let expected =
                attention_reference(kind, q, &keys, &values, (row + 1).saturating_sub(WINDOW)..=row, scale);
            let found = &together[(row * Q_HEADS + q_head) * head_size..][..head_size];
            compare(device, "attention", found, &expected, 1e-5)?;
        }
    }
    let apart = run(&[65, 1, 1, 1, 1, 1])?;
    match together.iter().zip(&apart).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None => Ok(()),
        Some(i) => Err(OpsError::SelfTest {
            kernel: "attention".to_owned(),
            device: device.info().name.clone(),
            what: format!("value {i} is {} in one pass, {} in several", together[i], apart[i]),
        }),
    }
}

/// Runs the kernels of a mixture of experts for these weight formats.
///
/// # Errors
/// As [`self_test`].
pub fn self_test_moe(device: &Device, kernels: &Kernels, formats: &[Format]) -> Result<(), OpsError> {
    formats.iter().try_for_each(|&format| Mixture::new(format).test(device, kernels))
}

/// A small mixture of experts: weights, rows and what goes with them.
struct Mixture {
    format: Format,
    /// Both the hidden size and the inner width.
    columns: usize,
    stride: usize,
    gate_up: Vec<u8>,
    down: Vec<u8>,
    scores: Vec<f32>,
    scales: Vec<f32>,
    x: Vec<f32>,
    mlp: Vec<f32>,
    /// Weights of the rows' norm, and of those of the experts' sum, of the dense branch and of both.
    norms: [Vec<f32>; 4],
}

impl Mixture {
    const EXPERTS: usize = 4;
    const TOP: usize = 2;
    const ROWS: usize = 132; // the favoured expert's rows need two blocks
    const SCALAR: f32 = 0.75;
    const EPSILON: f32 = 1e-5;

    fn new(format: Format) -> Self {
        let columns = if format.block_groups() == 8 { 256 } else { 96 };
        let stride = round_up(columns, STRIDE_MULTIPLE);
        let mut sequence = Sequence(format as u32 + 101);
        let gate_up = random_tiles(format, Self::EXPERTS * 2 * columns, columns, &mut sequence);
        let down = random_tiles(format, Self::EXPERTS * columns, columns, &mut sequence);
        let mut scores = sequence.take(Self::ROWS * Self::EXPERTS);
        for favoured in scores.iter_mut().skip(1).step_by(Self::EXPERTS) {
            *favoured += 2.5;
        }
        let mut rows = |rows: usize| -> Vec<f32> {
            (0..rows * stride).map(|i| if i % stride < columns { sequence.next() } else { 0.0 }).collect()
        };
        let (x, mlp) = (rows(Self::ROWS), rows(Self::ROWS));
        let norms = [(); 4].map(|()| rows(1));
        let scales = sequence.take(Self::EXPERTS).iter().map(|v| v + 1.5).collect();
        Self { format, columns, stride, gate_up, down, scores, scales, x, mlp, norms }
    }

    fn test(&self, device: &Device, kernels: &Kernels) -> Result<(), OpsError> {
        let whole = self.run(device, kernels, 0, Self::ROWS)?;
        for row in [0, Self::ROWS / 2, Self::ROWS - 1] {
            let name = format!("expert products {}", self.format.name());
            compare(device, &name, &whole[row * self.stride..][..self.columns], &self.expected(row), 2e-5)?;
            let alone = self.run(device, kernels, row, 1)?;
            let differs =
                (0..self.columns).find(|&i| alone[i].to_bits() != whole[row * self.stride + i].to_bits());
            if let Some(i) = differs {
                return Err(OpsError::SelfTest {
                    kernel: name,
                    device: device.info().name.clone(),
                    what: format!(
                        "value {i} is {}, many rows at once give {}",
                        alone[i],
                        whole[row * self.stride + i]
                    ),
                });
            }
        }
        Ok(())
    }

    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        first: usize,
        rows: usize,
    ) -> Result<Vec<f32>, OpsError> {
        let (columns, stride, slots) = (self.columns, self.stride, rows * Self::TOP);
        let experts = |tiles: &[u8], rows_each: usize| -> Result<Experts, OpsError> {
            let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
            device.write(&buffer, 0, tiles)?;
            let rows = Self::EXPERTS * rows_each;
            let matrix = Matrix { buffer, format: self.format, rows, columns };
            Ok(Experts { matrix, experts: Self::EXPERTS, outputs: columns })
        };
        let (gate_up, down) = (experts(&self.gate_up, 2 * columns)?, experts(&self.down, columns)?);
        let part = |values: &[f32], each: usize| upload(device, &values[first * each..][..rows * each]);
        let scores = part(&self.scores, Self::EXPERTS)?;
        let (x, mlp) = (part(&self.x, stride)?, part(&self.mlp, stride)?);
        let scales = upload(device, &self.scales)?;
        let norms = self.norms.iter().map(|norm| upload(device, norm)).collect::<Result<Vec<_>, _>>()?;
        let routing = Routing::new(device, Self::EXPERTS, Self::TOP, rows)?;
        let chosen = poisoned(device, slots)?;
        let input = RowInput {
            rows: &x,
            at: 0,
            branch: None,
            norm: norms.first(),
            n: columns,
            stride,
            epsilon: Self::EPSILON,
        };
        let [packed, sums] = poisoned_packed(device, kernels, slots, stride)?;
        let [inner, inner_sums] = poisoned_packed(device, kernels, slots, stride)?;
        let (out, result) = (poisoned(device, slots * stride)?, poisoned(device, rows * stride)?);
        let join = CombineInput {
            out: &out,
            out_stride: stride,
            mlp: &mlp,
            residual: &x,
            moe_norm: &norms[1],
            mlp_norm: &norms[2],
            join_norm: &norms[3],
            scalar: Self::SCALAR,
            n: columns,
            stride,
            epsilon: Self::EPSILON,
        };
        let activation = Activation::GeluTanh;
        for launch in [
            kernels.route(device, &scores, Self::EXPERTS, &scales, &chosen, &routing, rows)?,
            kernels.sort_rows(device, &chosen, &routing, rows)?,
            kernels.pack_for_experts(device, &input, &routing, rows, &packed, &sums)?,
            kernels.expert_gate_up(
                device,
                &gate_up,
                activation,
                &routing,
                rows,
                &packed,
                &sums,
                &inner,
                &inner_sums,
            )?,
            kernels.expert_down(device, &down, &routing, rows, &inner, &inner_sums, &out, stride)?,
            kernels.combine(device, &join, &routing, rows, &result)?,
        ] {
            device.enqueue(&launch)?;
        }
        download(device, &result)
    }

    /// The reference's row.
    fn expected(&self, row: usize) -> Vec<f64> {
        let columns = self.columns;
        let as_f64 = |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(v)).collect() };
        let slice = |values: &[f32]| as_f64(&values[row * self.stride..][..columns]);
        let norms: Vec<Vec<f64>> = self.norms.iter().map(|norm| as_f64(&norm[..columns])).collect();
        let size = self.format.tile_bytes(columns);
        let weights = |tiles: &[u8], output: usize| -> Vec<f64> {
            let tile = &tiles[output / TILE * size..][..size];
            (0..columns).map(|i| f64::from(self.format.weight(tile, output % TILE, i))).collect()
        };
        let x = slice(&self.x);
        let (_, prepared) = prepare_reference(&x, None, Some(&norms[0]), f64::from(Self::EPSILON));
        let scores = &self.scores[row * Self::EXPERTS..][..Self::EXPERTS];
        let (chosen, shares) = route_reference(scores, &self.scales, Self::TOP);
        let results: Vec<(f64, Vec<f64>)> = chosen
            .into_iter()
            .zip(shares)
            .map(|(expert, share)| {
                let inner: Vec<f64> = (0..columns)
                    .map(|i| {
                        let gate = expert * 2 * columns + i / TILE * ROW_MULTIPLE + i % TILE;
                        let (gate, up) = (weights(&self.gate_up, gate), weights(&self.gate_up, gate + TILE));
                        expert_reference(&gate, &up, &prepared, Activation::GeluTanh)
                    })
                    .collect();
                let dot = |output: usize| -> f64 {
                    weights(&self.down, output).iter().zip(&inner).map(|(w, v)| w * v).sum()
                };
                (share, (0..columns).map(|i| dot(expert * columns + i)).collect())
            })
            .collect();
        let results: Vec<(f64, &[f64])> = results.iter().map(|(share, out)| (*share, &out[..])).collect();
        combine_reference(
            &results,
            &slice(&self.mlp),
            &x,
            [&norms[1], &norms[2], &norms[3]],
            f64::from(Self::SCALAR),
            f64::from(Self::EPSILON),
        )
    }
}
