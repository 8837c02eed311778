//! Where the OpenCL runtime is taken from, decided once, before the loader looks.
//!
//! The loader reads its environment at the first OpenCL call and never again, so "no platform shows" cannot be seen
//! first and repaired afterwards. [`locate`] therefore looks at the files the loader would read.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::error::DeviceError;

/// Where loaders look when nobody tells them otherwise.
const SYSTEM_VENDORS: &str = "/etc/OpenCL/vendors";
/// The folder that `scripts/setup.sh` fills, below the project's root.
const PROJECT_VENDORS: &str = ".axe/opencl/vendors";
/// Where packages put the same.
const INSTALLED_VENDORS: [&str; 2] = ["/usr/lib/axe/opencl/vendors", "/opt/axe/opencl/vendors"];
/// Part of the names of Intel's platforms.
const INTEL: &str = "Intel";
/// Part of the name of PoCL's platform.
const POCL: &str = "Portable Computing Language";

/// The one thing this room keeps for the whole process: the loader does so, too.
static LOCATED: OnceLock<Located> = OnceLock::new();

/// Which runtime the process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The vendor folder the loader was pointed to; none: it was left alone.
    pub vendors: Option<PathBuf>,
    /// Part of the name of the platform to take when the configuration names none.
    pub platform: Option<&'static str>,
    /// Why, for the log.
    pub reason: Reason,
}

/// Why a runtime was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// `AXE_OPENCL` says so.
    Asked,
    /// The environment already points the loader to a folder.
    Environment,
    /// The system has a runtime that can be used.
    System,
    /// The system has none, the project has its own.
    Project,
    /// There is none anywhere.
    Nothing,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "AXE_OPENCL asks for it",
            Self::Environment => "the environment names a vendor folder",
            Self::System => "the system has a runtime",
            Self::Project => "the system has no runtime, the project has its own",
            Self::Nothing => "there is no runtime anywhere",
        })
    }
}

/// Chooses the OpenCL runtime and tells the loader. To be called first thing in `main`, while the process has one
/// thread; a later call changes nothing and answers as the first.
///
/// `AXE_OPENCL` decides: `intel` takes the project's own runtime, `pocl` the system's PoCL, `system` whatever the
/// loader finds. Without it the project's own runtime is taken where the system has no usable one. `threads` limits
/// the workers of CPU runtimes unless their own variables do already.
///
/// # Errors
/// [`DeviceError::Runtime`] if `AXE_OPENCL` is none of these, if it asks for a runtime that is not there, or if the
/// process has several threads already and its environment would have to be changed.
pub fn locate(threads: Option<usize>) -> Result<&'static Located, DeviceError> {
    if let Some(located) = LOCATED.get() {
        return Ok(located);
    }
    let located = decide(&Surroundings::of_process())?;
    let mut changes: Vec<(&str, OsString)> = Vec::new();
    if let Some(vendors) = &located.vendors {
        changes.push(("OCL_ICD_VENDORS", vendors.clone().into_os_string()));
    }
    if let Some(threads) = threads {
        // PoCL up to 5, PoCL since, Intel; each ignores the others' names.
        for name in ["POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT", "CL_CONFIG_CPU_TBB_NUM_WORKERS"] {
            if env::var_os(name).is_none() {
                changes.push((name, threads.max(1).to_string().into()));
            }
        }
    }
    change_environment(&changes)?;
    tracing::debug!(vendors = ?located.vendors, platform = ?located.platform, reason = %located.reason, "OpenCL runtime");
    Ok(LOCATED.get_or_init(|| located))
}

/// Sets variables, if that is safe.
#[allow(unsafe_code)]
fn change_environment(changes: &[(&str, OsString)]) -> Result<(), DeviceError> {
    if changes.is_empty() {
        return Ok(());
    }
    let threads = fs::read_dir("/proc/self/task").map(Iterator::count);
    if !matches!(threads, Ok(1)) {
        return Err(DeviceError::Runtime(format!(
            "{} would have to be set, which is only safe while the process has one thread (it has {}); set it before \
             the start, or source scripts/env.sh",
            changes.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
            threads.map_or_else(|error| format!("an unknown number: {error}"), |count| count.to_string()),
        )));
    }
    for (name, value) in changes {
        // SAFETY: this is the only thread of the process, as was just counted, so nobody reads the environment.
        unsafe { env::set_var(name, value) };
    }
    Ok(())
}

/// The vendor folder the loader reads.
pub fn vendor_folder() -> PathBuf {
    named_vendors().map_or_else(|| PathBuf::from(SYSTEM_VENDORS), PathBuf::from)
}

/// The platform that `AXE_OPENCL` asks for.
pub(super) fn preferred_platform() -> Option<&'static str> {
    LOCATED.get().and_then(|located| located.platform)
}

/// What the environment tells the loaders of Khronos and Debian.
fn named_vendors() -> Option<OsString> {
    ["OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"].iter().find_map(env::var_os).filter(|value| !value.is_empty())
}

/// All that the decision depends on.
struct Surroundings {
    /// `AXE_OPENCL`.
    asked: Option<String>,
    /// The environment names a vendor folder.
    named: bool,
    /// The system's folder has a runtime that can be loaded.
    system_usable: bool,
    /// Folders where the project's own runtime may be, best first.
    own: Vec<PathBuf>,
}

impl Surroundings {
    fn of_process() -> Self {
        Self {
            asked: env::var("AXE_OPENCL").ok().filter(|value| !value.is_empty()),
            named: named_vendors().is_some(),
            system_usable: has_usable_icd(Path::new(SYSTEM_VENDORS)),
            own: own_folders(env::current_exe().ok().as_deref(), env::var_os("AXE_HOME").map(PathBuf::from)),
        }
    }

    fn own_runtime(&self) -> Option<PathBuf> {
        self.own.iter().find(|folder| is_trusted(folder) && has_usable_icd(folder)).cloned()
    }

    fn looked(&self) -> String {
        self.own.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
    }
}

fn decide(around: &Surroundings) -> Result<Located, DeviceError> {
    match around.asked.as_deref() {
        Some("intel") => match around.own_runtime() {
            Some(own) => Ok(Located { vendors: Some(own), platform: Some(INTEL), reason: Reason::Asked }),
            // A runtime of Intel's may also be the system's, or be named by scripts/env.sh.
            None if around.named || around.system_usable => {
                Ok(Located { vendors: None, platform: Some(INTEL), reason: Reason::Asked })
            }
            None => Err(DeviceError::Runtime(format!(
                "AXE_OPENCL=intel, but there is no runtime in {}: run scripts/setup.sh",
                around.looked()
            ))),
        },
        Some("pocl") => {
            let vendors = Some(PathBuf::from(SYSTEM_VENDORS));
            Ok(Located { vendors, platform: Some(POCL), reason: Reason::Asked })
        }
        Some("system") => Ok(Located { vendors: None, platform: None, reason: Reason::Asked }),
        Some(other) => {
            Err(DeviceError::Runtime(format!("AXE_OPENCL='{other}' is not known: use intel, pocl or system")))
        }
        None if around.named => Ok(Located { vendors: None, platform: None, reason: Reason::Environment }),
        None if around.system_usable => Ok(Located { vendors: None, platform: None, reason: Reason::System }),
        None => {
            let vendors = around.own_runtime();
            let reason = if vendors.is_some() { Reason::Project } else { Reason::Nothing };
            Ok(Located { vendors, platform: None, reason })
        }
    }
}

/// From the program's folder upward (a build lies in `target/release` of its project), then `AXE_HOME`, then where
/// packages install.
fn own_folders(program: Option<&Path>, home: Option<PathBuf>) -> Vec<PathBuf> {
    let program = program.map(|path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()));
    let above =
        program.iter().flat_map(|path| path.ancestors().skip(1).map(|folder| folder.join(PROJECT_VENDORS)));
    let home = home.map(|home| home.join(PROJECT_VENDORS));
    above.chain(home).chain(INSTALLED_VENDORS.iter().map(PathBuf::from)).collect()
}

/// True if a folder belongs to this user or to root and nobody else may write it: what lies in it is loaded as code.
fn is_trusted(folder: &Path) -> bool {
    let me = nix::unistd::geteuid().as_raw();
    fs::metadata(folder)
        .is_ok_and(|meta| meta.is_dir() && (meta.uid() == 0 || meta.uid() == me) && meta.mode() & 0o002 == 0)
}

/// The libraries that a vendor folder names, by the files that name them.
fn named_libraries(folder: &Path) -> Vec<(PathBuf, String)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let icds = entries.flatten().map(|entry| entry.path());
    icds.filter(|path| path.extension().is_some_and(|extension| extension == "icd"))
        .filter_map(|path| {
            let text = fs::read_to_string(&path).ok()?;
            Some((path, text.lines().next().unwrap_or_default().trim().to_owned()))
        })
        .collect()
}

/// True if a vendor folder names at least one library that is there.
fn has_usable_icd(folder: &Path) -> bool {
    named_libraries(folder).iter().any(|(_, library)| library_exists(library))
}

/// What names a library that is not there, in words.
pub(super) fn broken_icds(folder: &Path) -> Vec<String> {
    let named = named_libraries(folder).into_iter().filter(|(_, library)| !library_exists(library));
    named.map(|(icd, library)| format!("{} names {library:?}, which is not there", icd.display())).collect()
}

/// True if the dynamic linker would find the library. It is not loaded for that: some runtimes start threads then.
fn library_exists(library: &str) -> bool {
    if library.is_empty() {
        return false;
    }
    if library.contains('/') {
        return Path::new(library).is_file();
    }
    let named = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    if env::split_paths(&named).any(|folder| !folder.as_os_str().is_empty() && folder.join(library).is_file())
    {
        return true;
    }
    // The folders that Debian's and other linkers have built in.
    let debian = format!("{}-linux-gnu", env::consts::ARCH);
    let folders = ["/lib", "/usr/lib", "/lib64", "/usr/lib64"].map(PathBuf::from);
    if folders
        .iter()
        .any(|folder| folder.join(library).is_file() || folder.join(&debian).join(library).is_file())
    {
        return true;
    }
    // Then its cache: a table over zero-terminated texts, the paths of all libraries it knows, whose names are the ends
    // of these.
    fs::read("/etc/ld.so.cache").is_ok_and(|cache| {
        cache
            .split(|byte| *byte == 0)
            .any(|text| text.rsplit(|byte| *byte == b'/').next() == Some(library.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A project's root with a runtime in it, whose library is a file of that name.
    fn project(library_is_there: bool) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let vendors = dir.path().join(PROJECT_VENDORS);
        fs::create_dir_all(&vendors).unwrap();
        let library = dir.path().join("libruntime.so");
        if library_is_there {
            fs::write(&library, b"").unwrap();
        }
        fs::write(vendors.join("own.icd"), format!("{}\n", library.display())).unwrap();
        (dir, vendors)
    }

    fn around(asked: Option<&str>, named: bool, system_usable: bool, own: &Path) -> Surroundings {
        Surroundings { asked: asked.map(str::to_owned), named, system_usable, own: vec![own.to_owned()] }
    }

    #[test]
    fn without_a_wish_the_projects_runtime_only_fills_a_gap() {
        let (_dir, own) = project(true);
        let reason = |named, usable| decide(&around(None, named, usable, &own)).unwrap().reason;
        assert_eq!(reason(true, false), Reason::Environment);
        assert_eq!(reason(true, true), Reason::Environment);
        assert_eq!(reason(false, true), Reason::System);
        let filled = decide(&around(None, false, false, &own)).unwrap();
        assert_eq!(filled, Located { vendors: Some(own), platform: None, reason: Reason::Project });
    }

    #[test]
    fn a_runtime_whose_library_is_gone_is_none() {
        let (_dir, own) = project(false);
        assert_eq!(decide(&around(None, false, false, &own)).unwrap().reason, Reason::Nothing);
        let error = decide(&around(Some("intel"), false, false, &own)).unwrap_err().to_string();
        assert!(error.contains("scripts/setup.sh") && error.contains(PROJECT_VENDORS), "{error}");
        let broken = broken_icds(&own).join("");
        assert!(broken.contains("own.icd") && broken.contains("libruntime.so"), "{broken}");
    }

    #[test]
    fn a_wish_beats_what_the_environment_names() {
        let (_dir, own) = project(true);
        let intel = decide(&around(Some("intel"), true, true, &own)).unwrap();
        assert_eq!(
            intel,
            Located { vendors: Some(own.clone()), platform: Some(INTEL), reason: Reason::Asked }
        );
        let pocl = decide(&around(Some("pocl"), true, true, &own)).unwrap();
        assert_eq!((pocl.vendors, pocl.platform), (Some(SYSTEM_VENDORS.into()), Some(POCL)));
        let system = decide(&around(Some("system"), false, false, &own)).unwrap();
        assert_eq!((system.vendors, system.platform), (None, None));
    }

    #[test]
    fn an_unknown_wish_says_which_there_are() {
        let (_dir, own) = project(true);
        let error = decide(&around(Some("cuda"), false, true, &own)).unwrap_err().to_string();
        assert!(error.contains("'cuda'") && error.contains("intel, pocl or system"), "{error}");
    }

    #[test]
    fn a_folder_that_anybody_may_write_is_not_trusted() {
        use std::os::unix::fs::PermissionsExt;
        let (_dir, own) = project(true);
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(decide(&around(None, false, false, &own)).unwrap().reason, Reason::Nothing);
    }

    #[test]
    fn the_folders_go_from_the_program_upward_and_end_with_the_installed_ones() {
        let (dir, own) = project(true);
        let program = dir.path().join("target/release/axed");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        fs::write(&program, b"").unwrap();
        let folders = own_folders(Some(&program), Some("/somewhere".into()));
        let own = fs::canonicalize(own).unwrap();
        assert_eq!(folders.iter().position(|folder| *folder == own), Some(2), "{folders:?}");
        let last: Vec<_> =
            folders.iter().rev().take(3).rev().map(|folder| folder.to_str().unwrap()).collect();
        assert_eq!(last, ["/somewhere/.axe/opencl/vendors", INSTALLED_VENDORS[0], INSTALLED_VENDORS[1]]);
    }

    #[test]
    fn a_bare_library_name_is_looked_up_as_the_linker_does() {
        assert!(library_exists("libc.so.6"));
        assert!(!library_exists("libc.so.6.not-there"));
        assert!(!library_exists("ibc.so.6"), "the end of a name is no name");
        assert!(!library_exists(""));
    }
}
