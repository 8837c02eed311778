//! The device room on whatever platform this machine has: copies, fills, launches, mappings.
// The lint's exception for tests does not reach their helpers.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use axe::device::{Arg, Device, DeviceError, DeviceOptions, DeviceSelector, Launch, Purpose};

const SOURCE: &str = r"
__kernel void scale(__global const float *in, __global float *out, const float by, const uint n) {
    const size_t i = get_global_id(0);
    if (i < n) out[i] = in[i] * by;
}
__kernel void where(__global uint *out) {
    const size_t i = get_global_id(0) + get_global_size(0) * (get_global_id(1) + get_global_size(1) * get_global_id(2));
    out[i] = (uint)(get_global_id(0) + 100 * get_global_id(1) + 10000 * get_global_id(2));
}
__kernel void reverse(__global uint *data, __local uint *scratch) {
    const size_t l = get_local_id(0), n = get_local_size(0);
    scratch[l] = data[get_global_id(0)];
    barrier(CLK_LOCAL_MEM_FENCE);
    data[get_global_id(0)] = scratch[n - 1 - l];
}
__kernel void wide(__global ulong *out, const ulong a, const long b, const int c) {
    out[0] = a;
    out[1] = (ulong)b;
    out[2] = (ulong)(long)c;
}
";

fn open() -> Device {
    Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn read_all(device: &Device, buffer: &axe::device::Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.size()];
    device.read(buffer, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_come_back_as_they_were_written_at_odd_sizes_and_offsets() {
    let device = open();
    for size in [1, 3, 7, 63, 64, 65, 4096, 100_003] {
        let data: Vec<u8> = (0..size).map(|i| (i * 7 + size) as u8).collect();
        let buffer = device.alloc(Purpose::Scratch, size).unwrap();
        device.write(&buffer, 0, &data).unwrap();
        assert_eq!(read_all(&device, &buffer), data, "{size}");
        let (at, len) = (size / 3, size - size / 3 - size / 4);
        let mut part = vec![0; len];
        device.read(&buffer, at, &mut part).unwrap();
        assert_eq!(part, data[at..at + len], "{size}");
        device.write(&buffer, at, &vec![0xA5; len]).unwrap();
        let mut expected = data.clone();
        expected[at..at + len].fill(0xA5);
        assert_eq!(read_all(&device, &buffer), expected, "{size}");
    }
}

#[test]
fn a_fill_covers_every_byte_of_odd_sizes() {
    let device = open();
    for size in [1, 2, 3, 4, 5, 255, 1026, 70_001] {
        let buffer = device.alloc(Purpose::Scratch, size).unwrap();
        device.fill(&buffer, 0x0403_0201_u32.to_le()).unwrap();
        let expected: Vec<u8> = (0..size).map(|i| (i % 4) as u8 + 1).collect();
        assert_eq!(read_all(&device, &buffer), expected, "{size}");
    }
}

#[test]
fn ranges_over_the_end_are_refused_with_numbers() {
    let device = open();
    let buffer = device.alloc(Purpose::KvCache, 100).unwrap();
    let error = device.write(&buffer, 99, &[1, 2]).unwrap_err();
    assert_eq!(error.to_string(), "writing: bytes 99..101 of a kv_cache buffer of 100 bytes");
    assert!(matches!(device.read(&buffer, usize::MAX, &mut [0; 2]), Err(DeviceError::Range { .. })));
    assert!(matches!(device.with_mapped(&buffer, 50..101, |_| ()), Err(DeviceError::Range { .. })));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = device.with_mapped(&buffer, 50..10, |_| ());
    assert!(matches!(reversed, Err(DeviceError::Range { .. })));
    device.write(&buffer, 100, &[]).unwrap();
    assert_eq!(device.with_mapped(&buffer, 100..100, <[u8]>::len).unwrap(), 0);
}

#[test]
fn a_kernel_runs_with_its_arguments_in_order() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let scale = program.kernel("scale").unwrap();
    assert_eq!((scale.name(), scale.arg_count()), ("scale", 4));
    let n = 1001_usize;
    let input: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (a, b) =
        (device.alloc(Purpose::Scratch, n * 4).unwrap(), device.alloc(Purpose::Scratch, n * 4).unwrap());
    device.write(&a, 0, &input).unwrap();
    device.fill(&b, 0).unwrap();
    let args = |from, to| [Arg::Buffer(from), Arg::Buffer(to), Arg::F32(0.5), Arg::U32(n as u32)];
    // Two launches of one kernel object with other arguments: the queue keeps their order.
    device.launch(&scale, &args(&a, &b), &[n], None).unwrap();
    device.launch(&scale, &args(&b, &a), &[n.next_multiple_of(16)], Some(&[16])).unwrap();
    device.flush().unwrap();
    device.finish().unwrap();
    let expected: Vec<f32> = (0..n).map(|i| i as f32 * 0.25).collect();
    assert_eq!(floats(&read_all(&device, &a)), expected);
}

#[test]
fn work_sizes_have_up_to_three_dimensions() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("where").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 4 * 3 * 2 * 4).unwrap();
    device.launch(&kernel, &[Arg::Buffer(&buffer)], &[4, 3, 2], Some(&[2, 1, 1])).unwrap();
    let expected: Vec<u32> = (0..24).map(|i| i % 4 + 100 * (i / 4 % 3) + 10_000 * (i / 12)).collect();
    assert_eq!(words(&read_all(&device, &buffer)), expected);
}

#[test]
fn every_scalar_arrives_with_its_bits() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("wide").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 24).unwrap();
    let args = [Arg::Buffer(&buffer), Arg::U64(0x8877_6655_4433_2211), Arg::I64(-2), Arg::I32(-3)];
    device.launch(&kernel, &args, &[1], None).unwrap();
    let bytes = read_all(&device, &buffer);
    let numbers: Vec<u64> =
        bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, [0x8877_6655_4433_2211, -2_i64 as u64, -3_i64 as u64]);
}

#[test]
fn local_memory_is_given_by_size() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("reverse").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 32).unwrap();
    device.write(&buffer, 0, &(0..8_u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    device.launch(&kernel, &[Arg::Buffer(&buffer), Arg::Local(16)], &[8], Some(&[4])).unwrap();
    assert_eq!(words(&read_all(&device, &buffer)), [3, 2, 1, 0, 7, 6, 5, 4]);
}

#[test]
fn a_prepared_launch_keeps_what_is_not_changed_and_its_buffers() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let scale = program.kernel("scale").unwrap();
    let out = device.alloc(Purpose::Scratch, 16).unwrap();
    let mut launch = {
        let input = device.alloc(Purpose::Scratch, 16).unwrap();
        device
            .write(
                &input,
                0,
                &[1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>(),
            )
            .unwrap();
        Launch::with_args(
            &scale,
            &[Arg::Buffer(&input), Arg::Buffer(&out), Arg::F32(2.0), Arg::U32(4)],
            &[4],
            None,
        )
        .unwrap()
    };
    assert_eq!(device.memory().scratch, 32, "the launch keeps its input");
    // Launches of the kernel itself with other arguments do not disturb it.
    device
        .launch(&scale, &[Arg::Buffer(&out), Arg::Buffer(&out), Arg::F32(9.0), Arg::U32(0)], &[4], None)
        .unwrap();
    device.enqueue(&launch).unwrap();
    assert_eq!(floats(&read_all(&device, &out)), [2.0, 4.0, 6.0, 8.0]);
    launch.set(2, Arg::F32(-1.0)).unwrap();
    launch.resize(&[2], None).unwrap();
    device.enqueue(&launch).unwrap();
    assert_eq!(floats(&read_all(&device, &out)), [-1.0, -2.0, 6.0, 8.0]);
    drop(launch);
    assert_eq!(device.memory().scratch, 16);
}

#[test]
fn an_incomplete_prepared_launch_is_refused() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let scale = program.kernel("scale").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 16).unwrap();
    let mut launch = Launch::new(&scale, &[4], None).unwrap();
    launch.set(0, Arg::Buffer(&buffer)).unwrap();
    launch.set(2, Arg::F32(1.0)).unwrap();
    let error = device.enqueue(&launch).unwrap_err();
    assert_eq!(error.to_string(), "kernel 'scale': argument 1 was never set");
    assert!(matches!(launch.set(4, Arg::U32(1)), Err(DeviceError::BadArg { index: 4, .. })));
}

#[test]
fn wrong_arguments_are_refused_by_name_before_they_reach_the_runtime() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let scale = program.kernel("scale").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 16).unwrap();
    let few = device.launch(&scale, &[Arg::Buffer(&buffer)], &[4], None).unwrap_err();
    assert_eq!(few.to_string(), "kernel 'scale' takes 4 arguments, 1 were given");
    let good = [Arg::Buffer(&buffer), Arg::Buffer(&buffer), Arg::F32(1.0), Arg::U32(4)];
    let many: Vec<Arg<'_>> = good.iter().chain([&Arg::U32(0)]).copied().collect();
    assert!(matches!(device.launch(&scale, &many, &[4], None), Err(DeviceError::ArgCount { given: 5, .. })));
    for (index, bad) in [
        // As wide as a pointer: a runtime would take it for one.
        (0, Arg::U64(0x10)),
        (1, Arg::Local(64)),
        (2, Arg::U64(1)),
        (3, Arg::Buffer(&buffer)),
    ] {
        let mut args = good;
        args[index] = bad;
        let error = device.launch(&scale, &args, &[4], None).unwrap_err();
        assert!(
            matches!(&error, DeviceError::BadArg { kernel, index: at, .. } if kernel == "scale" && *at == index),
            "{index}: {error}"
        );
    }
    device.launch(&scale, &good, &[4], None).unwrap();
}

#[test]
fn wrong_work_sizes_are_refused_by_name() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("where").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 4096).unwrap();
    let launch = |global: &[usize], local: Option<&[usize]>| {
        device.launch(&kernel, &[Arg::Buffer(&buffer)], global, local).unwrap_err()
    };
    for (global, local) in [
        (&[][..], None),
        (&[1, 1, 1, 1], None),
        (&[4, 0], None),
        (&[4], Some(&[0][..])),
        (&[4, 4], Some(&[2])),
    ] {
        let error = launch(global, local);
        assert!(matches!(&error, DeviceError::WorkSize { kernel, .. } if kernel == "where"), "{error}");
    }
    // A group larger than any device has.
    let error = launch(&[1 << 20], Some(&[1 << 20]));
    assert!(matches!(&error, DeviceError::Launch { kernel, .. } if kernel == "where"), "{error}");
    assert!(error.to_string().contains("CL_INVALID_WORK_"), "{error}");
}

#[test]
fn mapped_memory_is_what_kernels_wrote_and_keeps_what_the_host_writes() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("where").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 64).unwrap();
    device.launch(&kernel, &[Arg::Buffer(&buffer)], &[16], None).unwrap();
    let seen = device.with_mapped(&buffer, 8..20, words).unwrap();
    assert_eq!(seen, [2, 3, 4]);
    device
        .map_write(&buffer, 4..12, |bytes| {
            assert_eq!(words(bytes), [1, 2]);
            bytes[4..].copy_from_slice(&77_u32.to_le_bytes());
        })
        .unwrap();
    assert_eq!(words(&read_all(&device, &buffer))[..4], [0, 1, 77, 3]);
}

#[test]
fn no_work_is_taken_while_memory_is_mapped() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("where").unwrap();
    let buffer = device.alloc(Purpose::Scratch, 64).unwrap();
    device.fill(&buffer, 5).unwrap();
    let mapped = |result: Result<(), DeviceError>| matches!(result, Err(DeviceError::Mapped { .. }));
    device
        .with_mapped(&buffer, 0..64, |outer| {
            assert!(mapped(device.launch(&kernel, &[Arg::Buffer(&buffer)], &[16], None)));
            assert!(mapped(device.write(&buffer, 0, &[1])));
            assert!(mapped(device.fill(&buffer, 1)));
            assert!(mapped(device.map_write(&buffer, 0..1, |_| ())));
            // To look twice is harmless.
            assert_eq!(device.with_mapped(&buffer, 0..64, <[u8]>::to_vec).unwrap(), outer);
        })
        .unwrap();
    device
        .map_write(&buffer, 0..64, |_| {
            assert!(mapped(device.read(&buffer, 0, &mut [0])));
            assert!(mapped(device.with_mapped(&buffer, 0..1, |_| ())));
        })
        .unwrap();
    device.launch(&kernel, &[Arg::Buffer(&buffer)], &[16], None).unwrap();
    device.finish().unwrap();
}

#[test]
fn a_panic_in_a_mapping_closure_leaves_the_device_usable() {
    let device = open();
    let buffer = device.alloc(Purpose::Scratch, 64).unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = device.map_write(&buffer, 0..64, |_| panic!("on purpose"));
    }));
    assert!(caught.is_err());
    device.write(&buffer, 0, &[1; 64]).unwrap();
    assert_eq!(read_all(&device, &buffer), [1; 64]);
}

#[test]
fn handles_of_one_device_are_refused_by_another() {
    let (one, two) = (open(), open());
    let buffer = one.alloc(Purpose::Scratch, 64).unwrap();
    let kernel = one.program("basics", SOURCE, "").unwrap().kernel("where").unwrap();
    let foreign = |result: Result<(), DeviceError>| matches!(result, Err(DeviceError::Foreign { .. }));
    assert!(foreign(two.write(&buffer, 0, &[1])));
    assert!(foreign(two.read(&buffer, 0, &mut [1])));
    assert!(foreign(two.launch(&kernel, &[Arg::Buffer(&buffer)], &[16], None)));
    let its_own = two.program("basics", SOURCE, "").unwrap().kernel("where").unwrap();
    assert!(foreign(two.launch(&its_own, &[Arg::Buffer(&buffer)], &[16], None)));
}

#[test]
fn handles_may_outlive_the_device() {
    let device = open();
    let program = device.program("basics", SOURCE, "").unwrap();
    let kernel = program.kernel("where").unwrap();
    let owner: Arc<Vec<u8>> = Arc::new(vec![7; 4096]);
    let wrapped = device.wrap(Purpose::Weights, owner, 0..4096).unwrap();
    drop(device);
    drop(program);
    drop(wrapped);
    assert_eq!(kernel.name(), "where");
}
