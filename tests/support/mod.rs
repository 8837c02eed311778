//! What several test files need: fixtures, golden tensors, a model on whatever device is there.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::device::{Device, DeviceOptions, DeviceSelector};
use axe::model::{Causal, LoadOptions};
use axe::ops::{CacheKind, Kernels, Products, Xmx};

/// The causal families of which there is a tiny model.
pub const FAMILIES: [&str; 11] = [
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4e",
    "deepseek2",
];

/// A file under tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A model file that scripts/fetch-model.sh puts in place.
pub fn real_model(name: &str) -> PathBuf {
    let dir = std::env::var_os("AXE_TEST_MODELS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".axe/models"), PathBuf::from);
    let path = dir.join(name);
    assert!(
        path.exists(),
        "{} is missing: run scripts/fetch-model.sh smollm2 and scripts/fetch-model.sh gemma3-270m",
        path.display()
    );
    path
}

/// The tensors `ids` and `logits` of a golden file.
pub fn golden(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(fixture(name)).unwrap();
    (tensor_i32(&bytes, "ids").iter().map(|&id| id as u32).collect(), tensor_f32(&bytes, "logits"))
}

/// A tensor of i32.
pub fn tensor_i32(file: &[u8], name: &str) -> Vec<i32> {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A tensor of f32.
pub fn tensor_f32(file: &[u8], name: &str) -> Vec<f32> {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The default device, with programs and repacked weights cached under target/.
pub fn device() -> Device {
    let cache_dir = Some(cache_dir());
    Device::open(&DeviceSelector::default(), &DeviceOptions { cache_dir, ..Default::default() }).unwrap()
}

/// Where tests keep programs and repacked weights.
pub fn cache_dir() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache")
}

/// A model with room for `context` positions, passes of up to `rows` rows, all with logits.
pub fn open_model(path: &Path, context: usize, rows: usize, cache: CacheKind) -> Causal {
    open_by(Products::Vector, path, context, rows, cache)
}

/// The model once for each way to make products that there is here, the `xmx` family's among them.
pub fn open_every_way(
    path: &Path,
    context: usize,
    rows: usize,
    cache: CacheKind,
) -> impl Iterator<Item = Causal> {
    ways().into_iter().map(move |products| open_by(products, path, context, rows, cache))
}

/// The ways to make products that there are here.
pub fn ways() -> Vec<Products> {
    let xmx = Xmx::new(&device()).unwrap().map(|_| Products::Xmx);
    if xmx.is_none() {
        println!("no sub-groups with loads of blocks here: the xmx family is not tested");
    }
    units().iter().copied().chain(xmx).collect()
}

/// By vectors, and by integers where the processor has what they need.
pub fn units() -> &'static [Products] {
    match Kernels::with_integers(&device()).unwrap() {
        Some(_) => &[Products::Vector, Products::Integer],
        None => &[Products::Vector],
    }
}

/// The same for models that denoise, by the matrix unit in f32.
pub fn canvas_ways() -> Vec<Products> {
    let unit = Kernels::with_matrix_unit(&device()).unwrap().map(|_| Products::MatrixUnit);
    ways().into_iter().filter(|&way| way != Products::Integer).chain(unit).collect()
}

/// The model with products made that way.
pub fn open_by(products: Products, path: &Path, context: usize, rows: usize, cache: CacheKind) -> Causal {
    let gguf = Arc::new(Gguf::open(path).unwrap());
    let options = LoadOptions {
        context,
        rows,
        logit_rows: rows,
        cache,
        cache_dir: Some(cache_dir()),
        join: false,
        products,
    };
    let model = Causal::load(device(), gguf, &options, &mut |_| {}).unwrap();
    assert_eq!(model.products(), products, "the self-test of these products fails");
    model
}

/// The device with kernels of each way to make products of many rows, where there is more than one.
pub fn flavours(device: &Device) -> Vec<(Device, Kernels)> {
    let mut all = vec![(device.clone(), Kernels::new(device).unwrap())];
    match Kernels::with_matrix_unit(device).unwrap() {
        Some(kernels) => all.push((device.clone(), kernels)),
        None => println!("no matrix unit here, or it may not be used: only vectors are tested"),
    }
    all.extend(Kernels::with_integers(device).unwrap().map(|kernels| (device.clone(), kernels)));
    all
}
