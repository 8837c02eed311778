//! What judges the kernels that `scripts/test.sh offline` compiles can find each fault that it looks for. It reads what the
//! compiler once said of a narrow product and of kernels with faults, cut to what is read: tests/fixtures/offline.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod offline_support;

use axe::ops::XmxExpected;
use offline_support::disassembly::{Code, Loop};
use offline_support::{Found, kernels_of};

const INFO: &str = include_str!("fixtures/offline/product.ze_info");
const ASSEMBLY: &str = include_str!("fixtures/offline/product.asm");
const FAULTY: &str = include_str!("fixtures/offline/faulty.ze_info");
const GATHERS: &str = include_str!("fixtures/offline/gathers.asm");

/// What the launch of the recorded product counts on.
const PRODUCT: XmxExpected =
    XmxExpected { name: "narrow_1", registers: 256, local: 8192, multiply_adds: 4, scattered_loads: 0 };
/// And one of a kernel without products.
const PLAIN: XmxExpected =
    XmxExpected { name: "plain", registers: 128, local: 0, multiply_adds: 0, scattered_loads: 2 };

fn product(info: &str, assembly: &str) -> Found {
    let kernels = kernels_of(info);
    assert_eq!(kernels.len(), 1);
    Found::read(kernels[0].0, kernels[0].1, assembly)
}

/// Of the kernels with faults.
fn faults(name: &str, expected: &XmxExpected) -> Vec<String> {
    let kernels = kernels_of(FAULTY);
    let (name, info) = kernels.iter().find(|kernel| kernel.0 == name).unwrap();
    Found::read(name, info, GATHERS).faults(expected)
}

/// The recorded product with one text in place of another is found to have this fault, and no other.
fn fault_of(info: [&str; 2], assembly: [&str; 2], fault: &str) {
    assert!(INFO.contains(info[0]) && ASSEMBLY.contains(assembly[0]), "the recording has it");
    let found = product(&INFO.replace(info[0], info[1]), &ASSEMBLY.replace(assembly[0], assembly[1]));
    assert_eq!(found.faults(&PRODUCT), [format!("narrow_1: {fault}")]);
}

fn fault_of_info(from: &str, to: &str, fault: &str) {
    fault_of([from, to], ["", ""], fault);
}

fn fault_of_assembly(from: &str, to: &str, fault: &str) {
    fault_of(["", ""], [from, to], fault);
}

#[test]
fn a_kernel_as_it_is_meant_has_no_faults() {
    let found = product(INFO, ASSEMBLY);
    assert_eq!(found.faults(&PRODUCT), [""; 0]);
    assert_eq!((found.simd, found.registers, found.threads, found.local), (16, 256, 4, 8192));
}

#[test]
fn the_loop_of_a_product_is_found_and_counted() {
    let code = Code::of(ASSEMBLY);
    assert_eq!(code.loops.len(), 1);
    let inner = code.products().unwrap();
    assert_eq!(inner.multiply_adds, 4);
    // Eight registers of rows, and eight loads of four registers of weights; what is only asked for brings nothing.
    assert_eq!((inner.blocks, inner.load_bytes), (1, 64 * (8 + 8 * 4)));
    assert_eq!((inner.instructions, inner.loads, inner.slots), (91, 17, 87));
    assert_eq!(code.around(inner), None::<&Loop>);
}

#[test]
fn spilled_registers_are_a_fault() {
    assert!(faults("spills", &PLAIN).contains(&"spills: 9152 bytes of registers are spilled".to_owned()));
    let simd = "simd_size:       16";
    fault_of_info(simd, &format!("{simd}\n      spill_size:      64"), "64 bytes of registers are spilled");
}

#[test]
fn private_memory_is_a_fault() {
    assert!(faults("keeps", &PLAIN).contains(&"keeps: 65536 bytes of private memory".to_owned()));
    let simd = "simd_size:       16";
    fault_of_info(simd, &format!("{simd}\n      private_size:    128"), "128 bytes of private memory");
}

/// Whatever the compiler calls it: memory of a thread's own is memory that is written and read again.
#[test]
fn memory_for_each_thread_is_a_fault() {
    assert!(faults("spills", &PLAIN).contains(&"spills: 16384 bytes of memory for each thread".to_owned()));
    assert!(faults("keeps", &PLAIN).contains(&"keeps: 65536 bytes of memory for each thread".to_owned()));
}

#[test]
fn other_sub_groups_than_of_16_are_a_fault() {
    assert_eq!(faults("broad", &PLAIN), ["broad: 32 work-items a sub-group instead of 16"]);
    fault_of_info("simd_size:       16", "simd_size:       8", "8 work-items a sub-group instead of 16");
    fault_of_info("simd_size:       16", "lanes:           16", "0 work-items a sub-group instead of 16");
}

#[test]
fn more_registers_than_the_launch_expects_are_a_fault() {
    let less = XmxExpected { registers: 128, ..PRODUCT };
    let found = product(INFO, ASSEMBLY).faults(&less);
    assert_eq!(found, ["narrow_1: 256 registers a thread, the launch expects 128"]);
    // Nor is a kernel let through whose registers are not told.
    fault_of_info(
        "grf_count:       256",
        "registers:       256",
        "0 registers a thread, the launch expects 256",
    );
}

#[test]
fn other_local_memory_than_the_launch_expects_is_a_fault() {
    assert_eq!(faults("shares", &PLAIN), ["shares: 256 bytes of local memory, the launch expects 0"]);
    fault_of_info(
        "slm_size:        8192",
        "slm_size:        16384",
        "16384 bytes of local memory, the launch expects 8192",
    );
}

#[test]
fn scattered_loads_are_a_fault() {
    assert_eq!(faults("gathers", &PLAIN), [""; 0]);
    let none = XmxExpected { scattered_loads: 0, ..PLAIN };
    assert_eq!(faults("gathers", &none), ["gathers: 2 scattered loads, 0 are meant"]);
    // One load of 16 values in a row becomes 16 loads.
    fault_of_assembly(
        "r245     r4  null:0  0x0            0x0240F580           {I@3,$4} // wr:1+0, rd:4; load.ugm.d32x64t.a64",
        "r245     r4  null:0  0x0            0x04400580           {I@3,$4} // wr:4+0, rd:4; load.ugm.d32.a64",
        "1 scattered loads, 0 are meant",
    );
}

#[test]
fn rows_that_are_not_loaded_as_blocks_are_a_fault() {
    fault_of_assembly(
        "load_block2d.ugm.d16.a64",
        "load.ugm.d32x64t.a64",
        "no loads of two-dimensional blocks in the loop",
    );
}

#[test]
fn products_without_the_matrix_engine_are_a_fault() {
    let found = product(INFO, &ASSEMBLY.replace("dpas.8x8", "mad")).faults(&PRODUCT);
    assert_eq!(
        found,
        [
            "narrow_1: 0 matrix instructions in the innermost loop, 4 are meant",
            "narrow_1: no loads of two-dimensional blocks in the loop",
        ]
    );
    let dpas = "dpas.8x8 (16|M0)         r24:f         r24:f             r40:hf            r11.0:hf";
    fault_of_assembly(
        dpas,
        &dpas.replace("dpas.8x8", "mad"),
        "3 matrix instructions in the innermost loop, 4 are meant",
    );
}
