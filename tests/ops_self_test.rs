//! The kernels against their references on whatever device is there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use axe::device::{Device, DeviceOptions, DeviceSelector};
use axe::ops::{
    Activation, CacheKind, Format, Heads, Kernels, Pairing, self_test, self_test_head, self_test_stream,
};

fn open() -> Device {
    Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap()
}

#[test]
fn every_format_and_head_size() {
    let device = open();
    let plain = Heads::plain(64, CacheKind::F32);
    let unit = Kernels::with_matrix_unit(&device).unwrap();
    if let Some(kernels) = &unit {
        self_test(&device, kernels, &Format::ALL, &plain).unwrap();
    } else {
        println!("no matrix unit here, or it may not be used: only vectors are tested");
    }
    let kernels = Kernels::new(&device).unwrap();
    for head_size in [16, 32, 48, 64, 80, 128, 256] {
        self_test(&device, &kernels, &[], &Heads::plain(head_size, CacheKind::F16)).unwrap();
    }
    if let Some(kernels) = Kernels::with_xmx(&device).unwrap() {
        // Of heads of 48 the vector family's.
        for head_size in [16, 32, 48, 64, 128, 256, 512] {
            self_test(&device, &kernels, &[], &Heads::plain(head_size, CacheKind::F16)).unwrap();
        }
    }
    self_test(&device, &kernels, &Format::ALL, &plain).unwrap();
}

#[test]
fn heads_of_every_kind() {
    let device = open();
    heads_of_every_kind_by(&device, &Kernels::new(&device).unwrap());
    if let Some(kernels) = Kernels::with_xmx(&device).unwrap() {
        heads_of_every_kind_by(&device, &kernels);
    }
}

fn heads_of_every_kind_by(device: &Device, kernels: &Kernels) {
    for cache in [CacheKind::F16, CacheKind::F32] {
        for pairing in [Pairing::Neighbours, Pairing::RotatedHalves, Pairing::HeadHalves] {
            for full in [false, true] {
                let heads = Heads {
                    pairing,
                    rotated_pairs: if full { 4 } else { 16 },
                    norms: true,
                    value_norms: full || pairing == Pairing::HeadHalves,
                    keys_are_values: full,
                    window: !full,
                    canvas: pairing != Pairing::Neighbours,
                    bias: full,
                    softcap: full == (cache == CacheKind::F16),
                    ..Heads::plain(32, cache)
                };
                self_test(device, kernels, &[], &heads).unwrap();
            }
        }
    }
    // The largest heads of a DiffusionGemma; a quarter of them turns.
    let heads = Heads {
        pairing: Pairing::HeadHalves,
        rotated_pairs: 64,
        norms: true,
        value_norms: true,
        keys_are_values: true,
        window: false,
        canvas: true,
        ..Heads::plain(512, CacheKind::F16)
    };
    self_test(device, kernels, &[], &heads).unwrap();
}

#[test]
fn both_ends_of_a_diffusion_model() {
    let device = open();
    for kernels in
        [Some(Kernels::new(&device).unwrap()), Kernels::with_matrix_unit(&device).unwrap()].iter().flatten()
    {
        self_test_head(&device, kernels, Format::Bf16).unwrap();
    }
}

#[test]
fn whole_rows() {
    let device = open();
    let kernels = Kernels::new(&device).unwrap();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        self_test_stream(&device, &kernels, activation).unwrap();
    }
}
