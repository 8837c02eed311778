//! Narrow passes as one launch each: the bits of many launches, for every family and every kind of weights.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::path::Path;
use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::device::{Device, DeviceOptions, DeviceSelector};
use axe::model::{Causal, LoadOptions, Logits};
use axe::ops::{CacheKind, Products};
use support::{FAMILIES, cache_dir, device, fixture, units};

const CONTEXT: usize = 128;
/// Rows of passes, one after the other: every way that kernels have for a few rows, and some for many.
const WIDTHS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 1];

fn open(device: Device, path: &Path, cache: CacheKind, join: bool, products: Products) -> Causal {
    let gguf = Arc::new(Gguf::open(path).unwrap());
    let options = LoadOptions {
        context: CONTEXT,
        rows: 32,
        logit_rows: 16,
        cache,
        cache_dir: Some(cache_dir()),
        join,
        products,
    };
    Causal::load(device, gguf, &options, &mut |_| {}).unwrap()
}

/// The bits of all logits of passes of all widths, and how many launches the last one of each width was.
fn bits(model: &mut Causal) -> (Vec<u32>, Vec<usize>) {
    let vocabulary = model.config().vocabulary;
    let (mut all, mut launches, mut start) = (Vec::new(), Vec::new(), 0);
    for rows in WIDTHS {
        let ids: Vec<u32> = (start..start + rows).map(|id| (id * 7 % vocabulary) as u32).collect();
        model.forward(&ids, start, Logits::All).unwrap();
        for row in 0..rows {
            model.with_logits(row, |logits| all.extend(logits.iter().map(|value| value.to_bits()))).unwrap();
        }
        launches.push(model.launches(rows, Logits::All));
        start += rows;
    }
    (all, launches)
}

fn compare(path: &Path, cache: CacheKind, products: Products) {
    let device = device();
    let (expected, many) = bits(&mut open(device.clone(), path, cache, false, products));
    let mut model = open(device.clone(), path, cache, true, products);
    let (found, launches) = bits(&mut model);
    assert!(!model.joining_failed(), "{}", path.display());
    assert!(many.iter().all(|&launches| launches > 5), "{many:?}");
    let expected_launches = if device.info().finds_by_address() { [1; WIDTHS.len()].to_vec() } else { many };
    assert_eq!(launches, expected_launches, "{}", path.display());
    assert!(expected.iter().any(|&bits| f32::from_bits(bits) != 0.0));
    assert!(found == expected, "{}: logits differ", path.display());
}

#[test]
fn every_family_makes_the_same_bits() {
    for (index, name) in FAMILIES.iter().enumerate() {
        let cache = if index % 2 == 0 { CacheKind::F16 } else { CacheKind::F32 };
        compare(&fixture(&format!("causal-families/{name}.gguf")), cache, Products::Vector);
    }
}

#[test]
fn weights_of_every_kind_make_the_same_bits() {
    // One of each way that codes become numbers.
    for name in ["BF16", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K_S", "Q4_1", "Q5_K_S", "Q6_K", "Q8_0", "TQ1_0"] {
        for &products in units() {
            compare(&fixture(&format!("quant-types/{name}.gguf")), CacheKind::F16, products);
        }
    }
}

#[test]
fn passes_without_logits_fill_the_same_cache() {
    let device = device();
    let path = fixture("causal-families/gemma4e.gguf");
    let found = [false, true].map(|join| {
        let mut model = open(device.clone(), &path, CacheKind::F16, join, Products::Vector);
        for (start, rows) in [(0, 16), (16, 1), (17, 3)] {
            let ids: Vec<u32> = (start as u32..(start + rows) as u32).collect();
            model.forward(&ids, start, Logits::None).unwrap();
        }
        model.forward(&[3], 20, Logits::Last).unwrap();
        model.with_logits(0, |logits| logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>()).unwrap()
    });
    assert_eq!(found[0], found[1]);
}

#[test]
fn a_joined_pass_is_one_kernel_of_the_profile() {
    let options = DeviceOptions { cache_dir: Some(cache_dir()), profiling: true, ..Default::default() };
    let device = Device::open(&DeviceSelector::default(), &options).unwrap();
    let mut model =
        open(device.clone(), &fixture("causal-families/llama.gguf"), CacheKind::F16, true, Products::Vector);
    model.forward(&[1], 0, Logits::All).unwrap(); // finds where its memory lies
    device.finish().unwrap();
    device.reset_profile();
    for start in 1..4 {
        model.forward(&[1], start, Logits::All).unwrap();
    }
    assert_eq!(model.run_hollow(1, Logits::All).unwrap(), device.info().finds_by_address());
    let profile = device.profile().unwrap();
    if device.info().finds_by_address() {
        let [only] = profile.as_slice() else { panic!("{profile:?}") };
        assert_eq!((only.kernel.as_str(), only.launches), ("run_phases", 4));
    } else {
        assert!(profile.len() > 3, "{profile:?}");
    }
}
