//! Launches that do what others do one after the other: they must make the same bits.

use super::{Sequence, download, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::{Buffer, Device};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::{
    Activation, CombineInput, ExpertChoice, Finish, Format, Matrix, Output, PackedRows, ROW_MULTIPLE, Router,
    Routing, RowInput, STRIDE_MULTIPLE, TILE, round_up,
};

const ROWS: usize = 67; // a whole block of packed rows, and a rest
const EPSILON: f32 = 1e-5;
const EXPERTS: usize = 21;
const TOP: usize = 3;

/// Rows with a stride of [`STRIDE_MULTIPLE`] that go through the launches of a layer, by themselves and fused.
struct Fused<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    columns: usize,
    x: Buffer,
    branch: Buffer,
    norms: [Buffer; 4],
    sequence: Sequence,
}

/// Runs what a model of the `vector` family fuses: gated networks of these formats, and routers of those.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_fused(
    device: &Device,
    kernels: &Kernels,
    gated: &[Format],
    routers: &[Format],
) -> Result<(), OpsError> {
    for &format in gated {
        Fused::new(device, kernels, format)?.gated(format)?;
    }
    for &format in routers {
        Fused::new(device, kernels, format)?.router(format)?;
    }
    Ok(())
}

impl<'a> Fused<'a> {
    fn new(device: &'a Device, kernels: &'a Kernels, format: Format) -> Result<Self, OpsError> {
        let columns = if format.block_groups() == 8 { 256 } else { 96 };
        let mut sequence = Sequence(format as u32 + 211);
        let mut rows = |count: usize| {
            let padded = (0..count * STRIDE_MULTIPLE)
                .map(|i| if i % STRIDE_MULTIPLE < columns { sequence.next() } else { 0.0 });
            upload(device, &padded.collect::<Vec<f32>>())
        };
        let (x, branch) = (rows(ROWS)?, rows(ROWS)?);
        let norms = [rows(1)?, rows(1)?, rows(1)?, rows(1)?];
        Ok(Self { device, kernels, columns, x, branch, norms, sequence })
    }

    fn input<'b>(&'b self, new_rows: &'b Buffer) -> RowInput<'b> {
        RowInput {
            rows: &self.x,
            at: 0,
            branch: Some((&self.branch, &self.norms[0], new_rows)),
            norm: Some(&self.norms[1]),
            n: self.columns,
            stride: STRIDE_MULTIPLE,
            epsilon: EPSILON,
        }
    }

    fn packed(&self) -> Result<[Buffer; 2], OpsError> {
        poisoned_packed(self.device, self.kernels, ROWS, STRIDE_MULTIPLE)
    }

    fn matrix(&mut self, format: Format, outputs: usize) -> Result<Matrix, OpsError> {
        let tiles = random_tiles(format, outputs, self.columns, &mut self.sequence);
        let buffer = self.device.alloc(crate::device::Purpose::Scratch, tiles.len())?;
        self.device.write(&buffer, 0, &tiles)?;
        Ok(Matrix { buffer, format, rows: outputs, columns: self.columns, family: Family::Vector })
    }

    /// Whether two buffers hold the same bits, poison among them.
    fn same(&self, kernel: &str, fused: &Buffer, apart: &Buffer) -> Result<(), OpsError> {
        let [fused, apart] = [download(self.device, fused)?, download(self.device, apart)?];
        let differs = fused.iter().zip(&apart).position(|(a, b)| a.to_bits() != b.to_bits());
        self.device.note_check(kernel, 0.0, differs.is_none());
        match differs {
            None => Ok(()),
            Some(i) => Err(OpsError::SelfTest {
                kernel: kernel.to_owned(),
                device: self.device.info().name.clone(),
                what: format!("value {i} is {}, kernels one after the other make {}", fused[i], apart[i]),
            }),
        }
    }

    fn gated(&mut self, format: Format) -> Result<(), OpsError> {
        let inner = self.columns;
        let matrix = self.matrix(format, 2 * round_up(inner, TILE))?;
        let (device, kernels, activation) = (self.device, self.kernels, Activation::GeluTanh);
        let new_rows = poisoned(device, ROWS * STRIDE_MULTIPLE)?;
        let ([packed, sums], [apart, apart_sums], [fused, fused_sums]) =
            (self.packed()?, self.packed()?, self.packed()?);
        // What is between both has room for whole pairs of tiles, and zeros behind.
        let between = device.alloc(crate::device::Purpose::Scratch, ROWS * STRIDE_MULTIPLE * 4)?;
        device.fill(&between, 0)?;
        let output = Output { rows: &between, at: 0, stride: STRIDE_MULTIPLE };
        let plain = RowInput { rows: &between, branch: None, norm: None, ..self.input(&new_rows) };
        let family = Family::Vector;
        let into = PackedRows { packed: &packed, sums: &sums };
        let inside = PackedRows { packed: &fused, sums: &fused_sums };
        for launch in [
            kernels.pack_rows(device, &self.input(&new_rows), ROWS, family, &packed, &sums)?,
            kernels.matmul(device, &matrix, &packed, &sums, ROWS, Finish::Gated(activation), &output)?,
            kernels.pack_rows(device, &plain, ROWS, family, &apart, &apart_sums)?,
            kernels.matmul_gated(device, &matrix, activation, ROWS, into, inner, inside)?,
        ] {
            device.enqueue(&launch)?;
        }
        let name = format!("matmul_gated {}", format.name());
        self.same(&name, &fused, &apart)?;
        self.same(&name, &fused_sums, &apart_sums)
    }

    /// Rows packed twice, the router, and the join that packs for what follows.
    fn router(&mut self, format: Format) -> Result<(), OpsError> {
        let matrix = self.matrix(format, EXPERTS)?;
        let (device, kernels, family) = (self.device, self.kernels, Family::Vector);
        let scores_stride = round_up(EXPERTS, ROW_MULTIPLE);
        let scales = upload(device, &self.sequence.take(EXPERTS))?;
        let out = upload(device, &self.sequence.take(ROWS * TOP * STRIDE_MULTIPLE))?;
        let made = |twice: bool| -> Result<[Buffer; 10], OpsError> {
            let ([packed, sums], [second, second_sums], [next, next_sums]) =
                (self.packed()?, self.packed()?, self.packed()?);
            let new_rows = poisoned(device, ROWS * STRIDE_MULTIPLE)?;
            let result = poisoned(device, ROWS * STRIDE_MULTIPLE)?;
            let scores = poisoned(device, ROWS * scores_stride)?;
            let chosen = poisoned(device, ROWS * TOP)?;
            let routing = Routing::new(device, EXPERTS, TOP, ROWS)?;
            let input = self.input(&new_rows);
            let [_, _, second_norm, next_norm] = &self.norms;
            let beside = RowInput { rows: &new_rows, branch: None, norm: Some(second_norm), ..input };
            let behind = RowInput { rows: &result, branch: None, norm: Some(next_norm), ..input };
            let of_second = PackedRows { packed: &second, sums: &second_sums };
            let of_next = PackedRows { packed: &next, sums: &next_sums };
            let router = Router {
                logits: &scores,
                stride: scores_stride,
                choice: ExpertChoice::default(),
                bias: None,
                expert_scales: Some(&scales),
            };
            if twice {
                let first = PackedRows { packed: &packed, sums: &sums };
                device.enqueue(&kernels.pack_rows_twice(
                    device,
                    &input,
                    ROWS,
                    first,
                    second_norm,
                    of_second,
                )?)?;
                let launch =
                    kernels.route_rows(device, &matrix, of_second, &router, &chosen, &routing, ROWS)?;
                device.enqueue(&launch)?;
            } else {
                let output = Output { rows: &scores, at: 0, stride: scores_stride };
                for launch in [
                    kernels.pack_rows(device, &input, ROWS, family, &packed, &sums)?,
                    kernels.pack_rows(device, &beside, ROWS, family, &second, &second_sums)?,
                    kernels.matmul(device, &matrix, &second, &second_sums, ROWS, Finish::Store, &output)?,
                    kernels.choose_experts(device, &router, &chosen, &routing, ROWS)?,
                ] {
                    device.enqueue(&launch)?;
                }
            }
            // Where the experts' results lie does not matter here, as long as it is somewhere.
            device.fill(&routing.places, 0)?;
            let join = CombineInput {
                out: &out,
                out_stride: STRIDE_MULTIPLE,
                mlp: &self.branch,
                residual: &new_rows,
                moe_norm: &self.norms[0],
                mlp_norm: &self.norms[1],
                join_norm: second_norm,
                scalar: 0.75,
                n: self.columns,
                stride: STRIDE_MULTIPLE,
                epsilon: EPSILON,
                next: twice.then_some((next_norm, of_next)),
            };
            device.enqueue(&kernels.combine(device, &join, &routing, ROWS, &result)?)?;
            if !twice {
                device.enqueue(&kernels.pack_rows(
                    device,
                    &behind,
                    ROWS,
                    kernels.family(),
                    &next,
                    &next_sums,
                )?)?;
            }
            let weights = routing.weights.clone();
            Ok([packed, sums, second, second_sums, scores, chosen, weights, result, next, next_sums])
        };
        let ([fused, apart], kernels_of) = (
            [made(true)?, made(false)?],
            [
                "pack_rows",
                "pack_rows",
                "pack_rows",
                "pack_rows",
                "route_rows",
                "route_rows",
                "route_rows",
                "combine",
                "combine",
                "combine",
            ],
        );
        kernels_of
            .iter()
            .zip(fused.iter().zip(&apart))
            .try_for_each(|(kernel, (fused, apart))| self.same(kernel, fused, apart))
    }
}
