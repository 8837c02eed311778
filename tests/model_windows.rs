//! Every family against a reference that is written down plainly and masks every pair of positions: at a window's edge, one
//! before, one past and at twice the window, however the text is cut into passes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

#[allow(dead_code, reason = "shared with the tests of variants")]
#[path = "support/reference_model.rs"]
mod reference_model;
mod support;

use axe::model::{Causal, Logits};
use axe::ops::CacheKind;
use reference_model::ReferenceModel;
use support::{FAMILIES, fixture, golden, open_model};

/// Families with layers that see a window of 16.
const SLIDING: [&str; 4] = ["gemma2", "gemma3", "gemma4", "gemma4e"];

fn largest_difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0.0, |largest, (&f, e)| {
        assert!(f.is_finite());
        f64::max(largest, (f64::from(f) - e).abs())
    })
}

/// Logits of every position, fed in passes of these widths over and over.
fn logits(model: &mut Causal, ids: &[u32], widths: &[usize]) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    for &width in widths.iter().cycle() {
        let start = found.len();
        if start == ids.len() {
            break;
        }
        let end = ids.len().min(start + width);
        model.forward(&ids[start..end], start, Logits::All).unwrap();
        for row in 0..end - start {
            found.push(model.with_logits(row, <[f32]>::to_vec).unwrap());
        }
    }
    found
}

/// Ids that repeat nothing soon.
fn text(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| 3 + (i * 197 + i * i * 31) % 500).collect()
}

#[test]
fn the_reference_agrees_with_logits_made_elsewhere() {
    for name in FAMILIES {
        let path = format!("causal-families/{name}");
        let (ids, expected) = golden(&format!("{path}.safetensors"));
        let found = ReferenceModel::open(&fixture(&format!("{path}.gguf"))).logits(&ids);
        let vocabulary = expected.len() / ids.len();
        let off = found
            .iter()
            .zip(expected.chunks_exact(vocabulary))
            .fold(0.0, |largest, (found, expected)| f64::max(largest, largest_difference(expected, found)));
        println!("{name}: {off:.2e}");
        assert!(off <= 5e-5, "{name}: logits differ by {off}");
    }
}

#[test]
fn windows_end_where_they_should() {
    for name in SLIDING {
        let path = fixture(&format!("causal-families/{name}.gguf"));
        let reference = ReferenceModel::open(&path);
        let window = reference.window();
        assert_eq!(window, 16);
        // Past several windows, and past a tile of the attention kernel.
        let ids = text(4 * window + 1);
        let expected = reference.logits(&ids);
        let mut model = open_model(&path, ids.len(), ids.len(), CacheKind::F32);
        for widths in [&[1][..], &[ids.len()], &[window], &[window - 1], &[window + 1], &[2 * window, 3, 30]]
        {
            let found = logits(&mut model, &ids, widths);
            // A text of n tokens ends at position n - 1.
            for length in [window - 1, window, window + 1, 2 * window] {
                let off = largest_difference(&found[length - 1], &expected[length - 1]);
                assert!(
                    off <= 1e-4,
                    "{name}: {length} tokens in passes of {widths:?}: logits differ by {off}"
                );
            }
            for (position, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let off = largest_difference(found, expected);
                assert!(
                    off <= 1e-4,
                    "{name}: position {position} in passes of {widths:?}: logits differ by {off}"
                );
            }
        }
    }
}

#[test]
fn a_token_that_left_every_window_still_reaches_the_layers_that_see_all() {
    // The reference and the model agree on it; that it matters at all shows that both look beyond the window.
    let path = fixture("causal-families/gemma3.gguf");
    let reference = ReferenceModel::open(&path);
    let (ids, mut other) = (text(150), text(150));
    other[0] += 1;
    let mut model = open_model(&path, 150, 150, CacheKind::F32);
    let (first, second) = (logits(&mut model, &ids, &[150]), logits(&mut model, &other, &[7]));
    let expected = reference.logits(&other);
    assert!(largest_difference(&second[149], &expected[149]) <= 1e-4);
    assert_ne!(first[149], second[149]);
}

#[test]
fn families_without_windows_agree_past_the_tile_of_the_attention_kernel() {
    for name in FAMILIES.into_iter().filter(|name| !SLIDING.contains(name)) {
        let path = fixture(&format!("causal-families/{name}.gguf"));
        let ids = text(131);
        let expected = ReferenceModel::open(&path).logits(&ids);
        let mut model = open_model(&path, ids.len(), ids.len(), CacheKind::F32);
        for (position, found) in logits(&mut model, &ids, &[40]).iter().enumerate() {
            let off = largest_difference(found, &expected[position]);
            assert!(off <= 1e-4, "{name} at position {position}: logits differ by {off}");
        }
    }
}
