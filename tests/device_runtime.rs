//! `runtime::locate` from beginning to end: a copy of this program, in a project's folder, finds the project's own
//! runtime and the loader then reads it.
//!
//! It has a `main` of its own, since `locate` needs a process with one thread.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use axe::device::{DeviceSelector, list_devices, runtime};

/// Holds the worker limit in the copy; its being there tells that it is one.
const CHILD: &str = "AXE_TEST_CHILD";

fn main() -> ExitCode {
    match env::var(CHILD) {
        Ok(threads) => report(threads.parse().ok()),
        Err(_) => check(),
    }
}

/// What `main` of the daemon does, told on standard output.
fn report(threads: Option<usize>) -> ExitCode {
    match runtime::locate(threads) {
        Ok(located) => {
            println!("reason: {:?}", located.reason);
            println!("vendors: {:?}", env::var_os("OCL_ICD_VENDORS").unwrap_or_default());
            println!("workers: {:?}", env::var_os("POCL_MAX_PTHREAD_COUNT").unwrap_or_default());
            assert_eq!(runtime::locate(None).ok(), Some(located), "a second call answers as the first");
            let any = list_devices(&DeviceSelector::default()).map(|devices| devices.len());
            println!("devices: {:?}", any.map(|count| count > 0).ok());
        }
        Err(error) => println!("error: {error}"),
    }
    ExitCode::SUCCESS
}

/// Copies this program and the runtime of this machine to a project's folder and runs it there.
#[allow(clippy::unwrap_used)]
fn check() -> ExitCode {
    let root = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(root.path()).unwrap();
    let program = root.join("target/release/axed");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::copy(env::current_exe().unwrap(), &program).unwrap();
    let own = root.join(".axe/opencl/vendors");
    fs::create_dir_all(&own).unwrap();
    let here =
        env::var_os("OCL_ICD_VENDORS").map_or_else(|| PathBuf::from("/etc/OpenCL/vendors"), PathBuf::from);
    for entry in fs::read_dir(here).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), own.join(entry.file_name())).unwrap();
    }

    let asked = run(&program, "1", &[("AXE_OPENCL", "intel")]);
    expect(&asked, "reason: Asked");
    expect(&asked, &format!("vendors: {own:?}"));
    expect(&asked, "workers: \"1\"");
    expect(&asked, "devices: Some(true)");

    let named = run(&program, "none", &[("OCL_ICD_VENDORS", own.to_str().unwrap())]);
    expect(&named, "reason: Environment");
    expect(&named, "workers: \"\"");
    expect(&named, "devices: Some(true)");

    let kept = run(&program, "1", &[("AXE_OPENCL", "system"), ("POCL_MAX_PTHREAD_COUNT", "2")]);
    expect(&kept, "vendors: \"\"");
    expect(&kept, "workers: \"2\"");

    let unknown = run(&program, "1", &[("AXE_OPENCL", "cuda")]);
    expect(&unknown, "error: choosing the OpenCL runtime: AXE_OPENCL='cuda' is not known");
    println!("device_runtime: all as expected");
    ExitCode::SUCCESS
}

#[allow(clippy::unwrap_used)]
fn run(program: &Path, threads: &str, vars: &[(&str, &str)]) -> String {
    let mut command = Command::new(program);
    for name in ["AXE_OPENCL", "AXE_HOME", "OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "POCL_MAX_PTHREAD_COUNT"]
    {
        command.env_remove(name);
    }
    let output = command.env(CHILD, threads).envs(vars.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[track_caller]
fn expect(output: &str, line: &str) {
    assert!(output.lines().any(|at| at.starts_with(line)), "'{line}' is not in:\n{output}");
}
