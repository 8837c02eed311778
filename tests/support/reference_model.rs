//! The forward pass of the `llama` and `gemma3` families over a GGUF file, written down as plainly as possible: f64,
//! dequantised weights, the whole text at once, the mask of each layer spelled out for every pair of positions.

use std::path::Path;

use axe::checkpoint::gguf::Gguf;
use axe::checkpoint::quant::dequantize;

type Rows = Vec<Vec<f64>>;

/// A model file, read as it is needed.
pub struct ReferenceModel {
    gguf: Gguf,
    gemma: bool,
    architecture: String,
}

impl ReferenceModel {
    /// The model in a file.
    pub fn open(path: &Path) -> Self {
        let gguf = Gguf::open(path).unwrap();
        let architecture = gguf.metadata().require_str("general.architecture").unwrap().to_owned();
        Self { gemma: architecture == "gemma3", gguf, architecture }
    }

    fn size(&self, key: &str) -> usize {
        self.gguf.metadata().require_u32(&format!("{}.{key}", self.architecture)).unwrap() as usize
    }

    fn number(&self, key: &str) -> f64 {
        f64::from(self.gguf.metadata().require_f32(&format!("{}.{key}", self.architecture)).unwrap())
    }

    /// Positions that sliding layers see, their own included.
    pub fn window(&self) -> usize {
        self.size("attention.sliding_window")
    }

    /// A tensor's rows.
    fn rows(&self, name: &str) -> Rows {
        let tensor = self.gguf.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let columns = tensor.shape[0] as usize;
        let mut values = vec![0f32; tensor.shape.iter().product::<u64>() as usize];
        dequantize(tensor.ty, self.gguf.bytes(tensor), &mut values).unwrap();
        values.chunks_exact(columns).map(|row| row.iter().map(|&v| f64::from(v)).collect()).collect()
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        self.rows(name).remove(0)
    }

    fn norm(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let root = (mean + self.number("attention.layer_norm_rms_epsilon")).sqrt();
        x.iter().zip(weight).map(|(v, w)| v / root * w).collect()
    }

    /// Whether a layer slides.
    fn slides(&self, layer: usize) -> bool {
        if self.gemma {
            layer % 6 != 5
        } else {
            self.gguf.metadata().get("llama.attention.sliding_window").is_some()
        }
    }

    /// Rotates a head at a position.
    fn rotate(&self, head: &mut [f64], position: usize, layer: usize) {
        let base = if self.gemma && self.slides(layer) {
            self.number("rope.freq_base_swa")
        } else {
            self.number("rope.freq_base")
        };
        let divisors = self.gguf.tensor("rope_freqs.weight").map(|_| self.vector("rope_freqs.weight"));
        let half = head.len() / 2;
        for i in 0..half {
            let divisor = divisors.as_ref().map_or(1.0, |divisors| divisors[i]);
            let frequency = base.powf(-(i as f64) / half as f64) / divisor;
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            // Converters reorder the rows of llama's matrices so that pairs are neighbours.
            let (a, b) = if self.gemma { (i, i + half) } else { (2 * i, 2 * i + 1) };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }

    fn attention(&self, layer: usize, normed: &Rows) -> Rows {
        let tensor = |part: &str| format!("blk.{layer}.{part}.weight");
        let (heads, kv_heads) = (self.size("attention.head_count"), self.size("attention.head_count_kv"));
        let head_size = self.size("attention.key_length");
        let project = |part: &str, norm: Option<&str>, rotated: bool| -> Vec<Rows> {
            let weights = self.rows(&tensor(part));
            let norm = norm.map(|norm| self.vector(&tensor(norm)));
            let head = |(position, x): (usize, &Vec<f64>)| -> Rows {
                let all = product(&weights, x);
                let heads = all.chunks_exact(head_size).map(|head| {
                    let mut head = norm.as_ref().map_or(head.to_vec(), |weight| self.norm(head, weight));
                    if rotated {
                        self.rotate(&mut head, position, layer);
                    }
                    head
                });
                heads.collect()
            };
            normed.iter().enumerate().map(head).collect()
        };
        let queries = project("attn_q", self.gemma.then_some("attn_q_norm"), true);
        let keys = project("attn_k", self.gemma.then_some("attn_k_norm"), true);
        let values = project("attn_v", None, false);
        let window = if self.slides(layer) { self.window() } else { usize::MAX };
        let output = self.rows(&tensor("attn_output"));
        let attended = |position: usize| -> Vec<f64> {
            let mut joined = Vec::new();
            for (head, query) in queries[position].iter().enumerate() {
                let kv = head / (heads / kv_heads);
                let scores: Vec<f64> = (0..normed.len())
                    .map(|other| {
                        let masked = other > position || position - other >= window;
                        let score: f64 = query.iter().zip(&keys[other][kv]).map(|(q, k)| q * k).sum();
                        if masked { f64::NEG_INFINITY } else { score / (head_size as f64).sqrt() }
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                joined.extend((0..head_size).map(|i| {
                    weights.iter().zip(&values).map(|(w, value)| w * value[kv][i]).sum::<f64>() / total
                }));
            }
            product(&output, &joined)
        };
        (0..normed.len()).map(attended).collect()
    }

    fn feed_forward(&self, layer: usize, normed: &Rows) -> Rows {
        let part = |part: &str| self.rows(&format!("blk.{layer}.{part}.weight"));
        let (gate, up, down) = (part("ffn_gate"), part("ffn_up"), part("ffn_down"));
        let activate = |x: f64| {
            if self.gemma {
                let cubic = x + 0.044715 * x.powi(3);
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * cubic).tanh())
            } else {
                x / (1.0 + (-x).exp())
            }
        };
        let row = |x: &Vec<f64>| {
            let gated = product(&gate, x).into_iter().zip(product(&up, x)).map(|(g, u)| activate(g) * u);
            product(&down, &gated.collect::<Vec<_>>())
        };
        normed.iter().map(row).collect()
    }

    /// Logits of every position.
    pub fn logits(&self, ids: &[u32]) -> Rows {
        let embedding = self.rows("token_embd.weight");
        let scale = if self.gemma { (embedding[0].len() as f64).sqrt() } else { 1.0 };
        let mut x: Rows =
            ids.iter().map(|&id| embedding[id as usize].iter().map(|v| v * scale).collect()).collect();
        for layer in 0..self.size("block_count") {
            let norm = |rows: &Rows, part: &str| -> Rows {
                let weight = self.vector(&format!("blk.{layer}.{part}.weight"));
                rows.iter().map(|row| self.norm(row, &weight)).collect()
            };
            let mut branch = self.attention(layer, &norm(&x, "attn_norm"));
            if self.gemma {
                branch = norm(&branch, "post_attention_norm");
            }
            add(&mut x, &branch);
            let mut branch = self.feed_forward(layer, &norm(&x, "ffn_norm"));
            if self.gemma {
                branch = norm(&branch, "post_ffw_norm");
            }
            add(&mut x, &branch);
        }
        let last = self.vector("output_norm.weight");
        let head = match self.gguf.tensor("output.weight") {
            Some(_) => self.rows("output.weight"),
            None => embedding,
        };
        x.iter().map(|row| product(&head, &self.norm(row, &last))).collect()
    }
}

fn product(weights: &Rows, x: &[f64]) -> Vec<f64> {
    weights.iter().map(|row| row.iter().zip(x).map(|(w, v)| w * v).sum()).collect()
}

fn add(x: &mut Rows, branch: &Rows) {
    for (row, branch) in x.iter_mut().zip(branch) {
        row.iter_mut().zip(branch).for_each(|(v, b)| *v += b);
    }
}
