//! Which device is taken, and what is said when none is. The environment is only changed for child processes: this
//! test's own program, started again for one test.
// The lint's exception for tests does not reach their helpers.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use axe::device::{Device, DeviceError, DeviceOptions, DeviceSelector, list_devices};

/// Names the part of a test that runs in the child.
const CHILD: &str = "AXE_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test `name` of this program in a process with another environment.
fn child(name: &str, change: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, "1");
    change(&mut command);
    command.output().unwrap()
}

fn assert_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_default_takes_the_device_that_the_list_marks() {
    let devices = list_devices(&DeviceSelector::default()).unwrap();
    let marked: Vec<_> = devices.iter().filter(|device| device.selected).collect();
    assert_eq!(marked.len(), 1, "{devices:?}");
    let device = Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap();
    assert_eq!(*device.info(), marked[0].info);
    let info = device.info();
    assert!(
        !info.name.is_empty() && !info.platform.is_empty() && info.version.starts_with("OpenCL"),
        "{info:?}"
    );
    assert!(info.compute_units > 0 && info.global_mem >= info.max_alloc && info.max_alloc > 0, "{info:?}");
    assert!(info.base_align.is_power_of_two(), "{info:?}");
}

#[test]
fn a_device_is_found_by_parts_of_its_names_in_any_case() {
    let any = Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap();
    let part = |text: &str| Some(text.chars().take(8).collect::<String>().to_uppercase());
    let selector = DeviceSelector {
        platform: part(&any.info().platform),
        kind: Some(any.info().kind),
        name: part(&any.info().name),
        pci: any.info().pci.clone(),
    };
    let named = Device::open(&selector, &DeviceOptions::default()).unwrap();
    assert_eq!(named.info(), any.info());
}

#[test]
fn a_selector_that_fits_nothing_lists_what_there_is() {
    let name = list_devices(&DeviceSelector::default()).unwrap().remove(0).info.name;
    for selector in [
        DeviceSelector { name: Some("no such card".into()), ..Default::default() },
        DeviceSelector { pci: Some("ffff:ff:1f.7".into()), ..Default::default() },
        DeviceSelector { platform: Some("no such platform".into()), ..Default::default() },
    ] {
        let error = Device::open(&selector, &DeviceOptions::default()).err().unwrap();
        assert!(matches!(error, DeviceError::NoMatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&name) && text.contains(&selector.to_string()), "{text}");
        assert!(list_devices(&selector).unwrap().iter().all(|device| !device.selected));
    }
}

#[test]
fn without_any_platform_the_error_says_what_to_do() {
    if is_child() {
        let error = Device::open(&DeviceSelector::default(), &DeviceOptions::default()).err().unwrap();
        assert!(matches!(error, DeviceError::NoPlatform { .. }), "{error}");
        let text = error.to_string();
        let parts =
            [std::env::var("OCL_ICD_VENDORS").unwrap(), "scripts/setup.sh".into(), "scripts/env.sh".into()];
        assert!(parts.iter().all(|part| text.contains(part.as_str())), "{text}");
        assert_eq!(list_devices(&DeviceSelector::default()).err().unwrap().to_string(), text);
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let output = child("without_any_platform_the_error_says_what_to_do", |command| {
        // A name without a slash at its end is taken for a file by some loaders.
        command.env("OCL_ICD_VENDORS", format!("{}/", empty.path().display()));
        // A simulator that is put before the program brings its own platform.
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    });
    assert_passed(&output);
}

#[test]
fn the_runtime_is_not_changed_in_a_process_with_threads() {
    if is_child() {
        // The test harness runs tests on a second thread.
        let error = axe::device::runtime::locate(Some(1)).unwrap_err().to_string();
        assert!(error.contains("one thread") && error.contains("POCL_MAX_PTHREAD_COUNT"), "{error}");
        return;
    }
    let output = child("the_runtime_is_not_changed_in_a_process_with_threads", |command| {
        for name in ["POCL_MAX_PTHREAD_COUNT", "AXE_OPENCL"] {
            command.env_remove(name);
        }
    });
    assert_passed(&output);
}
