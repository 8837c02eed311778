//! The forward pass of all causal families over a GGUF file, written down as plainly as possible: f64, dequantised weights,
//! the whole text at once, the mask of each layer spelled out for every pair of positions. Tensors that are there are used.

use std::path::Path;

use axe::checkpoint::gguf::{Gguf, Value};
use axe::checkpoint::quant::dequantize;

type Rows = Vec<Vec<f64>>;

/// A model file, read as it is needed.
pub struct ReferenceModel {
    gguf: Gguf,
    gemma: bool,
    architecture: String,
    /// Positions the program is to hold: long contexts may turn heads in another way.
    context: usize,
}

/// Keys or values of each position and key-value head.
type Heads = Vec<Rows>;

impl ReferenceModel {
    /// The model in a file.
    pub fn open(path: &Path) -> Self {
        let gguf = Gguf::open(path).unwrap();
        let architecture = gguf.metadata().require_str("general.architecture").unwrap().to_owned();
        Self { gemma: architecture.starts_with("gemma"), gguf, architecture, context: 0 }
    }

    /// The same in a context of so many positions.
    pub fn in_context(self, context: usize) -> Self {
        Self { context, ..self }
    }

    fn key(&self, name: &str) -> Option<Value<'_>> {
        self.gguf.metadata().get(&format!("{}.{name}", self.architecture))
    }

    /// A size that is there, of a layer where they differ.
    fn optional_size(&self, name: &str, layer: usize) -> Option<usize> {
        let full = format!("{}.{name}", self.architecture);
        match self.key(name)? {
            Value::Array(_) => {
                Some(self.gguf.metadata().require_array_i64(&full).unwrap().get(layer).unwrap() as usize)
            }
            _ => Some(self.gguf.metadata().require_u32(&full).unwrap() as usize),
        }
    }

    fn size(&self, name: &str) -> usize {
        self.optional_size(name, 0).unwrap_or_else(|| panic!("no key {name}"))
    }

    fn optional_number(&self, name: &str) -> Option<f64> {
        let full = format!("{}.{name}", self.architecture);
        self.gguf.metadata().f32(&full).unwrap().map(f64::from)
    }

    fn number(&self, name: &str) -> f64 {
        self.optional_number(name).unwrap_or_else(|| panic!("no key {name}"))
    }

    /// Positions that sliding layers see, their own included.
    pub fn window(&self) -> usize {
        self.size("attention.sliding_window")
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// A tensor's rows, those of several matrices one after the other.
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

    fn optional_vector(&self, name: &str) -> Option<Vec<f64>> {
        self.has(name).then(|| self.vector(name))
    }

    fn norm(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let root = (mean + self.number("attention.layer_norm_rms_epsilon")).sqrt();
        x.iter().zip(weight).map(|(v, w)| v / root * w).collect()
    }

    fn plain_norm(&self, x: &[f64]) -> Vec<f64> {
        self.norm(x, &vec![1.0; x.len()])
    }

    /// Whether a layer slides.
    fn slides(&self, layer: usize) -> bool {
        match (self.architecture.as_str(), self.key("attention.sliding_window_pattern")) {
            (_, Some(Value::Array(_))) => {
                let key = format!("{}.attention.sliding_window_pattern", self.architecture);
                self.gguf.metadata().require_array_bool(&key).unwrap().get(layer).unwrap()
            }
            ("gemma2", _) => layer.is_multiple_of(2),
            ("gemma3", _) => layer % 6 != 5,
            _ => self.key("attention.sliding_window").is_some(),
        }
    }

    /// Whether keys and values of heads are made out of a latent.
    fn latent(&self) -> bool {
        self.architecture == "deepseek2"
    }

    fn head_size(&self, layer: usize) -> usize {
        if self.latent() {
            return self.size("attention.key_length_mla");
        }
        let of_sliding = self.optional_size("attention.key_length_swa", layer).filter(|_| self.slides(layer));
        of_sliding
            .or_else(|| self.optional_size("attention.key_length", layer))
            .unwrap_or_else(|| self.size("embedding_length") / self.size("attention.head_count"))
    }

    /// The layer whose keys and values a layer sees.
    fn cache_of(&self, layer: usize) -> usize {
        let own = self.size("block_count") - self.optional_size("attention.shared_kv_layers", 0).unwrap_or(0);
        if layer < own {
            return layer;
        }
        (0..own).filter(|&other| self.slides(other) == self.slides(layer)).max().unwrap()
    }

    /// By how much a pair of a layer's heads turns from position to position, and what sine and cosine are multiplied by.
    fn turn(&self, layer: usize, pair: usize, pairs: usize) -> (f64, f64) {
        let apart = self.slides(layer) && ["gemma3", "gemma4"].contains(&self.architecture.as_str());
        let base = self.optional_number(if apart { "rope.freq_base_swa" } else { "rope.freq_base" });
        let base = base.unwrap_or(10_000.0);
        let plain = base.powf(-(pair as f64) / pairs as f64);
        if apart {
            return (plain, 1.0);
        }
        let divided = |name: &str| self.optional_vector(name).map_or(1.0, |divisors| divisors[pair]);
        let plain = plain / divided("rope_freqs.weight");
        if self.has("rope_factors_long.weight") {
            let long = self.context > self.size("rope.scaling.original_context_length");
            let name = if long { "rope_factors_long.weight" } else { "rope_factors_short.weight" };
            return (plain / divided(name), self.number("rope.scaling.attn_factor"));
        }
        let kind = format!("{}.rope.scaling.type", self.architecture);
        match self.gguf.metadata().str(&kind).unwrap() {
            Some("linear") => (plain / self.number("rope.scaling.factor"), 1.0),
            Some("yarn") => {
                let factor = self.number("rope.scaling.factor");
                let original = self.size("rope.scaling.original_context_length") as f64;
                // The pair that makes so many turns in the original context.
                let pair_at =
                    |turns: f64| pairs as f64 * (original / (turns * 2.0 * std::f64::consts::PI)).log(base);
                let (from, to) = (pair_at(32.0).floor().max(0.0), pair_at(1.0).ceil());
                let to = to.min(2.0 * pairs as f64 - 1.0);
                let share = ((pair as f64 - from) / (to - from)).clamp(0.0, 1.0);
                let strength = if self.latent() { 1.0 } else { 0.1 * factor.ln() + 1.0 };
                (plain * (1.0 - share) + plain / factor * share, strength)
            }
            _ => (plain, 1.0),
        }
    }

    /// Rotates a head at a position.
    fn rotate(&self, head: &mut [f64], position: usize, layer: usize) {
        let sliding =
            self.slides(layer).then(|| self.optional_size("rope.dimension_count_swa", layer)).flatten();
        let rotated = sliding.or_else(|| self.optional_size("rope.dimension_count", layer));
        let half = rotated.unwrap_or(head.len()) / 2;
        for i in 0..half {
            let (frequency, strength) = self.turn(layer, i, half);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (sin, cos) = (sin * strength, cos * strength);
            // Converters reorder the rows of llama's matrices so that pairs are neighbours.
            let (a, b) = if ["llama", "deepseek2"].contains(&self.architecture.as_str()) {
                (2 * i, 2 * i + 1)
            } else {
                (i, i + half)
            };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }

    /// Heads of each position: a product, its bias, what becomes of each head.
    fn heads(
        &self,
        layer: usize,
        part: &str,
        normed: &Rows,
        finish: impl Fn(usize, Vec<f64>) -> Vec<f64>,
    ) -> Heads {
        let weights = self.rows(&format!("blk.{layer}.{part}.weight"));
        let bias = self.optional_vector(&format!("blk.{layer}.{part}.bias"));
        let size = self.head_size(layer);
        let of = |(position, x): (usize, &Vec<f64>)| -> Rows {
            let mut all = product(&weights, x);
            if let Some(bias) = &bias {
                all.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
            all.chunks_exact(size).map(|head| finish(position, head.to_vec())).collect()
        };
        normed.iter().enumerate().map(of).collect()
    }

    /// Each head's keys and values, made out of the latent; what turns of a key is the same for all.
    fn latent_keys_and_values(&self, layer: usize, normed: &Rows) -> (Heads, Heads) {
        let part = |part: &str| self.rows(&format!("blk.{layer}.{part}.weight"));
        let (down, norm) = (part("attn_kv_a_mqa"), part("attn_kv_a_norm").remove(0));
        let (to_latent, to_values) = (part("attn_k_b"), part("attn_v_b"));
        let (size, heads) = (norm.len(), self.size("attention.head_count"));
        let of = |(position, x): (usize, &Vec<f64>)| -> (Rows, Rows) {
            let made = product(&down, x);
            let (latent, mut turning) = (self.norm(&made[..size], &norm), made[size..].to_vec());
            self.rotate(&mut turning, position, layer);
            let keys = to_latent.chunks_exact(size).map(|matrix| {
                let plain =
                    (0..matrix[0].len()).map(|i| matrix.iter().zip(&latent).map(|(row, v)| row[i] * v).sum());
                plain.chain(turning.iter().copied()).collect()
            });
            let values = to_values.chunks_exact(to_values.len() / heads);
            (keys.collect(), values.map(|matrix| product(matrix, &latent)).collect())
        };
        normed.iter().enumerate().map(of).unzip()
    }

    /// Each head's queries, of which the last values turn.
    fn latent_queries(&self, layer: usize, normed: &Rows) -> Heads {
        let part = |part: &str| self.rows(&format!("blk.{layer}.{part}.weight"));
        let whole = self.has(&format!("blk.{layer}.attn_q.weight")).then(|| part("attn_q"));
        let queries = |x: &[f64]| match &whole {
            Some(whole) => product(whole, x),
            None => {
                let norm = part("attn_q_a_norm").remove(0);
                product(&part("attn_q_b"), &self.norm(&product(&part("attn_q_a"), x), &norm))
            }
        };
        let size = self.head_size(layer);
        let turning = size - self.size("rope.dimension_count");
        let of = |(position, x): (usize, &Vec<f64>)| -> Rows {
            let all = queries(x);
            let mut heads: Rows = all.chunks_exact(size).map(<[f64]>::to_vec).collect();
            heads.iter_mut().for_each(|head| self.rotate(&mut head[turning..], position, layer));
            heads
        };
        normed.iter().enumerate().map(of).collect()
    }

    fn keys_and_values(&self, layer: usize, normed: &Rows) -> (Heads, Heads) {
        if self.latent() {
            return self.latent_keys_and_values(layer, normed);
        }
        let norm = self.optional_vector(&format!("blk.{layer}.attn_k_norm.weight"));
        let keys = self.heads(layer, "attn_k", normed, |position, mut head| {
            head = norm.as_ref().map_or(head.clone(), |weight| self.norm(&head, weight));
            self.rotate(&mut head, position, layer);
            head
        });
        let raw = !self.has(&format!("blk.{layer}.attn_v.weight"));
        let values = self.heads(layer, if raw { "attn_k" } else { "attn_v" }, normed, |_, head| {
            if self.architecture == "gemma4" { self.plain_norm(&head) } else { head }
        });
        (keys, values)
    }

    fn attention(&self, layer: usize, normed: &Rows, (keys, values): &(Heads, Heads)) -> Rows {
        let size = self.head_size(layer);
        let heads = self.optional_size("attention.head_count", layer).unwrap();
        let norm = self.optional_vector(&format!("blk.{layer}.attn_q_norm.weight"));
        let queries = match self.latent() {
            true => self.latent_queries(layer, normed),
            false => self.heads(layer, "attn_q", normed, |position, mut head| {
                head = norm.as_ref().map_or(head.clone(), |weight| self.norm(&head, weight));
                self.rotate(&mut head, position, layer);
                head
            }),
        };
        let window = if self.slides(layer) { self.window() } else { usize::MAX };
        let mut scale = if self.architecture == "gemma4" { 1.0 } else { 1.0 / (size as f64).sqrt() };
        if let Some(multiplier) = self.optional_number("rope.scaling.yarn_log_multiplier") {
            scale *= (1.0 + multiplier * self.number("rope.scaling.factor").ln()).powi(2);
        }
        let cap = self.optional_number("attn_logit_softcapping");
        let output = self.rows(&format!("blk.{layer}.attn_output.weight"));
        let attended = |position: usize| -> Vec<f64> {
            let mut joined = Vec::new();
            for (head, query) in queries[position].iter().enumerate() {
                let kv = head / (heads / keys[0].len());
                let scores: Vec<f64> = (0..normed.len())
                    .map(|other| {
                        let masked = other > position || position - other >= window;
                        let score: f64 = query.iter().zip(&keys[other][kv]).map(|(q, k)| q * k).sum();
                        if masked { f64::NEG_INFINITY } else { capped(score * scale, cap) }
                    })
                    .collect();
                let weights = softmax(&scores);
                joined.extend(
                    (0..values[0][kv].len())
                        .map(|i| weights.iter().zip(values).map(|(w, value)| w * value[kv][i]).sum::<f64>()),
                );
            }
            product(&output, &joined)
        };
        (0..normed.len()).map(attended).collect()
    }

    fn activate(&self, x: f64) -> f64 {
        if self.gemma {
            let cubic = x + 0.044715 * x.powi(3);
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * cubic).tanh())
        } else {
            x / (1.0 + (-x).exp())
        }
    }

    fn gated(&self, gate: &[Vec<f64>], up: &[Vec<f64>], down: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
        let pairs = product(gate, x).into_iter().zip(product(up, x));
        product(down, &pairs.map(|(g, u)| self.activate(g) * u).collect::<Vec<_>>())
    }

    fn dense(&self, layer: usize, normed: &Rows) -> Rows {
        let part = |part: &str| self.rows(&format!("blk.{layer}.{part}.weight"));
        let (gate, up, down) = (part("ffn_gate"), part("ffn_up"), part("ffn_down"));
        normed.iter().map(|x| self.gated(&gate, &up, &down, x)).collect()
    }

    /// What experts in place of a network make of rows, and what a network for all rows adds.
    fn routed(&self, layer: usize, x: &Rows) -> Rows {
        let part = |part: &str| self.rows(&format!("blk.{layer}.{part}.weight"));
        let (hidden, inner) = (x[0].len(), self.size("expert_feed_forward_length"));
        let (router, bias) =
            (part("ffn_gate_inp"), self.optional_vector(&format!("blk.{layer}.exp_probs_b.bias")));
        let (gate, up, down) = (part("ffn_gate_exps"), part("ffn_up_exps"), part("ffn_down_exps"));
        let sigmoid = self.optional_size("expert_gating_func", layer) == Some(2);
        let key = format!("{}.expert_weights_norm", self.architecture);
        let renormalised =
            self.gguf.metadata().bool(&key).unwrap().unwrap_or(self.architecture == "qwen3moe");
        let scale = self.optional_number("expert_weights_scale").unwrap_or(1.0);
        let groups = self.optional_size("expert_group_count", layer).unwrap_or(1);
        let used = self.optional_size("expert_group_used_count", layer).unwrap_or(groups);
        let falling = |values: &[f64]| -> Vec<usize> {
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
            order
        };
        let shared = self
            .has(&format!("blk.{layer}.ffn_gate_shexp.weight"))
            .then(|| [part("ffn_gate_shexp"), part("ffn_up_shexp"), part("ffn_down_shexp")]);
        let row = |x: &Vec<f64>| -> Vec<f64> {
            let logits = product(&router, x);
            let scores: Vec<f64> = match sigmoid {
                true => logits.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect(),
                false => softmax(&logits),
            };
            let mut by = scores.clone();
            if let Some(bias) = &bias {
                by.iter_mut().zip(bias).for_each(|(by, bias)| *by += bias);
            }
            let size = by.len() / groups;
            let values: Vec<f64> = by
                .chunks_exact(size)
                .map(|group| falling(group).iter().take(if sigmoid { 2 } else { 1 }).map(|&e| group[e]).sum())
                .collect();
            for &group in &falling(&values)[used..] {
                by[group * size..][..size].fill(f64::NEG_INFINITY);
            }
            let chosen = &falling(&by)[..self.size("expert_used_count")];
            let total: f64 = if renormalised { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 };
            let mut sum = match &shared {
                Some([gate, up, down]) => self.gated(gate, up, down, x),
                None => vec![0.0; hidden],
            };
            for &expert in chosen {
                let rows = |all: &Rows, each: usize| all[expert * each..][..each].to_vec();
                let made = self.gated(&rows(&gate, inner), &rows(&up, inner), &rows(&down, hidden), x);
                let weight = scores[expert] / total * scale;
                sum.iter_mut().zip(made).for_each(|(sum, made)| *sum += weight * made);
            }
            sum
        };
        x.iter().map(row).collect()
    }

    /// What the experts make of rows, which they norm themselves.
    fn experts(&self, layer: usize, x: &Rows) -> Rows {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (hidden, inner) = (x[0].len(), self.size("expert_feed_forward_length"));
        let router = self.rows(&name("ffn_gate_inp.weight"));
        let router_scale = self.vector(&name("ffn_gate_inp.scale"));
        let scales = self.vector(&name("ffn_down_exps.scale"));
        let norm = self.vector(&name("pre_ffw_norm_2.weight"));
        let (gate_up, down) =
            (self.rows(&name("ffn_gate_up_exps.weight")), self.rows(&name("ffn_down_exps.weight")));
        let row = |x: &Vec<f64>| -> Vec<f64> {
            let input: Vec<f64> = self
                .plain_norm(x)
                .iter()
                .zip(&router_scale)
                .map(|(v, scale)| v * scale / (hidden as f64).sqrt())
                .collect();
            let shares = softmax(&product(&router, &input));
            let mut order: Vec<usize> = (0..shares.len()).collect();
            order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
            order.truncate(self.size("expert_used_count"));
            let total: f64 = order.iter().map(|&expert| shares[expert]).sum();
            let normed = self.norm(x, &norm);
            let mut sum = vec![0.0; hidden];
            for expert in order {
                let gate_up = &gate_up[expert * 2 * inner..][..2 * inner];
                let down = &down[expert * hidden..][..hidden];
                let made = self.gated(&gate_up[..inner], &gate_up[inner..], down, &normed);
                let weight = shares[expert] / total * scales[expert];
                sum.iter_mut().zip(made).for_each(|(sum, made)| *sum += weight * made);
            }
            sum
        };
        x.iter().map(row).collect()
    }

    /// The inputs of all layers, for each position, in models that have such.
    fn layer_inputs(&self, ids: &[u32], x: &Rows) -> Option<Rows> {
        let size = self.optional_size("embedding_length_per_layer_input", 0).filter(|&size| size > 0)?;
        let (table, projection) =
            (self.rows("per_layer_token_embd.weight"), self.rows("per_layer_model_proj.weight"));
        let norm = self.vector("per_layer_proj_norm.weight");
        let of = |(&id, x): (&u32, &Vec<f64>)| -> Vec<f64> {
            let made: Vec<f64> =
                product(&projection, x).iter().map(|v| v / (x.len() as f64).sqrt()).collect();
            let normed = made.chunks_exact(size).flat_map(|part| self.norm(part, &norm));
            normed
                .zip(&table[id as usize])
                .map(|(v, e)| (v + e * (size as f64).sqrt()) / 2f64.sqrt())
                .collect()
        };
        Some(ids.iter().zip(x).map(of).collect())
    }

    /// Logits of every position.
    pub fn logits(&self, ids: &[u32]) -> Rows {
        let embedding = self.rows("token_embd.weight");
        let scale = if self.gemma { (embedding[0].len() as f64).sqrt() } else { 1.0 };
        let mut x: Rows =
            ids.iter().map(|&id| embedding[id as usize].iter().map(|v| v * scale).collect()).collect();
        let inputs = self.layer_inputs(ids, &x);
        let mut caches: Vec<(Heads, Heads)> = Vec::new();
        for layer in 0..self.size("block_count") {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let norm = |rows: &Rows, part: &str| -> Rows {
                let weight = self.vector(&name(part));
                rows.iter().map(|row| self.norm(row, &weight)).collect()
            };
            let norm_if =
                |rows: Rows, part: &str| if self.has(&name(part)) { norm(&rows, part) } else { rows };
            let normed = norm(&x, "attn_norm");
            let from = self.cache_of(layer);
            caches.push(if from == layer {
                self.keys_and_values(layer, &normed)
            } else {
                caches[from].clone()
            });
            let branch = self.attention(layer, &normed, &caches[layer]);
            add(&mut x, &norm_if(branch, "post_attention_norm"));
            let normed = norm(&x, "ffn_norm");
            let mut branch = match self.has(&name("ffn_gate")) {
                true => self.dense(layer, &normed),
                false => self.routed(layer, &normed),
            };
            if self.has(&name("ffn_gate")) && self.has(&name("ffn_gate_inp")) {
                branch = norm(&branch, "post_ffw_norm_1");
                add(&mut branch, &norm(&self.experts(layer, &x), "post_ffw_norm_2"));
            }
            add(&mut x, &norm_if(branch, "post_ffw_norm"));
            if let Some(inputs) = &inputs {
                let (gate, projection) = (self.rows(&name("inp_gate")), self.rows(&name("proj")));
                let made = x.iter().zip(inputs).map(|(x, inputs)| {
                    let input = &inputs[layer * gate.len()..][..gate.len()];
                    let gated = product(&gate, x).into_iter().zip(input).map(|(g, v)| self.activate(g) * v);
                    product(&projection, &gated.collect::<Vec<_>>())
                });
                let made: Rows = made.collect();
                add(&mut x, &norm(&made, "post_norm"));
            }
            if self.has(&name("layer_output_scale")) {
                let scale = self.vector(&name("layer_output_scale"))[0];
                x.iter_mut().flatten().for_each(|value| *value *= scale);
            }
        }
        let last = self.vector("output_norm.weight");
        let head = if self.has("output.weight") { self.rows("output.weight") } else { embedding };
        let cap = self.optional_number("final_logit_softcapping");
        x.iter()
            .map(|row| {
                product(&head, &self.norm(row, &last)).iter().map(|&logit| capped(logit, cap)).collect()
            })
            .collect()
    }
}

fn capped(value: f64, cap: Option<f64>) -> f64 {
    cap.map_or(value, |cap| cap * (value / cap).tanh())
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

fn product(weights: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    weights.iter().map(|row| row.iter().zip(x).map(|(w, v)| w * v).sum()).collect()
}

fn add(x: &mut Rows, branch: &Rows) {
    for (row, branch) in x.iter_mut().zip(branch) {
        row.iter_mut().zip(branch).for_each(|(v, b)| *v += b);
    }
}
