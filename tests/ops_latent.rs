//! Heads over one latent: their products bit for bit against those of `matmul`, head by head; the way of latents into the
//! cache against f64; attention over them bit for bit against attention over the same keys and values kept apart. Every
//! output lies among poison that must survive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use axe::device::{Arg, Buffer, Device, Purpose};
use axe::ops::{
    ATTENTION_START, Attention, Cache, CacheKind, Family, Finish, Format, HeadMatrices, HeadRows, Kernels,
    LATENT_START, LatentRotation, Matrix, Output, Pairing, ROTATE_START, ROW_MULTIPLE, Rotation, RowInput,
    STRIDE_MULTIPLE, TILE, prepare_reference, round_up,
};
use half::f16;
use ops_support::*;
use proptest::prelude::*;

/// Products of heads.
#[derive(Debug, Clone)]
struct Products {
    heads: usize,
    inputs: usize,
    outputs: usize,
    rows: usize,
    seed: u64,
}

impl Products {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let step = format.block_codes().max(TILE);
        let rows: usize = if simulated() { 5 } else { 150 };
        (1..=5usize, 1..=256 / step, 1..=6usize, prop_oneof![Just(1), 1..=rows], any::<u64>()).prop_map(
            move |(heads, inputs, outputs, rows, seed)| Self {
                heads,
                inputs: inputs * step,
                outputs: outputs * TILE,
                rows,
                seed,
            },
        )
    }
}

fn head_products_hold(
    device: &Device,
    kernels: &Kernels,
    format: Format,
    case: &Products,
) -> Result<(), TestCaseError> {
    let &Products { heads, inputs, outputs, rows, seed } = case;
    let mut random = Random(seed);
    let matrix = |tiles: &[u8], rows: usize| {
        let buffer = device.alloc(Purpose::Weights, tiles.len()).unwrap();
        device.write(&buffer, 0, tiles).unwrap();
        Matrix { buffer, format, rows, columns: inputs, family: Family::Vector }
    };
    let tiles: Vec<Vec<u8>> =
        (0..heads).map(|_| Weights::new(format, outputs, inputs, &mut random).tiles).collect();
    let each = round_up(outputs, ROW_MULTIPLE);
    let matrices = HeadMatrices { matrix: matrix(&tiles.concat(), heads * each), heads, outputs };
    // Heads at odd places, with what is no number between.
    let (at, step) = (random.below(9), inputs + random.below(9));
    let stride = at + heads * step + random.below(9);
    let mut x = vec![f32::NAN; rows * stride];
    for row in x.chunks_exact_mut(stride) {
        for head in 0..heads {
            row[at + head * step..][..inputs].fill_with(|| random.unit() * 3.0);
        }
    }
    let input = HeadRows { rows: &upload(device, &x), stride, at, step };
    let (y_at, y_step) = (random.below(9), outputs + random.below(9));
    let y_stride = y_at + heads * y_step + random.below(9);
    let y = poisoned(device, rows * y_stride + GUARD);
    let output = HeadRows { rows: &y, stride: y_stride, at: y_at, step: y_step };
    let padded = round_up(inputs, STRIDE_MULTIPLE);
    let [(packed, _), (sums, _)] = poisoned_packed(device, kernels, heads * rows, padded);
    for launch in [
        kernels.pack_heads(device, &matrices, &input, rows, &packed, &sums).unwrap(),
        kernels.head_products(device, &matrices, &packed, &sums, rows, &output).unwrap(),
    ] {
        device.enqueue(&launch).unwrap();
    }
    let mut found = download(device, &y);
    for (head, tiles) in tiles.iter().enumerate() {
        let mut part = vec![0.0; rows * padded];
        for (part, row) in part.chunks_exact_mut(padded).zip(x.chunks_exact(stride)) {
            part[..inputs].copy_from_slice(&row[at + head * step..][..inputs]);
        }
        let part = upload(device, &part);
        let input = RowInput {
            rows: &part,
            at: 0,
            branch: None,
            norm: None,
            n: inputs,
            stride: padded,
            epsilon: EPSILON,
        };
        let out = poisoned(device, rows * each);
        let store = Output { rows: &out, at: 0, stride: each };
        let [(packed, _), (sums, _)] = poisoned_packed(device, kernels, rows, padded);
        device
            .enqueue(&kernels.pack_rows(device, &input, rows, Family::Vector, &packed, &sums).unwrap())
            .unwrap();
        let alone = matrix(tiles, outputs);
        let product = kernels.matmul(device, &alone, &packed, &sums, rows, Finish::Store, &store).unwrap();
        device.enqueue(&product).unwrap();
        let expected = download(device, &out);
        for row in 0..rows {
            let found = &mut found[row * y_stride + y_at + head * y_step..][..outputs];
            prop_assert!(
                same_bits(found, &expected[row * each..][..outputs]),
                "head {} and matmul differ for row {}",
                head,
                row
            );
            found.fill(f32::from_bits(POISON));
        }
    }
    prop_assert!(is_poison(&found), "values between and behind the outputs are written");
    Ok(())
}

#[test]
fn products_of_heads_are_those_of_matmul() {
    for (device, kernels) in flavours() {
        // Sums by 32 and by 16 columns, blocks of 32 and of 256, plain numbers.
        for format in [Format::F32, Format::Q8_0, Format::Q4K, Format::Q6K] {
            check(if simulated() { 4 } else { 8 }, &Products::strategy(format), |case| {
                head_products_hold(&device, &kernels, format, &case)
            });
        }
    }
}

/// Rows with heads over a latent.
#[derive(Debug, Clone)]
struct Latent {
    kind: CacheKind,
    latent: usize,
    turns: usize,
    heads: usize,
    rows: usize,
    pairing: Pairing,
    window: Option<usize>,
    seed: u64,
}

impl Latent {
    fn strategy() -> impl Strategy<Value = Self> {
        let sizes: &[(usize, usize)] =
            if simulated() { &[(32, 16)] } else { &[(32, 16), (64, 32), (48, 16), (512, 64)] };
        let (heads, rows): (usize, usize) = if simulated() { (2, 20) } else { (9, 90) };
        (
            prop_oneof![Just(CacheKind::F16), Just(CacheKind::F32)],
            prop::sample::select(sizes),
            1..=heads,
            1..=rows,
            prop_oneof![Just(Pairing::Neighbours), Just(Pairing::RotatedHalves)],
            prop_oneof![Just(None), (1..40usize).prop_map(Some)],
            any::<u64>(),
        )
            .prop_map(|(kind, (latent, turns), heads, rows, pairing, window, seed)| Self {
                kind,
                latent,
                turns,
                heads,
                rows,
                pairing,
                window,
                seed,
            })
    }

    fn size(&self) -> usize {
        self.latent + self.turns
    }
}

/// What passes over the rows left.
struct Passed {
    rows: Vec<f32>,
    /// `[row][key size]`.
    keys: Vec<f32>,
    out: Vec<f32>,
}

struct LatentRows {
    case: Latent,
    rows: Vec<f32>,
    stride: usize,
    k_at: usize,
    turning: Vec<f32>,
    turning_stride: usize,
    turning_at: usize,
    turning_step: usize,
    angles: Vec<f32>,
    norm: Vec<f32>,
}

impl LatentRows {
    fn new(case: &Latent) -> Self {
        let mut random = Random(case.seed);
        let (size, heads) = (case.size(), case.heads);
        let k_at = heads * size + random.below(9);
        let stride = k_at + size + random.below(9);
        let (turning_at, turning_step) = (random.below(9), case.turns + random.below(30));
        let turning_stride = turning_at + heads * turning_step + random.below(9);
        let angles = (0..case.rows * case.turns / 2)
            .flat_map(|_| {
                let angle = f64::from(random.unit()) * 1000.0;
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect();
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit() * 2.0).collect() };
        let rows = values(case.rows * stride);
        let turning = values(case.rows * turning_stride);
        let norm = values(case.latent);
        Self {
            case: case.clone(),
            rows,
            stride,
            k_at,
            turning,
            turning_stride,
            turning_at,
            turning_step,
            angles,
            norm,
        }
    }

    /// Passes of these widths.
    fn run(&self, device: &Device, kernels: &Kernels, widths: &[usize]) -> Result<Passed, TestCaseError> {
        let case = &self.case;
        let (size, latent, stride) = (case.size(), case.latent, self.stride);
        let cache = Cache::latent(device, case.kind, size, latent, case.rows).unwrap();
        device.fill(&cache.keys, unwritten(case.kind)).unwrap();
        let (angles, norm) = (upload(device, &self.angles), upload(device, &self.norm));
        let mut passed = Passed { rows: Vec::new(), keys: Vec::new(), out: Vec::new() };
        let mut start = 0;
        for &width in widths {
            let mut guarded = self.rows[start * stride..(start + width) * stride].to_vec();
            guarded.extend([f32::from_bits(POISON); GUARD]);
            let rows = upload(device, &guarded);
            let turning = &self.turning[start * self.turning_stride..(start + width) * self.turning_stride];
            let rotation = LatentRotation {
                rows: &rows,
                stride,
                q_heads: case.heads,
                k_at: self.k_at,
                turning: &upload(device, turning),
                turning_stride: self.turning_stride,
                turning_step: self.turning_step,
                turning_at: self.turning_at,
                angles: &angles,
                pairing: case.pairing,
                norm: &norm,
                epsilon: EPSILON,
            };
            let mut launch = kernels.rotate_and_cache_latent(device, &rotation, &cache, width).unwrap();
            launch.set(LATENT_START, Arg::I32(start as i32)).unwrap();
            device.enqueue(&launch).unwrap();
            passed.out.extend(self.attend(device, kernels, &rows, &cache, start, width)?);
            let rows = download(device, &rows);
            prop_assert!(is_poison(&rows[width * stride..]), "values behind the rows are written");
            passed.rows.extend(&rows[..width * stride]);
            start += width;
        }
        let (keys, values) = cache.read(device, 0, case.rows).unwrap();
        for (key, value) in keys.chunks_exact(size).zip(values.chunks_exact(latent)) {
            prop_assert!(same_bits(&key[..latent], value));
        }
        passed.keys = keys;
        Ok(passed)
    }

    fn attend(
        &self,
        device: &Device,
        kernels: &Kernels,
        rows: &Buffer,
        cache: &Cache,
        start: usize,
        width: usize,
    ) -> Result<Vec<f32>, TestCaseError> {
        let case = &self.case;
        let out_width = case.heads * case.latent;
        let out_stride = out_width + 5;
        let out = poisoned(device, width * out_stride);
        let looks = Attention {
            q: rows,
            stride: self.stride,
            out: &out,
            out_stride,
            q_heads: case.heads,
            window: case.window,
            canvas: false,
            scale: 0.3,
            softcap: 0.0,
        };
        let mut launch = kernels.attention(device, &looks, cache, width).unwrap();
        launch.set(ATTENTION_START, Arg::I32(start as i32)).unwrap();
        device.enqueue(&launch).unwrap();
        let mut found = Vec::new();
        for row in download(device, &out).chunks_exact(out_stride) {
            found.extend(&row[..out_width]);
            prop_assert!(is_poison(&row[out_width..]), "values between output rows are written");
        }
        Ok(found)
    }

    /// Attention over the same keys and queries, with values that are kept apart.
    fn apart(&self, device: &Device, kernels: &Kernels, passed: &Passed) -> Result<Vec<f32>, TestCaseError> {
        let case = &self.case;
        let (size, latent) = (case.size(), case.latent);
        let cache = Cache::with_value_size(device, case.kind, 1, size, latent, case.rows).unwrap();
        let rows = upload(device, &passed.rows);
        let rotation = Rotation {
            qkv: &rows,
            stride: self.stride,
            q_heads: case.heads,
            k_at: self.k_at,
            v_at: self.k_at,
            bias: None,
            angles: &rows,
            half_rotated: 0,
            pairing: case.pairing,
            norms: None,
            value_norms: false,
            queries_only: false,
            queries: None,
            epsilon: EPSILON,
        };
        let mut launch = kernels.rotate_and_cache(device, &rotation, &cache, case.rows).unwrap();
        launch.set(ROTATE_START, Arg::I32(0)).unwrap();
        device.enqueue(&launch).unwrap();
        self.attend(device, kernels, &rows, &cache, 0, case.rows)
    }

    fn turned(&self, row: usize, x: &[f32]) -> Vec<Bounded> {
        let turns = self.case.turns;
        let mut out: Vec<Bounded> = x.iter().map(|&v| (f64::from(v), 0.0)).collect();
        for i in 0..turns / 2 {
            let (first, second) = match self.case.pairing {
                Pairing::Neighbours => (2 * i, 2 * i + 1),
                _ => (i, i + turns / 2),
            };
            let at = row * turns + 2 * i;
            let (c, s) = (f64::from(self.angles[at]), f64::from(self.angles[at + 1]));
            let (a, b) = (f64::from(x[first]), f64::from(x[second]));
            let off = 2.0 * ULP * (a.abs() + b.abs());
            (out[first], out[second]) = ((a * c - b * s, off), (a * s + b * c, off));
        }
        out
    }

    fn check(&self, passed: &Passed) -> Result<(), TestCaseError> {
        let case = &self.case;
        let (size, latent, turns) = (case.size(), case.latent, case.turns);
        for row in 0..case.rows {
            let before = &self.rows[row * self.stride..][..self.stride];
            let after = &passed.rows[row * self.stride..][..self.stride];
            for head in 0..case.heads {
                let at = head * size;
                prop_assert!(same_bits(&after[at..at + latent], &before[at..at + latent]));
                let from = row * self.turning_stride + self.turning_at + head * self.turning_step;
                let expected = self.turned(row, &self.turning[from..from + turns]);
                agree("a query", row, &after[at + latent..at + size], &expected)?;
            }
            let x = f64s(&before[self.k_at..][..latent]);
            let (_, normed) = prepare_reference(&x, None, Some(&f64s(&self.norm)), f64::from(EPSILON));
            let near = |v: f64| (v, v.abs() * (8.0 + latent as f64 / 32.0) * ULP + DENORMAL);
            let mut key: Vec<Bounded> = normed.into_iter().map(near).collect();
            key.extend(self.turned(row, &before[self.k_at + latent..self.k_at + size]));
            agree("a key", row, &after[self.k_at..self.k_at + size], &key)?;
            for (i, (&kept, &key)) in
                passed.keys[row * size..][..size].iter().zip(&after[self.k_at..self.k_at + size]).enumerate()
            {
                let expected = match case.kind {
                    CacheKind::F16 => f16::from_f32(key).to_f32(),
                    CacheKind::F32 => key,
                };
                prop_assert!(kept.to_bits() == expected.to_bits(), "value {} of key {}", i, row);
            }
            for i in (case.heads * size..self.k_at).chain(self.k_at + size..self.stride) {
                prop_assert!(after[i].to_bits() == before[i].to_bits(), "value {} of row {}", i, row);
            }
        }
        Ok(())
    }
}

fn unwritten(kind: CacheKind) -> u32 {
    match kind {
        CacheKind::F16 => 0x7fff_7fff,
        CacheKind::F32 => POISON,
    }
}

#[test]
fn latents_are_normed_kept_and_attended_to() {
    let (device, kernels) = open();
    check(if simulated() { 10 } else { 40 }, &Latent::strategy(), |case| {
        let rows = LatentRows::new(&case);
        let together = rows.run(&device, &kernels, &[case.rows])?;
        rows.check(&together)?;
        let apart = rows.apart(&device, &kernels, &together)?;
        prop_assert!(same_bits(&together.out, &apart), "values apart from keys make other results");
        let mut random = Random(!case.seed);
        let (mut widths, mut left) = (Vec::new(), case.rows);
        while left > 0 {
            let width = 1 + random.below(left.min(12));
            widths.push(width);
            left -= width;
        }
        let several = rows.run(&device, &kernels, &widths)?;
        prop_assert!(same_bits(&together.out, &several.out), "attention differs in passes of {:?}", widths);
        prop_assert!(same_bits(&together.keys, &several.keys), "keys differ in passes of {:?}", widths);
        Ok(())
    });
}
