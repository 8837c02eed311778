//! What is fixed about published DiffusionGemma directories: names of tensors, limits and defaults of sizes. The converter
//! and the loader both go by it.

/// `model_type` of these models in `config.json`.
pub const MODEL_TYPE: &str = "diffusion_gemma";
/// Begins the names of the decoder's tensors, under which weights are looked for.
pub const DECODER: &str = "model.decoder.";
/// Begins the names of the encoder's tensors; most are second copies of the decoder's.
pub const ENCODER: &str = "model.encoder.language_model.";
/// The table of embeddings, which is the head, too.
pub const TABLE: &str = "model.decoder.embed_tokens.weight";
/// The head under its own name: a second copy of [`TABLE`].
pub const HEAD: &str = "lm_head.weight";
/// Begin the names of tensors that text does without.
const VISION: [&str; 2] = ["model.encoder.vision_tower.", "model.encoder.embed_vision."];

/// A size that `text_config` states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Its key.
    pub key: &'static str,
    /// What holds where nothing is said; `None`: something must be.
    pub default: Option<usize>,
    /// The largest that is believed.
    pub most: usize,
}

/// Layers.
pub const LAYERS: Size = Size { key: "num_hidden_layers", default: Some(30), most: 4096 };
/// Experts of a layer.
pub const EXPERTS: Size = Size { key: "num_experts", default: None, most: 4096 };
/// Values of a position between layers.
pub const HIDDEN: Size = Size { key: "hidden_size", default: Some(2304), most: 1 << 20 };
/// Values between an expert's two projections.
pub const EXPERT_WIDTH: Size = Size { key: "moe_intermediate_size", default: None, most: 1 << 22 };

/// Whether a tensor is one of the vision tower.
pub fn is_vision(name: &str) -> bool {
    VISION.iter().any(|prefix| name.starts_with(prefix))
}

/// The name under which a tensor's weights are looked for, if this is another name for them.
pub fn original(name: &str) -> Option<String> {
    if name == HEAD {
        return Some(TABLE.to_owned());
    }
    name.strip_prefix(ENCODER).map(|rest| format!("{DECODER}{rest}"))
}

/// Layer and own name of a tensor of all experts of a layer, from `<path of the encoder or decoder>.layers.<i>.experts.<name>`.
pub fn of_experts(name: &str) -> Option<(usize, &str)> {
    let (path, rest) = name.rsplit_once(".layers.")?;
    if !path.split('.').any(|part| part == "encoder" || part == "decoder") {
        return None;
    }
    let (layer, name) = rest.split_once(".experts.")?;
    // `parse` would take a sign, too.
    let layer = layer.bytes().all(|byte| byte.is_ascii_digit()).then(|| layer.parse().ok())??;
    Some((layer, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(of_experts("model.decoder.layers.12.experts.gu_q"), Some((12, "gu_q")));
        assert_eq!(
            of_experts("model.encoder.language_model.layers.0.experts.down_proj"),
            Some((0, "down_proj"))
        );
        for other in [
            "model.layers.0.experts.gu_q",
            "model.decoder.layers.+1.experts.gu_q",
            "model.decoder.layers..experts.gu_q",
            "model.decoder.layers.0.mlp.gate_proj.weight",
            "model.decoder.layers.99999999999999999999999.experts.gu_q",
        ] {
            assert_eq!(of_experts(other), None, "{other}");
        }
        assert_eq!(original("lm_head.weight").as_deref(), Some("model.decoder.embed_tokens.weight"));
        assert_eq!(
            original("model.encoder.language_model.norm.weight").as_deref(),
            Some("model.decoder.norm.weight")
        );
        assert_eq!(original("model.decoder.norm.weight"), None);
        assert!(is_vision("model.encoder.vision_tower.a") && !is_vision("model.encoder.language_model.a"));
    }
}
