//! Packing of rows, and products of many rows and of one.

use super::{Sequence, compare, download, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::{Device, Purpose};
use crate::ops::kernels::{Kernels, OpsError, Products};
use crate::ops::matmul::{Activation, Finish, Matrix, Output, RowInput, activate, prepare_reference};
use crate::ops::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};

pub(super) fn products(device: &Device, kernels: &Kernels, format: Format) -> Result<(), OpsError> {
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
            let other_row = upload(device, &row_of(&other, row, out_stride))?;
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

fn row_of(values: &[f32], row: usize, stride: usize) -> Vec<f32> {
    values[row * stride..(row + 1) * stride].to_vec()
}
