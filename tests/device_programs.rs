//! Programs of the device room: errors with their log, the cache on disk, times of kernels.
// The lint's exception for tests does not reach their helpers.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use axe::device::{Arg, Device, DeviceError, DeviceOptions, DeviceSelector, Launch, Program, Purpose, Work};

const SOURCE: &str = r"
__kernel void put(__global uint *out, const uint value) { out[get_global_id(0)] = value + VALUE; }
__kernel void add(__global uint *out, __global const uint *more) { out[get_global_id(0)] += more[get_global_id(0)]; }
";

fn open(cache: &Path) -> Device {
    let options = DeviceOptions { cache_dir: Some(cache.to_owned()), ..DeviceOptions::default() };
    Device::open(&DeviceSelector::default(), &options).unwrap()
}

/// Builds the program and checks that its kernel does what the options say.
fn build(device: &Device, value: u32) -> Program {
    let program = device.program("put", SOURCE, &format!("-D VALUE={value}")).unwrap();
    let out = device.alloc(Purpose::Scratch, 8).unwrap();
    let put = program.kernel("put").unwrap();
    device.launch(&put, &[Arg::Buffer(&out), Arg::U32(5)], &[2], None).unwrap();
    let mut bytes = [0; 8];
    device.read(&out, 0, &mut bytes).unwrap();
    assert_eq!(bytes[..4], (5 + value).to_le_bytes());
    program
}

fn cached(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(dir.join("programs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_refused_program_tells_label_options_and_the_whole_log() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    let source =
        "__kernel void broken(__global int *x) {\n    x[0] = first_mistake;\n    x[1] = second_mistake;\n}\n";
    let error = device.program("my ops", source, "-D SOME=1").unwrap_err();
    let DeviceError::Build { label, options, log, .. } = &error else { panic!("{error}") };
    assert_eq!(label, "my ops");
    assert!(options.contains("-D SOME=1"), "{options}");
    assert!(log.contains("first_mistake") && log.contains("second_mistake"), "{log}");
    let text = error.to_string();
    assert!(text.contains("my ops") && text.contains("first_mistake"), "{text}");
    assert!(!dir.path().join("programs").exists(), "nothing is kept of it");
}

#[test]
fn an_unknown_kernel_is_named_with_those_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    let program = build(&device, 1);
    let error = program.kernel("puts").unwrap_err();
    assert!(matches!(&error, DeviceError::NoKernel { kernel, .. } if kernel == "puts"), "{error}");
    assert!(error.to_string().contains("put, add") || error.to_string().contains("add, put"), "{error}");
    assert!(matches!(program.kernel("pu\0t"), Err(DeviceError::NoKernel { .. })));
    assert!(matches!(device.program("zero", SOURCE, "-D A\0B"), Err(DeviceError::Build { .. })));
}

#[test]
fn the_second_build_comes_from_the_cache_also_in_another_context() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    assert!(!build(&device, 1).is_from_cache());
    assert_eq!(cached(dir.path()).len(), 1);
    assert!(build(&device, 1).is_from_cache());
    drop(device);
    let again = build(&open(dir.path()), 1);
    assert!(again.is_from_cache());
    assert_eq!(again.label(), "put");
}

#[test]
fn kernels_from_the_cache_refuse_wrong_arguments_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    build(&device, 1);
    let program = build(&device, 1);
    assert!(program.is_from_cache());
    let put = program.kernel("put").unwrap();
    let out = device.alloc(Purpose::Scratch, 8).unwrap();
    let few = device.launch(&put, &[Arg::Buffer(&out)], &[2], None);
    assert!(matches!(few, Err(DeviceError::ArgCount { expected: 2, given: 1, .. })));
    let number = device.launch(&put, &[Arg::U64(0x10), Arg::U32(1)], &[2], None);
    assert!(matches!(number, Err(DeviceError::BadArg { index: 0, .. })));
}

#[test]
fn other_options_or_sources_are_other_entries() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    build(&device, 1);
    assert!(!build(&device, 2).is_from_cache());
    let other = device.program("put", &format!("{SOURCE}\n"), "-D VALUE=1").unwrap();
    assert!(!other.is_from_cache());
    assert_eq!(cached(dir.path()).len(), 3);
    assert!(build(&device, 1).is_from_cache() && build(&device, 2).is_from_cache());
}

#[test]
fn a_damaged_entry_is_built_and_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    build(&device, 1);
    let path = cached(dir.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for broken in [&b""[..], &b"nonsense"[..], &whole[..whole.len() / 2], &flipped] {
        fs::write(&path, broken).unwrap();
        assert!(!build(&device, 1).is_from_cache());
        assert_eq!(cached(dir.path()), std::slice::from_ref(&path));
        assert!(build(&device, 1).is_from_cache(), "written anew");
    }
}

#[test]
fn an_entry_of_another_program_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(dir.path());
    build(&device, 1);
    let first = cached(dir.path()).remove(0);
    build(&device, 2);
    let second = cached(dir.path()).into_iter().find(|path| *path != first).unwrap();
    fs::copy(&second, &first).unwrap();
    assert!(!build(&device, 1).is_from_cache());
}

#[test]
fn a_cache_that_cannot_be_written_only_costs_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a file");
    fs::write(&file, b"").unwrap();
    let device = open(&file);
    assert!(!build(&device, 1).is_from_cache());
    assert!(!build(&device, 1).is_from_cache());
}

#[test]
fn times_are_added_up_by_kernel_and_only_when_asked() {
    let options = DeviceOptions { profiling: true, ..DeviceOptions::default() };
    let device = Device::open(&DeviceSelector::default(), &options).unwrap();
    let program = device.program("put", SOURCE, "-D VALUE=0").unwrap();
    let (put, add) = (program.kernel("put").unwrap(), program.kernel("add").unwrap());
    let (a, b) =
        (device.alloc(Purpose::Scratch, 4096).unwrap(), device.alloc(Purpose::Scratch, 4096).unwrap());
    let began = std::time::Instant::now();
    device.launch(&put, &[Arg::Buffer(&b), Arg::U32(1)], &[1024], None).unwrap();
    // More than wait at a time.
    for _ in 0..600 {
        device.launch(&add, &[Arg::Buffer(&a), Arg::Buffer(&b)], &[1024], None).unwrap();
    }
    device.finish().unwrap();
    let elapsed = began.elapsed().as_nanos() as u64;
    let counts = |device: &Device| -> Vec<(String, u64)> {
        let mut counts: Vec<_> =
            device.profile().unwrap().into_iter().map(|t| (t.kernel, t.launches)).collect();
        counts.sort();
        counts
    };
    assert_eq!(counts(&device), [("add".to_owned(), 600), ("put".to_owned(), 1)]);
    let times = device.profile().unwrap();
    assert!(times.iter().all(|time| time.total_ns > 0 && time.program == "put"), "{times:?}");
    assert!(times.is_sorted_by(|a, b| a.total_ns >= b.total_ns), "{times:?}");
    // A launch runs, waits, or neither: clocks of host and device may drift a little.
    let accounted: u64 = times.iter().map(|time| time.total_ns + time.waited_ns).sum();
    assert!(accounted <= elapsed + elapsed / 50 + 1_000_000, "{accounted} of {elapsed} ns: {times:?}");
    device.reset_profile();
    assert_eq!(device.profile().unwrap(), []);
    // Not finished by hand: asking waits. A prepared launch counts for its kernel.
    let prepared = Launch::with_args(&put, &[Arg::Buffer(&b), Arg::U32(1)], &[1024], None).unwrap();
    device.enqueue(&prepared).unwrap();
    device.launch(&put, &[Arg::Buffer(&b), Arg::U32(1)], &[1024], None).unwrap();
    assert_eq!(counts(&device), [("put".to_owned(), 2)]);

    // What a launch does is counted, with the positions before its rows as far as it looks back.
    device.reset_profile();
    let work =
        Work { bytes: 100, operations: 7, bytes_a_position: 10, operations_a_position: 1, most_positions: 5 };
    let mut prepared = prepared.doing(work);
    for positions in [0, 3, 8] {
        prepared.behind(positions);
        device.enqueue(&prepared).unwrap();
    }
    let time = &device.profile().unwrap()[0];
    assert_eq!((time.launches, time.bytes, time.operations), (3, 300 + 30 + 50, 21 + 3 + 5));

    let plain = Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap();
    assert!(device.is_profiling() && !plain.is_profiling());
    let put = plain.program("put", SOURCE, "-D VALUE=0").unwrap().kernel("put").unwrap();
    let out = plain.alloc(Purpose::Scratch, 4).unwrap();
    plain.launch(&put, &[Arg::Buffer(&out), Arg::U32(1)], &[1], None).unwrap();
    plain.finish().unwrap();
    assert_eq!(plain.profile().unwrap(), []);
}
