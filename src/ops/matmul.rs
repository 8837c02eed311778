//! Matrix times activations: the input row's preparation, the product, and what becomes of it, in one launch for a few
//! rows and two for many.

use super::check::{check, holds_floats, int};
use super::kernels::{Family, Kernels, OpsError, Products};
use super::{Format, ROW_BLOCK, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};
use crate::device::{Arg, Buffer, Device, Launch, Work};

/// The kernel for a few rows.
pub(super) const NARROW: &str = "narrow";
/// Indices of its arguments that say how many rows there are, groups of columns, pairs of tiles, and of those that a
/// work-item makes.
const NARROW_ROWS: usize = 14;
const NARROW_GROUPS: usize = 16;
const NARROW_PAIRS: usize = 17;
const NARROW_EACH: usize = 18;
/// Products that a work-item makes at most by vectors, unless a pair has more, where it may find its rows prepared: some
/// 20 microseconds.
const MOST_PRODUCTS: u64 = 1 << 19;
/// As many rows as these take vectors as long as the matrix unit is busy with any that it takes at a time.
const UNIT_ROWS: u64 = 2;

/// Cuts a launch of [`NARROW`] with these arguments into more work-items where they are long. Gives their number.
pub(super) fn cut(args: &mut [u64], products: Products) -> usize {
    let (pairs, each) = (args[NARROW_PAIRS], args[NARROW_EACH]);
    let rows = match products {
        Products::Vector | Products::Xmx => args[NARROW_ROWS],
        Products::MatrixUnit => UNIT_ROWS,
        Products::Integer => args[NARROW_ROWS].min(UNIT_ROWS),
    };
    let products = 32 * 32 * args[NARROW_GROUPS] * rows;
    // Whole pairs of pairs, which go well together.
    let most = (MOST_PRODUCTS / products.max(1)).max(2) & !1;
    args[NARROW_EACH] = each.min(most).max(1);
    pairs.div_ceil(args[NARROW_EACH]) as usize
}

/// Most rows of `narrow`; `FEW_ROWS` in `cl/include/few_vectors.h`, `few_tiles.h` and `few_integer.h`.
fn few_rows(products: Products, format: Format) -> usize {
    match products {
        Products::MatrixUnit => 16,
        Products::Integer if products.by_integers(format) => 16,
        Products::Vector | Products::Xmx | Products::Integer => 8,
    }
}

/// A repacked weight matrix on the device.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// [`Format::matrix_bytes`] bytes.
    pub buffer: Buffer,
    /// How the weights are stored.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// Whose products its tiles are for.
    pub family: Family,
}

impl Matrix {
    pub(super) fn groups(&self) -> usize {
        self.format.padded_columns(self.columns) / 32
    }

    pub(super) fn pairs(&self) -> usize {
        self.rows.div_ceil(ROW_MULTIPLE)
    }

    /// Bytes a pass reads: all tiles.
    pub fn bytes(&self) -> usize {
        self.format.matrix_bytes(self.rows, self.columns)
    }

    /// What `rows` rows take: all tiles once, and a multiplication and an addition for each number and row.
    pub(super) fn work(&self, rows: usize) -> Work {
        Work {
            bytes: self.bytes() as u64,
            operations: 2 * (rows * self.rows * self.columns) as u64,
            ..Work::default()
        }
    }
}

/// Rows that go into a matrix multiplication, and what is done to them first.
///
/// Rows are `stride` values apart, a multiple of [`STRIDE_MULTIPLE`], and zero past their `n` values.
#[derive(Debug, Clone, Copy)]
pub struct RowInput<'a> {
    /// f32 rows.
    pub rows: &'a Buffer,
    /// First value of the first row.
    pub at: usize,
    /// A branch whose RMS norm, times the weight, is added to the row: `(branch rows, weight, where the sum goes)`.
    pub branch: Option<(&'a Buffer, &'a Buffer, &'a Buffer)>,
    /// Weight of the RMS norm that the row gets.
    pub norm: Option<&'a Buffer>,
    /// Values in a row.
    pub n: usize,
    /// Values from row to row.
    pub stride: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
}

const ADD_BRANCH: i32 = 1;
const NORM: i32 = 2;
/// Of `pack_rows` only; see `cl/rows.cl`.
const TWICE: i32 = 4;

impl RowInput<'_> {
    pub(super) fn flags(&self) -> i32 {
        self.branch.map_or(0, |_| ADD_BRANCH) | self.norm.map_or(0, |_| NORM)
    }
}

/// Packed rows: buffers for [`packed_values`](super::Products::packed_values) and
/// [`sums_values`](super::Products::sums_values).
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// The values.
    pub packed: &'a Buffer,
    /// Their sums.
    pub sums: &'a Buffer,
}

/// A gate's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x).
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy)]
pub enum Finish<'a> {
    /// y = product.
    Store,
    /// y = other + product.
    Add(&'a Buffer),
    /// Gate and up tiles alternate in the matrix: y = activation(gate) * up, half as many values.
    Gated(Activation),
    /// y = activation(other) * product.
    GatedWith(Activation, &'a Buffer),
}

impl Finish<'_> {
    pub(super) fn number(&self) -> i32 {
        match self {
            Self::Store => 0,
            Self::Add(_) => 1,
            Self::Gated(Activation::Silu) => 2,
            Self::Gated(Activation::GeluTanh) => 3,
            Self::GatedWith(Activation::Silu, _) => 4,
            Self::GatedWith(Activation::GeluTanh, _) => 5,
        }
    }

    fn other(&self) -> Option<&Buffer> {
        match self {
            Self::Add(buffer) | Self::GatedWith(_, buffer) => Some(buffer),
            Self::Store | Self::Gated(_) => None,
        }
    }
}

/// Where a product goes; `other` of a [`Finish`] lies the same way.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// f32 rows.
    pub rows: &'a Buffer,
    /// First value of the first row.
    pub at: usize,
    /// Values from row to row.
    pub stride: usize,
}

impl Kernels {
    /// One row through `matrix`: [`narrow`](Self::narrow) of a single row.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn matvec(
        &self,
        device: &Device,
        matrix: &Matrix,
        input: &RowInput<'_>,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<Launch, OpsError> {
        self.narrow(device, matrix, input, 1, finish, output)
    }

    /// Most rows, 1 to 8 or 16, that [`narrow`](Self::narrow) takes through `matrix`: as many as the device's local memory holds.
    /// Up to there it is faster than packing for [`matmul`](Self::matmul). None through a matrix of the `xmx` family.
    pub fn narrow_rows(&self, matrix: &Matrix) -> usize {
        if matrix.family == Family::Xmx {
            return 0;
        }
        let bytes = |rows: usize| -> usize { local_bytes(self.products(), matrix, rows).into_iter().sum() };
        (2..=few_rows(self.products(), matrix.format))
            .rev()
            .find(|&rows| bytes(rows) <= self.local_memory())
            .unwrap_or(1)
    }

    /// `rows` rows, at most [`narrow_rows`](Self::narrow_rows), through `matrix`, without packing.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn narrow(
        &self,
        device: &Device,
        matrix: &Matrix,
        input: &RowInput<'_>,
        rows: usize,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = NARROW;
        self.check(OP, matrix, input, &finish, output, rows)?;
        let most = self.narrow_rows(matrix);
        check(OP, rows <= most, || format!("{rows} rows, at most {most} of {} columns", matrix.columns))?;
        let (groups, pairs) = (matrix.groups(), matrix.pairs());
        let pairs_each = pairs.div_ceil(self.shares(pairs));
        let unused = self.unused();
        let (branch, branch_weight, new_rows) = input.branch.unwrap_or((unused, unused, unused));
        let [prepared, sums, line] = local_bytes(self.products(), matrix, rows);
        Ok(Launch::with_args(
            &self.matmul_kernel(device, matrix.format, OP)?,
            &[
                Arg::Buffer(&matrix.buffer),
                Arg::Buffer(input.rows),
                Arg::Buffer(branch),
                Arg::Buffer(branch_weight),
                Arg::Buffer(input.norm.unwrap_or(unused)),
                Arg::Buffer(new_rows),
                Arg::Buffer(finish.other().unwrap_or(unused)),
                Arg::Buffer(output.rows),
                Arg::I32(input.flags()),
                Arg::I32(finish.number()),
                Arg::I32(int(OP, "the input's start", input.at)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::I32(int(OP, "the output's start", output.at)?),
                Arg::I32(int(OP, "the output's stride", output.stride)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "pairs of tiles", pairs)?),
                Arg::I32(int(OP, "pairs of tiles", pairs_each)?),
                Arg::F32(input.epsilon),
                Arg::Local(prepared),
                Arg::Local(sums),
                Arg::Local(line),
            ],
            &[pairs.div_ceil(pairs_each)],
            Some(&[1]),
        )?
        .doing(matrix.work(rows)))
    }

    /// Prepares `rows` rows and packs them for [`matmul`](Self::matmul) with matrices of `family`. `packed` and `sums` have
    /// [`packed_values`](super::Products::packed_values) and [`sums_values`](super::Products::sums_values) for `columns`
    /// padded to [`STRIDE_MULTIPLE`].
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn pack_rows(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        rows: usize,
        family: Family,
        packed: &Buffer,
        sums: &Buffer,
    ) -> Result<Launch, OpsError> {
        if family == Family::Xmx {
            const OP: &str = "prepare";
            self.check_input(OP, input, rows)?;
            self.holds_packed(OP, input.n, rows, packed, sums)?;
            let (xmx, ready) = self.xmx_rows(OP, device, [packed, sums], rows, input.n)?;
            return xmx.prepare(device, input, rows, &ready);
        }
        self.pack_rows_with(device, input, rows, PackedRows { packed, sums }, None)
    }

    /// The same for matrices of the `vector` family, and once more for others of it: the same rows, their branch added, with
    /// another norm.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn pack_rows_twice(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        rows: usize,
        first: PackedRows<'_>,
        second_norm: &Buffer,
        second: PackedRows<'_>,
    ) -> Result<Launch, OpsError> {
        self.pack_rows_with(device, input, rows, first, Some((second_norm, second)))
    }

    fn pack_rows_with(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        rows: usize,
        first: PackedRows<'_>,
        second: Option<(&Buffer, PackedRows<'_>)>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "pack_rows";
        self.check_input(OP, input, rows)?;
        let groups = self.holds_packed(OP, input.n, rows, first.packed, first.sums)?;
        if let Some((norm, second)) = second {
            self.holds_packed(OP, input.n, rows, second.packed, second.sums)?;
            holds_floats(OP, "the second norm", norm, groups * 32)?;
        }
        let unused = self.unused();
        let twice = second.map_or(0, |_| TWICE);
        let nowhere = PackedRows { packed: unused, sums: unused };
        let (second_norm, second) = second.unwrap_or((unused, nowhere));
        let (branch, branch_weight, new_rows) = input.branch.unwrap_or((unused, unused, unused));
        check(OP, input.at == 0, || "rows to pack start at 0".to_owned())?;
        Ok(Launch::with_args(
            &self.rows_kernel(device, OP)?,
            &[
                Arg::Buffer(input.rows),
                Arg::Buffer(branch),
                Arg::Buffer(branch_weight),
                Arg::Buffer(input.norm.unwrap_or(unused)),
                Arg::Buffer(second_norm),
                Arg::Buffer(new_rows),
                Arg::Buffer(first.packed),
                Arg::Buffer(first.sums),
                Arg::Buffer(second.packed),
                Arg::Buffer(second.sums),
                Arg::I32(input.flags() | twice),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::F32(input.epsilon),
                Arg::Local(groups * 32 * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

    /// `rows` packed rows through `matrix`.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn matmul(
        &self,
        device: &Device,
        matrix: &Matrix,
        packed: &Buffer,
        sums: &Buffer,
        rows: usize,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "matmul";
        let packed_groups = self.holds_packed(OP, matrix.columns, rows, packed, sums)?;
        self.check_output(OP, matrix, &finish, output, rows)?;
        if matrix.family == Family::Xmx {
            let (xmx, ready) = self.xmx_rows(OP, device, [packed, sums], rows, matrix.columns)?;
            let launch = xmx.matmul(device, matrix, &ready, rows, finish, output)?;
            return Ok(launch.doing(matrix.work(rows)));
        }
        let unused = self.unused();
        Ok(Launch::with_args(
            &self.matmul_kernel(device, matrix.format, OP)?,
            &[
                Arg::Buffer(&matrix.buffer),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::Buffer(finish.other().unwrap_or(unused)),
                Arg::Buffer(output.rows),
                Arg::I32(finish.number()),
                Arg::I32(int(OP, "the output's start", output.at)?),
                Arg::I32(int(OP, "groups", matrix.groups())?),
                Arg::I32(int(OP, "groups", packed_groups)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(int(OP, "stride", output.stride)?),
            ],
            &[matrix.pairs(), rows.div_ceil(ROW_BLOCK)],
            Some(&[1, 1]),
        )?
        .doing(matrix.work(rows)))
    }

    /// `rows` packed rows through `matrix`, in which tiles of gate and up alternate: activation(gate) * up, packed for the
    /// product that follows, whose columns these are. For matrices of the `vector` family. The bits are those of
    /// [`matmul`](Self::matmul) and [`pack_rows`](Self::pack_rows).
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn matmul_gated(
        &self,
        device: &Device,
        matrix: &Matrix,
        activation: Activation,
        rows: usize,
        input: PackedRows<'_>,
        columns: usize,
        inner: PackedRows<'_>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "matmul_gated";
        check(OP, rows > 0 && matrix.family == Family::Vector, || {
            format!("{rows} rows through a matrix of the {:?} family", matrix.family)
        })?;
        check(OP, matrix.buffer.size() >= matrix.bytes(), || {
            format!("the matrix has {} bytes, its shape needs {}", matrix.buffer.size(), matrix.bytes())
        })?;
        check(OP, matrix.pairs() == columns.div_ceil(TILE), || {
            format!("{} pairs of gate and up for {columns} columns", matrix.pairs())
        })?;
        let packed_groups = self.holds_packed(OP, matrix.columns, rows, input.packed, input.sums)?;
        let inner_groups = self.holds_packed(OP, columns, rows, inner.packed, inner.sums)?;
        Ok(Launch::with_args(
            &self.gated_kernel(device, matrix.format, OP)?,
            &[
                Arg::Buffer(&matrix.buffer),
                Arg::Buffer(input.packed),
                Arg::Buffer(input.sums),
                Arg::Buffer(inner.packed),
                Arg::Buffer(inner.sums),
                Arg::I32(Finish::Gated(activation).number()),
                Arg::I32(int(OP, "pairs of tiles", matrix.pairs())?),
                Arg::I32(int(OP, "groups", matrix.groups())?),
                Arg::I32(int(OP, "groups", packed_groups)?),
                Arg::I32(int(OP, "groups", inner_groups)?),
                Arg::I32(int(OP, "rows", rows)?),
            ],
            &[inner_groups, rows.div_ceil(ROW_BLOCK)],
            Some(&[1, 1]),
        )?
        .doing(matrix.work(rows)))
    }

    fn check(
        &self,
        op: &'static str,
        matrix: &Matrix,
        input: &RowInput<'_>,
        finish: &Finish<'_>,
        output: &Output<'_>,
        rows: usize,
    ) -> Result<(), OpsError> {
        check(op, input.n == matrix.columns, || {
            format!("rows of {} values meet a matrix of {} columns", input.n, matrix.columns)
        })?;
        self.check_input(op, input, rows)?;
        self.check_output(op, matrix, finish, output, rows)
    }

    /// Whether there is room for `rows` packed rows of `columns` and their sums; the groups of a packed row.
    pub(super) fn holds_packed(
        &self,
        op: &'static str,
        columns: usize,
        rows: usize,
        packed: &Buffer,
        sums: &Buffer,
    ) -> Result<usize, OpsError> {
        let stride = round_up(columns, STRIDE_MULTIPLE);
        holds_floats(op, "packed", packed, self.products().packed_values(rows, stride))?;
        holds_floats(op, "sums", sums, self.products().sums_values(rows, stride))?;
        Ok(stride / 32)
    }

    pub(super) fn check_input(
        &self,
        op: &'static str,
        input: &RowInput<'_>,
        rows: usize,
    ) -> Result<(), OpsError> {
        let padded = round_up(input.n, STRIDE_MULTIPLE);
        check(op, input.stride >= padded && rows > 0, || {
            format!("{rows} rows of {} values with a stride of {}", input.n, input.stride)
        })?;
        let reach = input.at + (rows - 1) * input.stride + padded;
        holds_floats(op, "the input", input.rows, reach)?;
        if let Some((branch, weight, new_rows)) = input.branch {
            holds_floats(op, "the branch", branch, reach)?;
            holds_floats(op, "the branch's norm", weight, padded)?;
            holds_floats(op, "the new rows", new_rows, reach)?;
        }
        match input.norm {
            Some(weight) => holds_floats(op, "the norm", weight, padded),
            None => Ok(()),
        }
    }

    pub(super) fn check_output(
        &self,
        op: &'static str,
        matrix: &Matrix,
        finish: &Finish<'_>,
        output: &Output<'_>,
        rows: usize,
    ) -> Result<(), OpsError> {
        check(op, matrix.buffer.size() >= matrix.bytes(), || {
            format!("the matrix has {} bytes, its shape needs {}", matrix.buffer.size(), matrix.bytes())
        })?;
        let width = match finish {
            Finish::Gated(_) => matrix.pairs() * ROW_MULTIPLE / 2,
            _ => matrix.pairs() * ROW_MULTIPLE,
        };
        let reach = output.at + (rows.max(1) - 1) * output.stride + width;
        check(op, rows == 1 || output.stride >= width, || {
            format!("{width} results a row with a stride of {}", output.stride)
        })?;
        holds_floats(op, "the output", output.rows, reach)?;
        match finish.other() {
            Some(other) => holds_floats(op, "the other operand", other, reach),
            None => Ok(()),
        }
    }
}

/// Local memory of `narrow`: prepared rows, their sums, and the row that is being prepared.
fn local_bytes(products: Products, matrix: &Matrix, rows: usize) -> [usize; 3] {
    let row = matrix.groups() * 32 * 4;
    match products {
        // Three bytes a value, and what a digit is worth.
        Products::Integer if products.by_integers(matrix.format) => {
            [row / 32 * 25 * rows, row / matrix.format.scale_group() * rows, row]
        }
        Products::Vector | Products::Xmx | Products::Integer => {
            [row * rows, row / matrix.format.scale_group() * rows, if rows > 1 { row } else { 4 }]
        }
        // As packed rows.
        Products::MatrixUnit => [row / 2 * 3 * rows, row / matrix.format.scale_group() * rows, row],
    }
}

/// CPU reference of an activation.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

/// CPU reference of what a [`RowInput`] does to one row: the row with its branch added, and the prepared row.
pub fn prepare_reference(
    row: &[f64],
    branch: Option<(&[f64], &[f64])>,
    norm: Option<&[f64]>,
    epsilon: f64,
) -> (Vec<f64>, Vec<f64>) {
    let normed = |x: &[f64], weight: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let inverse = 1.0 / (mean + epsilon).sqrt();
        x.iter().zip(weight).map(|(v, w)| v * inverse * w).collect()
    };
    let sum: Vec<f64> = match branch {
        Some((branch, weight)) => row.iter().zip(normed(branch, weight)).map(|(a, b)| a + b).collect(),
        None => row.to_vec(),
    };
    let prepared = norm.map_or_else(|| sum.clone(), |weight| normed(&sum, weight));
    (sum, prepared)
}
