//! The device room's account of memory and its zero-copy views.
// The lint's exception for tests does not reach their helpers.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Weak};

use axe::device::{Arg, Buffer, Device, DeviceError, DeviceKind, DeviceOptions, DeviceSelector, Purpose};

const SUM: &str = r"
__kernel void sum(__global const uint *in, __global uint *out, const uint n) {
    uint total = 0;
    for (uint i = 0; i < n; i++) total += in[i];
    out[0] = total;
}
__kernel void spoil(__global uint *data) { data[0] = 1; }
";

fn open_with(memory_limit: Option<u64>) -> Device {
    let options = DeviceOptions { memory_limit, ..DeviceOptions::default() };
    Device::open(&DeviceSelector::default(), &options).unwrap()
}

/// Host memory at an address of the alignment that every device takes.
#[repr(align(4096))]
struct Page([u8; 8192]);

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn page() -> Arc<Page> {
    let mut page = Page([0; 8192]);
    for (i, word) in page.0.chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(i as u32).to_le_bytes());
    }
    Arc::new(page)
}

fn sum_on_device(device: &Device, input: &Buffer, n: u32) -> u32 {
    let sum = device.program("sum", SUM, "").unwrap().kernel("sum").unwrap();
    let out = device.alloc(Purpose::Scratch, 4).unwrap();
    device.launch(&sum, &[Arg::Buffer(input), Arg::Buffer(&out), Arg::U32(n)], &[1], None).unwrap();
    let mut bytes = [0; 4];
    device.read(&out, 0, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

#[test]
fn the_account_follows_every_buffer_by_purpose_to_its_end() {
    let device = open_with(Some(1 << 20));
    let empty = device.memory();
    assert_eq!((empty.total, empty.budget), (0, 1 << 20));
    let weights = device.alloc(Purpose::Weights, 1000).unwrap();
    let kv = device.alloc(Purpose::KvCache, 200).unwrap();
    let scratch = device.alloc(Purpose::Scratch, 30).unwrap();
    let another_handle = kv.clone();
    assert_eq!((weights.size(), weights.purpose()), (1000, Purpose::Weights));
    let full = device.memory();
    assert_eq!((full.weights, full.kv_cache, full.scratch, full.total), (1000, 200, 30, 1230));
    drop(kv);
    assert_eq!(device.memory().kv_cache, 200, "a clone still holds it");
    drop(another_handle);
    drop(weights);
    assert_eq!((device.memory().weights, device.memory().kv_cache, device.memory().total), (0, 0, 30));
    drop(scratch);
    assert_eq!(device.memory(), empty);
}

#[test]
fn a_view_of_host_memory_counts_by_its_bytes() {
    let device = open_with(None);
    assert_eq!(device.memory().budget, device.info().global_mem);
    let view = device.wrap(Purpose::Weights, page(), 0..4096).unwrap();
    assert_eq!(device.memory().weights, 4096);
    drop(view);
    assert_eq!(device.memory().total, 0);
}

#[test]
fn a_part_is_the_wholes_bytes_and_counts_once() {
    let device = open_with(None);
    let step = device.info().base_align.max(4096);
    let whole = device.alloc(Purpose::Scratch, 4 * step).unwrap();
    device.fill(&whole, 1).unwrap();
    let part = device.part(&whole, step..2 * step).unwrap();
    let beside = device.part(&whole, 2 * step..4 * step).unwrap();
    assert_eq!((part.size(), part.purpose(), part.is_read_only()), (step, Purpose::Scratch, false));
    assert_eq!(device.memory().total, 4 * step as u64);
    device.fill(&part, 7).unwrap();
    device.write(&beside, 4, &9u32.to_le_bytes()).unwrap();
    let words = step as u32 / 4;
    assert_eq!(sum_on_device(&device, &part, words), 7 * words);
    assert_eq!(sum_on_device(&device, &whole, 4 * words), 7 * words + 3 * words + 8);
    let overlapping = device.part(&whole, 0..2 * step).unwrap();
    assert_eq!(sum_on_device(&device, &overlapping, 2 * words), 8 * words);
    let inside = device.part(&beside, step..2 * step).unwrap();
    device.fill(&inside, 2).unwrap();
    assert_eq!(sum_on_device(&device, &whole, 4 * words), 11 * words + 8);
    assert!(matches!(device.part(&inside, 0..step + 1), Err(DeviceError::Range { .. })));
    // The last part keeps the whole, which is in the account until then.
    drop((whole, part, overlapping, inside));
    assert_eq!(device.memory().total, 4 * step as u64);
    assert_eq!(sum_on_device(&device, &beside, 2 * words), 3 * words + 8);
    drop(beside);
    assert_eq!(device.memory().total, 0);
}

#[test]
fn parts_lie_inside_and_take_over_who_may_write() {
    let device = open_with(None);
    let whole = device.alloc(Purpose::Scratch, 8192).unwrap();
    for range in [4096..8193, 8193..8193, usize::MAX - 1..usize::MAX] {
        let error = device.part(&whole, range.clone()).unwrap_err();
        assert!(matches!(error, DeviceError::Range { size: 8192, .. }), "{range:?}: {error}");
    }
    assert!(matches!(device.part(&whole, 4096..4096), Err(DeviceError::ZeroSize { .. })));
    assert!(device.part(&whole, 1..4096).is_err(), "no device takes an odd address");
    let other = open_with(None);
    assert!(matches!(other.part(&whole, 0..4096), Err(DeviceError::Foreign { .. })));
    let view = device.wrap(Purpose::Weights, page(), 0..8192).unwrap();
    let part = device.part(&view, 4096..8192).unwrap();
    assert!(part.is_read_only());
    assert_eq!(part.is_zero_copy(), view.is_zero_copy());
    assert!(matches!(device.write(&part, 0, &[1]), Err(DeviceError::ReadOnly { .. })));
    assert_eq!(sum_on_device(&device, &part, 1024), (1024u32..2048).sum::<u32>());
}

/// Bytes of files' pages that this process holds.
fn resident_file_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn libraries_work_on_after_their_code_is_released() {
    let device = open_with(None);
    let input = device.alloc(Purpose::Scratch, 4096).unwrap();
    device.fill(&input, 3).unwrap();
    assert_eq!(sum_on_device(&device, &input, 1024), 3 * 1024);
    // Other tests may be reading it again at the very same time.
    let released = (0..50).any(|_| {
        let before = resident_file_bytes();
        axe::device::process::release_unused();
        resident_file_bytes() + (1 << 20) < before
    });
    assert!(released || !cfg!(target_env = "gnu"), "nothing is released");
    assert_eq!(sum_on_device(&device, &input, 1024), 3 * 1024);
}

#[test]
fn what_does_not_fit_is_refused_with_numbers_and_leaves_the_account_alone() {
    let device = open_with(Some(1000));
    let first = device.alloc(Purpose::KvCache, 600).unwrap();
    let error = device.alloc(Purpose::Weights, 401).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::OverBudget { purpose: Purpose::Weights, asked: 401, used: 600, budget: 1000 }
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(["401", "600", "1000", "memory limit"].iter().all(|part| text.contains(part)), "{text}");
    let view = device.wrap(Purpose::Weights, page(), 0..4096);
    assert!(matches!(view, Err(DeviceError::OverBudget { asked: 4096, .. })));
    assert_eq!(device.memory().total, 600);
    device.alloc(Purpose::Weights, 400).unwrap();
    drop(first);
    device.alloc(Purpose::Weights, 1000).unwrap();
}

#[test]
fn impossible_sizes_are_refused_before_the_runtime_is_asked() {
    let device = open_with(Some(u64::MAX));
    assert!(matches!(device.alloc(Purpose::Scratch, 0), Err(DeviceError::ZeroSize { .. })));
    let limit = device.info().max_alloc;
    let error = device.alloc(Purpose::Scratch, usize::MAX).unwrap_err();
    assert!(matches!(error, DeviceError::TooLarge { limit: at, .. } if at == limit), "{error}");
    if let Ok(over) = usize::try_from(limit + 1) {
        assert!(matches!(device.alloc(Purpose::Scratch, over), Err(DeviceError::TooLarge { .. })));
    }
    assert_eq!(device.memory().total, 0);
}

#[test]
fn buffers_of_a_cpu_begin_where_wide_vectors_can_load() {
    let device = open_with(None);
    if device.info().kind != DeviceKind::Cpu {
        return;
    }
    for size in [1, 100, 4096, 1_000_003] {
        let buffer = device.alloc(Purpose::Scratch, size).unwrap();
        let address = device.with_mapped(&buffer, 0..size, |bytes| bytes.as_ptr() as usize).unwrap();
        assert_eq!(address % 64, 0, "{size}");
    }
}

#[test]
fn an_aligned_view_is_the_hosts_own_memory_on_a_cpu() {
    let device = open_with(None);
    let page = page();
    let view = device.wrap(Purpose::Weights, page.clone(), 4096..8192).unwrap();
    assert!(view.is_read_only());
    if device.info().kind == DeviceKind::Cpu && device.info().unified_memory {
        assert!(view.is_zero_copy(), "{}", device.info());
        let seen = device.with_mapped(&view, 0..4096, <[u8]>::as_ptr).unwrap();
        assert_eq!(seen, page.0[4096..].as_ptr());
    }
    assert_eq!(sum_on_device(&device, &view, 1024), (1024u32..2048).sum::<u32>());
}

#[test]
fn an_unaligned_view_is_a_copy_with_the_same_bytes() {
    let device = open_with(None);
    let page = page();
    let view = device.wrap(Purpose::Weights, page.clone(), 4..4096 + 4).unwrap();
    assert!(!view.is_zero_copy() && view.is_read_only());
    assert_eq!(Arc::strong_count(&page), 1, "a copy does not keep its source");
    assert_eq!(sum_on_device(&device, &view, 1024), (1u32..1025).sum::<u32>());
}

#[test]
fn a_view_keeps_the_host_memory_until_kernels_are_done_with_it() {
    let device = open_with(None);
    let page = page();
    let alive: Weak<Page> = Arc::downgrade(&page);
    let view = device.wrap(Purpose::Weights, page, 0..8192).unwrap();
    let sum = device.program("sum", SUM, "").unwrap().kernel("sum").unwrap();
    let out = device.alloc(Purpose::Scratch, 4).unwrap();
    for _ in 0..50 {
        device.launch(&sum, &[Arg::Buffer(&view), Arg::Buffer(&out), Arg::U32(2048)], &[1], None).unwrap();
    }
    assert_eq!(alive.strong_count(), usize::from(view.is_zero_copy()));
    drop(view);
    assert_eq!(alive.strong_count(), 0);
    let mut bytes = [0; 4];
    device.read(&out, 0, &mut bytes).unwrap();
    assert_eq!(u32::from_le_bytes(bytes), (0..2048).sum::<u32>());
}

#[test]
fn nothing_writes_to_a_view() {
    let device = open_with(None);
    let view = device.wrap(Purpose::Weights, page(), 0..4096).unwrap();
    let read_only = |result: Result<(), DeviceError>| matches!(result, Err(DeviceError::ReadOnly { .. }));
    assert!(read_only(device.write(&view, 0, &[1])));
    assert!(read_only(device.fill(&view, 1)));
    assert!(read_only(device.map_write(&view, 0..1, |_| ())));
    let spoil = device.program("sum", SUM, "").unwrap().kernel("spoil").unwrap();
    let error = device.launch(&spoil, &[Arg::Buffer(&view)], &[1], None).unwrap_err();
    assert!(matches!(&error, DeviceError::BadArg { index: 0, given: "a read-only buffer", .. }), "{error}");
}

#[test]
fn a_view_over_the_end_of_its_owner_is_refused() {
    let device = open_with(None);
    let error = device.wrap(Purpose::Weights, page(), 8000..8193).unwrap_err();
    assert!(error.to_string().contains("8000..8193") && error.to_string().contains("8192"), "{error}");
    assert!(matches!(device.wrap(Purpose::Weights, page(), 5..5), Err(DeviceError::ZeroSize { .. })));
}
