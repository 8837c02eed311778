//! Which devices there are and which one is taken.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use opencl3::device::{self as cl, Device as ClDevice};
use opencl3::error_codes::CL_PLATFORM_NOT_FOUND_KHR;
use opencl3::platform::{Platform, get_platforms};
use opencl3::types::cl_device_id;
use serde::Serialize;

use super::error::{ClCode, DeviceError};
use super::runtime;

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Runs on the host's processor, in host memory.
    Cpu,
    /// A graphics card, discrete or not.
    Gpu,
    /// Anything else.
    Accelerator,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Accelerator => "accelerator",
        })
    }
}

impl std::str::FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            "accelerator" => Ok(Self::Accelerator),
            other => Err(format!("'{other}' is no device kind: use cpu, gpu or accelerator")),
        }
    }
}

/// What a device says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// Name of its platform.
    pub platform: String,
    /// Version of its platform.
    pub platform_version: String,
    /// Name of the device.
    pub name: String,
    /// Who made it.
    pub vendor: String,
    /// OpenCL version of the device.
    pub version: String,
    /// Version of the driver or runtime.
    pub driver_version: String,
    /// Newest OpenCL C version.
    pub opencl_c_version: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Compute units: cores of a CPU, Xe cores or similar of a GPU.
    pub compute_units: u32,
    /// f32 values in a vector register as the device's compiler sees it.
    pub native_float_width: u32,
    /// Bytes of memory.
    pub global_mem: u64,
    /// Bytes one buffer may have.
    pub max_alloc: u64,
    /// Bytes of local memory of a work-group.
    pub local_mem: u64,
    /// Work-items of a work-group.
    pub max_work_group: usize,
    /// True where device and host share one memory.
    pub unified_memory: bool,
    /// Bytes a host address must be aligned to for zero copy.
    pub base_align: usize,
    /// PCI address like `0000:03:00.0`, where the driver tells it.
    pub pci: Option<String>,
    /// Names of all extensions.
    pub extensions: Vec<String>,
}

impl DeviceInfo {
    /// True if the device lists the extension.
    pub fn has_extension(&self, name: &str) -> bool {
        self.extensions.iter().any(|extension| extension == name)
    }

    /// True for Intel's own runtimes.
    pub fn is_intel(&self) -> bool {
        self.platform.starts_with("Intel(R) OpenCL")
    }

    /// True for Portable Computing Language, which differs from other CPU runtimes in speed.
    pub fn is_pocl(&self) -> bool {
        self.platform.contains("Portable Computing Language")
    }

    /// Whether kernels may hold the host's instructions for vectors of 512 bits (AVX-512 F) as inline assembly: the device is
    /// the host's processor, which has them and whose compiler makes use of them, and is known to pass assembly on.
    pub fn takes_avx512(&self) -> bool {
        self.kind == DeviceKind::Cpu
            && (self.is_intel() || self.is_pocl())
            && self.native_float_width >= 16
            && host_has_avx512()
    }

    /// Whether kernels may hold the host's instructions for products of bytes (AVX-512 VNNI) and for moving bytes between
    /// vectors (VBMI), as inline assembly.
    pub fn takes_byte_products(&self) -> bool {
        self.takes_avx512() && host_has_byte_products()
    }

    /// Whether kernels may find memory by its address: for Intel's runtime a buffer is memory of this process, which lies
    /// where it lies from first to last, and which kernels of 64 bits work on as it is. It is so for PoCL, too, whose
    /// compiler takes minutes for programs of as many kernels.
    pub fn finds_by_address(&self) -> bool {
        self.kind == DeviceKind::Cpu && self.is_intel() && size_of::<usize>() == 8
    }

    /// Whether kernels may hold the instruction for loops that wait: the device is the host's processor, of a kind that
    /// always has it, and its compiler is known to pass assembly on.
    pub fn takes_pause(&self) -> bool {
        cfg!(target_arch = "x86_64") && self.kind == DeviceKind::Cpu && (self.is_intel() || self.is_pocl())
    }
}

#[cfg(target_arch = "x86_64")]
fn host_has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(target_arch = "x86_64")]
fn host_has_byte_products() -> bool {
    std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vnni")
        && std::arch::is_x86_feature_detected!("avx512vbmi")
}

#[cfg(not(target_arch = "x86_64"))]
fn host_has_avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn host_has_byte_products() -> bool {
    false
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} '{}' on platform '{}'", self.kind, self.name, self.platform)?;
        if let Some(pci) = &self.pci {
            write!(f, " at {pci}")?;
        }
        Ok(())
    }
}

/// What the configuration asks for. Every given field must fit; texts are matched as substrings, in any case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceSelector {
    /// Part of the platform's name.
    pub platform: Option<String>,
    /// Kind of device.
    pub kind: Option<DeviceKind>,
    /// Part of the device's name.
    pub name: Option<String>,
    /// PCI address, `0000:03:00.0` or `03:00.0`.
    pub pci: Option<String>,
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(platform) = &self.platform {
            parts.push(format!("platform '{platform}'"));
        }
        if let Some(kind) = self.kind {
            parts.push(format!("kind '{kind}'"));
        }
        if let Some(name) = &self.name {
            parts.push(format!("name '{name}'"));
        }
        if let Some(pci) = &self.pci {
            parts.push(format!("pci '{pci}'"));
        }
        if parts.is_empty() { f.write_str("any device") } else { f.write_str(&parts.join(", ")) }
    }
}

impl DeviceSelector {
    /// True if the device is what is asked for.
    fn fits(&self, info: &DeviceInfo) -> bool {
        let contains = |part: &Option<String>, text: &str| {
            part.as_ref().is_none_or(|part| text.to_lowercase().contains(&part.to_lowercase()))
        };
        contains(&self.platform, &info.platform)
            && contains(&self.name, &info.name)
            && self.kind.is_none_or(|kind| kind == info.kind)
            && self.pci.as_ref().is_none_or(|pci| info.pci.as_ref().is_some_and(|has| same_pci(pci, has)))
    }
}

/// Compares PCI addresses, with or without the domain 0000.
fn same_pci(left: &str, right: &str) -> bool {
    let full = |text: &str| {
        let text = text.trim().to_ascii_lowercase();
        if text.matches(':').count() == 1 { format!("0000:{text}") } else { text }
    };
    full(left) == full(right)
}

/// The order in which devices are taken: GPUs first, then other accelerators, CPUs last, PoCL last of these.
fn rank(info: &DeviceInfo) -> u8 {
    match info.kind {
        DeviceKind::Gpu => 0,
        DeviceKind::Accelerator => 1,
        DeviceKind::Cpu if !info.is_pocl() => 2,
        DeviceKind::Cpu => 3,
    }
}

/// Emulators of FPGA boards list themselves as accelerators; they run everything far slower than the CPU they use.
fn is_emulator(info: &DeviceInfo) -> bool {
    [&info.platform, &info.name].iter().any(|text| text.to_lowercase().contains("fpga"))
}

/// Position of the device to take, the first of the lowest rank, and how many fit.
fn choose<'a>(
    selector: &DeviceSelector,
    infos: impl Iterator<Item = &'a DeviceInfo>,
) -> (Option<usize>, usize) {
    let mut best: Option<(u8, usize)> = None;
    let mut fitting = 0;
    for (at, info) in infos.enumerate() {
        if is_emulator(info) || !selector.fits(info) {
            continue;
        }
        fitting += 1;
        if best.is_none_or(|(lowest, _)| rank(info) < lowest) {
            best = Some((rank(info), at));
        }
    }
    (best.map(|(_, at)| at), fitting)
}

/// A device with the handle to open it by.
pub(super) struct Found {
    pub(super) id: cl_device_id,
    pub(super) info: DeviceInfo,
}

/// A device as `axed devices` shows it.
#[derive(Debug, Clone, Serialize)]
pub struct ListedDevice {
    /// What it says about itself.
    pub info: DeviceInfo,
    /// True for the one that the selector takes.
    pub selected: bool,
}

/// All devices of all platforms, with the one marked that `selector` takes. Empty when there is no platform.
///
/// # Errors
/// [`DeviceError::Query`] if the loader or a device does not answer.
pub fn list_devices(selector: &DeviceSelector) -> Result<Vec<ListedDevice>, DeviceError> {
    let found = find_all()?;
    if found.is_empty() {
        return Err(no_platform());
    }
    let (taken, _) = choose(&with_preference(selector), found.iter().map(|found| &found.info));
    Ok(found
        .into_iter()
        .enumerate()
        .map(|(at, found)| ListedDevice { info: found.info, selected: taken == Some(at) })
        .collect())
}

fn no_platform() -> DeviceError {
    let folder = runtime::vendor_folder();
    DeviceError::NoPlatform { looked: folder.display().to_string(), broken: runtime::broken_icds(&folder) }
}

/// The device that the selector takes.
pub(super) fn select(selector: &DeviceSelector) -> Result<Found, DeviceError> {
    let selector = with_preference(selector);
    let mut found = find_all()?;
    if found.is_empty() {
        return Err(no_platform());
    }
    let (taken, fitting) = choose(&selector, found.iter().map(|found| &found.info));
    let Some(taken) = taken else {
        let all: Vec<String> = found.iter().map(|found| found.info.to_string()).collect();
        return Err(DeviceError::NoMatch { wanted: selector.to_string(), found: all.join("; ") });
    };
    let found = found.swap_remove(taken);
    if fitting > 1 {
        tracing::info!(fitting, taken = %found.info, wanted = %selector, "several OpenCL devices fit, one is taken");
    }
    Ok(found)
}

/// The runtime chosen by `AXE_OPENCL` narrows a selector that names no platform.
fn with_preference(selector: &DeviceSelector) -> DeviceSelector {
    let mut selector = selector.clone();
    if selector.platform.is_none() {
        selector.platform = runtime::preferred_platform().map(str::to_owned);
    }
    selector
}

/// Every device of every platform. A platform that does not answer is left out with a warning: another may serve.
fn find_all() -> Result<Vec<Found>, DeviceError> {
    // The loader and PoCL initialise themselves on the first query, and answer that there is nothing to a second
    // thread that asks meanwhile.
    static FIRST_QUERY: Mutex<()> = Mutex::new(());
    let _turn = FIRST_QUERY.lock().unwrap_or_else(PoisonError::into_inner);
    let platforms = match get_platforms() {
        Ok(platforms) => platforms,
        Err(error) if error.0 == CL_PLATFORM_NOT_FOUND_KHR => Vec::new(),
        Err(error) => return Err(DeviceError::Query { what: "its platforms".into(), code: ClCode(error.0) }),
    };
    let mut all = Vec::new();
    for platform in platforms {
        match devices_of(&platform) {
            Ok(devices) => all.extend(devices),
            Err(error) => tracing::warn!(%error, "an OpenCL platform does not answer"),
        }
    }
    Ok(all)
}

fn devices_of(platform: &Platform) -> Result<Vec<Found>, DeviceError> {
    let ask = |what: &str, answer: opencl3::Result<String>| {
        answer.map_err(|error| DeviceError::Query { what: what.into(), code: ClCode(error.0) })
    };
    let name = ask("a platform's name", platform.name())?;
    let version = ask("a platform's version", platform.version())?;
    let ids = platform.get_devices(cl::CL_DEVICE_TYPE_ALL).map_err(|error| DeviceError::Query {
        what: format!("the devices of platform '{name}'"),
        code: ClCode(error.0),
    })?;
    ids.into_iter().map(|id| Ok(Found { id, info: describe(id, &name, &version)? })).collect()
}

fn describe(id: cl_device_id, platform: &str, platform_version: &str) -> Result<DeviceInfo, DeviceError> {
    let device = ClDevice::new(id);
    let failed = |what: &'static str| {
        move |error: opencl3::error_codes::ClError| DeviceError::Query {
            what: format!("a device's {what}"),
            code: ClCode(error.0),
        }
    };
    let bits = device.dev_type().map_err(failed("type"))?;
    let kind = if bits & cl::CL_DEVICE_TYPE_GPU != 0 {
        DeviceKind::Gpu
    } else if bits & cl::CL_DEVICE_TYPE_CPU != 0 {
        DeviceKind::Cpu
    } else {
        DeviceKind::Accelerator
    };
    let extensions = device.extensions().map_err(failed("extensions"))?;
    let extensions: Vec<String> = extensions.split_whitespace().map(str::to_owned).collect();
    let pci = pci_address(id, &extensions);
    let align_bits = device.mem_base_addr_align().map_err(failed("address alignment"))?;
    Ok(DeviceInfo {
        platform: platform.trim().to_owned(),
        platform_version: platform_version.trim().to_owned(),
        name: device.name().map_err(failed("name"))?.trim().to_owned(),
        vendor: device.vendor().map_err(failed("vendor"))?.trim().to_owned(),
        version: device.version().map_err(failed("version"))?.trim().to_owned(),
        driver_version: device.driver_version().map_err(failed("driver version"))?.trim().to_owned(),
        opencl_c_version: device.opencl_c_version().map_err(failed("OpenCL C version"))?.trim().to_owned(),
        kind,
        native_float_width: device.native_vector_width_float().map_err(failed("vector width"))?,
        compute_units: device.max_compute_units().map_err(failed("compute units"))?,
        global_mem: device.global_mem_size().map_err(failed("memory size"))?,
        max_alloc: device.max_mem_alloc_size().map_err(failed("largest allocation"))?,
        local_mem: device.local_mem_size().map_err(failed("local memory"))?,
        max_work_group: device.max_work_group_size().map_err(failed("work-group size"))?,
        unified_memory: device.host_unified_memory().map_err(failed("kind of memory"))?,
        base_align: usize::try_from(align_bits / 8).unwrap_or(4096).max(64),
        pci,
        extensions,
    })
}

/// Reads the PCI address by `cl_khr_pci_bus_info`, where the device has that. It is optional, so any failure just
/// means that the address is not known.
fn pci_address(id: cl_device_id, extensions: &[String]) -> Option<String> {
    if !extensions.iter().any(|extension| extension == "cl_khr_pci_bus_info") {
        return None;
    }
    let bytes = cl::get_device_data(id, cl::CL_DEVICE_PCI_BUS_INFO_KHR).ok()?;
    // Four 32-bit numbers: domain, bus, device, function.
    let numbers: Vec<u32> =
        bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
    match numbers.as_slice() {
        [domain, bus, device, function] => Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: DeviceKind, platform: &str, name: &str, pci: Option<&str>) -> DeviceInfo {
        DeviceInfo {
            platform: platform.into(),
            platform_version: "OpenCL 3.0".into(),
            name: name.into(),
            vendor: "v".into(),
            version: "OpenCL 3.0".into(),
            driver_version: "1".into(),
            opencl_c_version: "OpenCL C 1.2".into(),
            kind,
            native_float_width: 8,
            compute_units: 1,
            global_mem: 1,
            max_alloc: 1,
            local_mem: 1,
            max_work_group: 1,
            unified_memory: true,
            base_align: 128,
            pci: pci.map(str::to_owned),
            extensions: Vec::new(),
        }
    }

    fn machine() -> Vec<DeviceInfo> {
        vec![
            device(DeviceKind::Accelerator, "Intel(R) FPGA Emulation Platform", "Emulation Device", None),
            device(DeviceKind::Cpu, "Portable Computing Language", "pthread-skylake", None),
            device(DeviceKind::Cpu, "Intel(R) OpenCL", "Intel(R) Xeon(R)", None),
            device(DeviceKind::Gpu, "Intel(R) OpenCL Graphics", "Arc Pro B70", Some("0000:03:00.0")),
            device(DeviceKind::Gpu, "Intel(R) OpenCL Graphics", "Arc A380", Some("0000:07:00.0")),
        ]
    }

    fn taken(selector: DeviceSelector) -> Option<usize> {
        choose(&selector, machine().iter()).0
    }

    #[test]
    fn a_gpu_comes_before_a_cpu_and_the_first_of_equals_wins() {
        assert_eq!(taken(DeviceSelector::default()), Some(3));
        assert_eq!(choose(&DeviceSelector::default(), machine().iter()).1, 4);
    }

    #[test]
    fn intel_comes_before_pocl_whatever_the_order() {
        let cpu = DeviceSelector { kind: Some(DeviceKind::Cpu), ..Default::default() };
        assert_eq!(taken(cpu), Some(2));
    }

    #[test]
    fn an_fpga_emulator_is_never_taken() {
        let named = DeviceSelector { kind: Some(DeviceKind::Accelerator), ..Default::default() };
        assert_eq!(taken(named), None);
        let named = DeviceSelector { platform: Some("FPGA".into()), ..Default::default() };
        assert_eq!(taken(named), None);
    }

    #[test]
    fn texts_match_in_part_and_in_any_case_and_all_must_fit() {
        let by_name = DeviceSelector { name: Some("a380".into()), ..Default::default() };
        assert_eq!(taken(by_name.clone()), Some(4));
        let both = DeviceSelector { platform: Some("portable".into()), ..by_name };
        assert_eq!(taken(both), None);
        let pocl = DeviceSelector { platform: Some("PORTABLE".into()), ..Default::default() };
        assert_eq!(taken(pocl), Some(1));
    }

    #[test]
    fn a_pci_address_matches_with_and_without_its_domain() {
        for pci in ["0000:07:00.0", "07:00.0"] {
            let selector = DeviceSelector { pci: Some(pci.into()), ..Default::default() };
            assert_eq!(taken(selector), Some(4), "{pci}");
        }
        let other = DeviceSelector { pci: Some("0001:07:00.0".into()), ..Default::default() };
        assert_eq!(taken(other), None);
    }

    #[test]
    fn kinds_parse_in_any_case_and_say_what_is_allowed() {
        assert_eq!("GPU".parse(), Ok(DeviceKind::Gpu));
        assert!("tpu".parse::<DeviceKind>().is_err_and(|error| error.contains("cpu, gpu or accelerator")));
    }
}
