//! The kernels against their references on whatever device is there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use axe::device::{Device, DeviceOptions, DeviceSelector};
use axe::ops::{CacheKind, Format, Kernels, self_test};

#[test]
fn every_format_and_head_size() {
    let device = Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap();
    let unit = Kernels::with_matrix_unit(&device).unwrap();
    if let Some(kernels) = &unit {
        self_test(&device, kernels, &Format::ALL, 64, CacheKind::F32).unwrap();
    } else {
        println!("no matrix unit here, or it may not be used: only vectors are tested");
    }
    let kernels = Kernels::new(&device).unwrap();
    for head_size in [16, 32, 48, 64, 80, 128, 256] {
        self_test(&device, &kernels, &[], head_size, CacheKind::F16).unwrap();
    }
    self_test(&device, &kernels, &Format::ALL, 64, CacheKind::F32).unwrap();
}
