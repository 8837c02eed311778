//! Packing of rows, and products of many rows and of a few.

use super::{Sequence, compare, download, matrix, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::Device;
use crate::ops::kernels::{Kernels, OpsError};
use crate::ops::matmul::{Activation, Finish, Output, RowInput, activate, prepare_reference};
use crate::ops::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};

pub(super) fn products(device: &Device, kernels: &Kernels, format: Format) -> Result<(), OpsError> {
    const ROWS: usize = 11; // whole row blocks of either size, and a rest
    const OUTPUTS: usize = ROW_MULTIPLE + 5;
    const EPSILON: f32 = 1e-5;
    let columns = if format.block_groups() == 8 { 512 } else { 96 };
    let stride = round_up(columns, STRIDE_MULTIPLE);
    let mut sequence = Sequence(format as u32 + 1);
    let tiles = random_tiles(format, OUTPUTS, columns, &mut sequence);
    let matrix = matrix(device, kernels, format, tiles.clone(), OUTPUTS, columns)?;
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
        device.enqueue(&kernels.pack_rows(device, &input, ROWS, matrix.family, &packed, &sums)?)?;
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
        }
        for rows in 1..=kernels.narrow_rows(&matrix).min(ROWS) {
            let first = ROWS - rows;
            let few = poisoned(device, ROWS * out_stride)?;
            let input = RowInput { at: first * stride, ..input };
            let output = Output { rows: &few, at: first * out_stride, stride: out_stride };
            device.enqueue(&kernels.narrow(device, &matrix, &input, rows, finish, &output)?)?;
            let few = download(device, &few)?;
            let mut values = (first..ROWS).flat_map(|row| row * out_stride..row * out_stride + width);
            if let Some(i) = values.find(|&i| few[i].to_bits() != many[i].to_bits()) {
                return Err(OpsError::SelfTest {
                    kernel: format!("narrow ({rows} rows) {} {finish:?}", format.name()),
                    device: device.info().name.clone(),
                    what: format!("value {i} is {}, many rows at once give {}", few[i], many[i]),
                });
            }
        }
    }
    Ok(())
}
