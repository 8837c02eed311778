//! What the passes of a model have to do, by its shapes: enough to say what a card would take for them, and what a pass of more
//! rows reads more.

use crate::ops::Format;

/// A matrix that rows go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductShape {
    /// Format of its weights.
    pub format: Format,
    /// Values that come out, padding included.
    pub outputs: usize,
    /// Values that go in.
    pub columns: usize,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsShape {
    /// How many there are.
    pub count: usize,
    /// How many of them a row goes to.
    pub used: usize,
    /// Gate and up of one.
    pub gate_up: ProductShape,
    /// The second product of one.
    pub down: ProductShape,
}

/// The attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values of a key.
    pub head_size: usize,
    /// Positions that a row sees, its own included; none: all up to itself.
    pub window: Option<usize>,
    /// Whether all heads see one latent.
    pub latent: bool,
    /// Whether scores are capped.
    pub capped: bool,
}

/// What the passes of a model have to do. Norms, routers' choices and rotary embeddings are left out, which take little.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Matrices that all rows of a pass go through, those of all layers.
    pub products: Vec<ProductShape>,
    /// Matrices that only the rows of a canvas go through, besides.
    pub conditioning: Vec<ProductShape>,
    /// Experts of the layers that have them.
    pub experts: Vec<ExpertsShape>,
    /// Attention of all layers.
    pub attention: Vec<AttentionShape>,
    /// The head, or the table of embeddings that is one.
    pub head: ProductShape,
    /// Rows of a canvas of a model that denoises.
    pub canvas: Option<usize>,
}

impl ProductShape {
    /// Bytes of its weights.
    fn bytes(&self) -> f64 {
        self.format.matrix_bytes(self.outputs, self.columns) as f64
    }
}

impl ExpertsShape {
    /// Experts that `rows` rows are expected to go to, if each row chooses for itself and every expert is as likely.
    pub fn expected(&self, rows: usize) -> f64 {
        let count = self.count as f64;
        let left_out = (1.0 - self.used as f64 / count.max(1.0)).max(0.0);
        count * (1.0 - left_out.powf(rows as f64))
    }
}

impl Workload {
    /// Bytes of weights that a pass of `rows` rows with all their logits is expected to read: each matrix once, and of experts
    /// those that any row goes to; what only a canvas goes through is left out.
    pub fn weight_bytes(&self, rows: usize) -> f64 {
        let shared: f64 = self.products.iter().chain([&self.head]).map(ProductShape::bytes).sum();
        let experts = self.experts.iter();
        let experts: f64 = experts
            .map(|experts| experts.expected(rows) * (experts.gate_up.bytes() + experts.down.bytes()))
            .sum();
        shared + experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_matrices_and_the_experts_that_they_have_in_common() {
        let matrix = |outputs, columns| ProductShape { format: Format::F32, outputs, columns };
        let mut workload = Workload {
            products: vec![matrix(64, 64), matrix(32, 64)],
            conditioning: vec![matrix(1024, 1024)],
            experts: Vec::new(),
            attention: Vec::new(),
            head: matrix(256, 64),
            canvas: None,
        };
        let shared = ((64 + 32 + 256) * 64 * 4) as f64;
        assert_eq!(workload.weight_bytes(1), shared);
        assert_eq!(workload.weight_bytes(16), shared, "a dense model reads the same whatever the rows");
        let each = ((64 + 32) * 64 * 4) as f64;
        workload.experts.push(ExpertsShape {
            count: 8,
            used: 2,
            gate_up: matrix(64, 64),
            down: matrix(32, 64),
        });
        assert!((workload.weight_bytes(1) - shared - 2.0 * each).abs() < 1e-6);
        assert!(
            (workload.weight_bytes(2) - shared - 3.5 * each).abs() < 1e-6,
            "2, and 2 of which 6 in 8 are new"
        );
        assert!((workload.weight_bytes(100) - shared - 8.0 * each).abs() < 1e-6);
    }
}
