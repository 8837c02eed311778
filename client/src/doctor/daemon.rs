//! The daemon: its socket and state if it runs, its configuration and what that names in any case.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use axectl::client::ClientError;
use axectl::protocol::{Config, Source, State, Status};
use serde_json::Value;

use super::{Doctor, Finding};
use crate::exit::Failure;
use crate::units::{bytes, duration};

/// The configuration of the service, which a look without a daemon takes before others.
const SERVICE_CONFIG: &str = "/etc/axed/daemon.toml";

/// How long a connection to the daemon's own port may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// What was asked of the daemon and its program.
#[derive(Default)]
pub(super) struct Asked {
    status: Option<Status>,
    config: Option<Config>,
    /// Where the daemon runs, if it does and that is known.
    folder: Option<PathBuf>,
    devices: bool,
    model_bytes: Option<u64>,
}

impl Asked {
    pub(super) fn is_running(&self) -> bool {
        self.status.is_some()
    }

    /// Whether OpenCL runtimes were loaded to see what they have.
    pub(super) fn told_devices(&self) -> bool {
        self.devices
    }

    pub(super) fn pci(&self) -> Option<&str> {
        self.config.as_ref()?.value("device.pci")?.as_str().filter(|pci| !pci.is_empty())
    }

    pub(super) fn group(&self) -> Option<String> {
        self.config.as_ref()?.text("admin.group")
    }

    pub(super) fn model_bytes(&self) -> Option<u64> {
        self.model_bytes
    }
}

/// Looks at a daemon that runs, or at what one that is started would find.
pub(super) async fn look(doctor: &Doctor, findings: &mut Vec<Finding>) -> Asked {
    let mut asked = Asked::default();
    let program = program();
    let (mut read, mut told) = (None, Vec::new());
    let mut client = doctor.client.clone();
    // A file that was named says of which daemon it is; the service's file counts where no daemon is at its usual place.
    if !doctor.named && (doctor.config.is_some() || !client.socket().exists()) {
        read = read_config(program.as_deref(), doctor.config.as_deref(), &mut told);
        if let Some(socket) = read.as_ref().and_then(socket) {
            client = client.at(socket);
        }
    }
    match client.get::<Status>("/status").await {
        Ok(status) => {
            findings.extend(running(client.socket(), &status));
            asked.config = client.get::<Config>("/config").await.ok();
            asked.folder = std::fs::read_link(format!("/proc/{}/cwd", status.pid)).ok();
            asked.status = Some(status);
        }
        Err(error) => findings.push(unreachable(client.socket(), error)),
    }
    if asked.config.is_none() {
        if told.is_empty() {
            read = read_config(program.as_deref(), doctor.config.as_deref(), &mut told);
        }
        findings.extend(told);
        asked.config = read;
    }
    if let Some(config) = asked.config.take() {
        let path = |key| path(&config, key, asked.folder.as_deref());
        asked.model_bytes = model(path("model.path"), findings);
        findings.push(cache(path("device.cache_dir")));
        findings.extend(path("server.api_key_file").map(|path| keys(&path)));
        findings.push(port(&config, asked.status.as_ref()));
        asked.config = Some(config);
    }
    if let Some(status) = &asked.status {
        asked.devices = true;
        findings.push(in_use(status));
        return asked;
    }
    match program {
        // What it would look for is not known.
        Some(_) if asked.config.is_none() => {}
        Some(program) => asks(&program, doctor.config.as_deref(), &mut asked, findings),
        None => {
            let found =
                "axed is neither beside axectl nor in PATH, so it was not asked for devices and memory";
            findings.push(Finding::skipped("devices", found));
        }
    }
    asked
}

fn unreachable(socket: &Path, error: ClientError) -> Finding {
    let refused = matches!(&error, ClientError::Refused { .. } | ClientError::Protocol { .. });
    let away = matches!(&error, ClientError::Unreachable { source, .. }
        if [ErrorKind::NotFound, ErrorKind::ConnectionRefused].contains(&source.kind()));
    // The error's own advice is what people get from any other command, too.
    let told = Failure::from(error).message().to_owned();
    let (found, advice) = told.split_once("\n  ").unwrap_or((&told, ""));
    let advice = if advice.is_empty() {
        format!("check what answers on {}", socket.display())
    } else {
        advice.to_owned()
    };
    if away && !refused {
        return Finding::warn("daemon", format!("not running: {found}"), advice);
    }
    Finding::fail("daemon", found, advice)
}

fn running(socket: &Path, status: &Status) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("socket", format!("{} answers", socket.display()))];
    let reason = status.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let found = format!("{}{reason}, pid {}, up {}", status.state, status.pid, duration(status.uptime_s));
    findings.push(match status.state {
        State::Failed => {
            let advice = "read `axectl logs --level warn`, mend what it names, then: systemctl restart axed";
            Finding::fail("daemon", found, advice)
        }
        State::Draining | State::Stopped => Finding::warn(
            "daemon",
            found,
            "it is about to end; start it again when it has: systemctl start axed",
        ),
        State::Ready | State::Loading => Finding::ok("daemon", found),
    });
    let (ours, theirs) = (env!("CARGO_PKG_VERSION"), &status.version.version);
    if ours != theirs {
        findings.push(Finding::warn(
            "versions",
            format!("axectl {ours}, the running axed {theirs}"),
            "restart the daemon after an update: systemctl restart axed",
        ));
    }
    if let Some(kernels) = &status.kernels {
        let wrong: Vec<&str> =
            kernels.self_tests.iter().filter(|test| !test.passed).map(|test| test.kernel.as_str()).collect();
        findings.push(if wrong.is_empty() {
            Finding::ok("self-test", format!("{} kernels compute what they should", kernels.self_tests.len()))
        } else {
            Finding::warn(
                "self-test",
                format!("wrong, and replaced by slower ones: {}", wrong.join(", ")),
                "install another version of the device's driver or OpenCL runtime",
            )
        });
    }
    for warning in &status.warnings {
        let (found, advice) = warning.split_once(": ").unwrap_or((warning, "see the log: axectl logs"));
        findings.push(Finding::warn("warning", found, advice));
    }
    findings
}

/// The daemon's program: beside this one, or where programs are.
fn program() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join("axed")));
    let folders = std::env::var_os("PATH").unwrap_or_default();
    beside.into_iter().chain(std::env::split_paths(&folders).map(|folder| folder.join("axed"))).find(|path| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    })
}

fn run(program: &Path, arguments: &[&str], config: Option<&Path>) -> std::io::Result<Output> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.output()
}

/// The file to take: the one that is named, or the service's.
fn file(named: Option<&Path>) -> Option<PathBuf> {
    named.map(Path::to_owned).or_else(|| Some(PathBuf::from(SERVICE_CONFIG)).filter(|path| path.is_file()))
}

/// What `axed` said on standard error, without its name.
fn complaint(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    last.strip_prefix("axed: ").unwrap_or(last).to_owned()
}

fn read_config(program: Option<&Path>, named: Option<&Path>, findings: &mut Vec<Finding>) -> Option<Config> {
    let program = program?;
    let config = file(named);
    let output = match run(program, &["config", "--json"], config.as_deref()) {
        Ok(output) => output,
        Err(error) => {
            let advice = "install axed again";
            findings.push(Finding::fail("configuration", format!("{}: {error}", program.display()), advice));
            return None;
        }
    };
    if !output.status.success() {
        let advice = "correct it; daemon.toml explains every key";
        findings.push(Finding::fail("configuration", complaint(&output), advice));
        return None;
    }
    let config: Config = serde_json::from_slice(&output.stdout).ok()?;
    let file = config.file.clone().unwrap_or_else(|| "no file, only defaults".to_owned());
    let set = config.settings.iter().filter(|setting| setting.place.is_some()).count();
    findings.push(Finding::ok(
        "configuration",
        format!("{file}; {set} of {} keys are set", config.settings.len()),
    ));
    Some(config)
}

/// The admin socket, if the configuration names one.
fn socket(config: &Config) -> Option<PathBuf> {
    let set = config.settings.iter().any(|one| one.key == "admin.socket" && one.source != Source::Default);
    path(config, "admin.socket", None).filter(|_| set)
}

/// The path that a setting names: a relative one in the file counts from the file's folder, all others from where the daemon
/// runs, which is `folder` if it is known, else here.
fn path(config: &Config, key: &str, folder: Option<&Path>) -> Option<PathBuf> {
    let path = PathBuf::from(config.text(key)?);
    let setting = config.settings.iter().find(|setting| setting.key == key)?;
    let place = setting.place.as_deref().filter(|_| setting.source == Source::File).map(Path::new);
    let path = place.and_then(Path::parent).map_or_else(|| path.clone(), |parent| parent.join(&path));
    Some(folder.map_or_else(|| path.clone(), |folder| folder.join(&path)))
}

/// The device that a running daemon has taken.
fn in_use(status: &Status) -> Finding {
    match &status.device {
        Some(device) => Finding::ok(
            "devices",
            format!("the daemon uses {} ({}, driver {})", device.name, device.platform, device.driver),
        ),
        None => Finding::skipped("devices", "the daemon has taken none yet"),
    }
}

/// The model's file or folder; its bytes.
fn model(path: Option<PathBuf>, findings: &mut Vec<Finding>) -> Option<u64> {
    let Some(path) = path else {
        let advice = "set model.path in daemon.toml to a GGUF file or the directory of a DiffusionGemma";
        findings.push(Finding::fail("model", "no model is named", advice));
        return None;
    };
    let shown = path.display();
    let opened = match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => std::fs::read_dir(&path).map(|entries| {
            let files = entries.flatten().filter_map(|entry| entry.metadata().ok());
            files.filter(std::fs::Metadata::is_file).map(|file| file.len()).sum::<u64>()
        }),
        Ok(metadata) => std::fs::File::open(&path).map(|_| metadata.len()),
        Err(error) => Err(error),
    };
    match opened {
        Ok(size) => {
            findings.push(Finding::ok("model", format!("{shown}, {}", bytes(size))));
            Some(size)
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            findings.push(Finding::warn(
                "model",
                format!("{shown} may not be read by this user"),
                "the service's user must: chgrp axed, chmod g+r, and x for the folders above it",
            ));
            None
        }
        Err(error) => {
            let advice = "set model.path in daemon.toml to a file that is there; the service sees /var/lib/axed, and \
                          nothing below /home";
            findings.push(Finding::fail("model", format!("{shown}: {error}"), advice));
            None
        }
    }
}

fn cache(path: Option<PathBuf>) -> Finding {
    let Some(path) = path else {
        return Finding::skipped("cache", "no folder is named");
    };
    let shown = path.display();
    match std::fs::metadata(&path) {
        Ok(metadata) if !metadata.is_dir() => {
            let advice = "name a folder with device.cache_dir";
            Finding::fail("cache", format!("{shown} is no folder"), advice)
        }
        Ok(metadata) if metadata.permissions().mode() & 0o002 != 0 => Finding::warn(
            "cache",
            format!("everybody may write to {shown}, whose programs are loaded as code"),
            format!("chmod o-w {shown}"),
        ),
        Ok(_) => {
            let size = size_below(&path, 3);
            Finding::ok("cache", format!("{shown} holds {}", bytes(size)))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Finding::ok(
            "cache",
            format!("{shown} is made at the first start, which takes longer than later ones"),
        ),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Finding::skipped("cache", format!("{shown} may not be looked into by this user"))
        }
        Err(error) => {
            Finding::fail("cache", format!("{shown}: {error}"), "name another folder with device.cache_dir")
        }
    }
}

/// Bytes of the files in a folder and some levels below.
fn size_below(folder: &Path, levels: usize) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            match metadata.is_dir() {
                true if levels > 0 => Some(size_below(&entry.path(), levels - 1)),
                true => None,
                false => Some(metadata.len()),
            }
        })
        .sum()
}

fn keys(path: &Path) -> Finding {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return Finding::ok("key file", format!("{}, closed to this user", path.display()));
        }
        Err(error) => {
            let advice = "write it, one name:key a line, or unset server.api_key_file";
            return Finding::fail("key file", format!("{}: {error}", path.display()), advice);
        }
    };
    let path = path.display();
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o004 == 0 {
        Finding::ok("key file", format!("{path}, mode {mode:03o}"))
    } else {
        let found = format!("everybody on this machine may read {path} (mode {mode:03o})");
        Finding::warn("key file", found, format!("chmod o-r {path}"))
    }
}

fn port(config: &Config, status: Option<&Status>) -> Finding {
    let listens = status.and_then(|status| status.listen.as_deref()?.strip_prefix("http://")?.parse().ok());
    if let Some(address) = listens {
        return match healthy(address) {
            Ok(()) => Finding::ok("port", format!("http://{address} answers")),
            Err(error) => Finding::fail(
                "port",
                format!("http://{address}/health: {error}"),
                "the daemon runs but does not answer there: see its log, and firewalls on this machine",
            ),
        };
    }
    let host = config.text("server.host").and_then(|host| host.parse::<IpAddr>().ok());
    let port = config.value("server.port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
    let (Some(host), Some(port)) = (host, port) else {
        return Finding::skipped("port", "server.host and server.port are not known");
    };
    match TcpListener::bind(SocketAddr::new(host, port)) {
        Ok(_) => Finding::ok("port", format!("{host} port {port} is free")),
        Err(error) => Finding::fail(
            "port",
            format!("{host} port {port}: {error}"),
            "stop the program that has it (ss -ltnp), or choose another server.port",
        ),
    }
}

fn healthy(address: SocketAddr) -> Result<(), String> {
    let asked = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.take(1 << 16).read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = asked().map_err(|error| error.to_string())?;
    let first = answer.lines().next().unwrap_or_default();
    if first.contains(" 200 ") { Ok(()) } else { Err(format!("it answers {first:?}")) }
}

/// What only the program can tell: it loads the OpenCL runtimes, and reads the model.
fn asks(program: &Path, named: Option<&Path>, asked: &mut Asked, findings: &mut Vec<Finding>) {
    let config = file(named).or_else(|| asked.config.as_ref()?.file.clone().map(PathBuf::from));
    let failed = |check, output: &Output, advice: &str| Finding::fail(check, complaint(output), advice);
    match run(program, &["devices", "--json"], config.as_deref()) {
        Ok(output) if output.status.success() => {
            asked.devices = true;
            findings.push(devices(&output.stdout));
        }
        Ok(output) => {
            asked.devices = true;
            let advice = "install an OpenCL runtime: intel-opencl-icd for Intel's cards, pocl-opencl-icd for processors";
            findings.push(failed("devices", &output, advice));
        }
        Err(error) => findings.push(Finding::skipped("devices", format!("{}: {error}", program.display()))),
    }
    let Some(model) = asked.config.as_ref().and_then(|config| path(config, "model.path", None)) else {
        return;
    };
    let model = model.to_string_lossy();
    match run(program, &["plan", "--json", "--model", &model], config.as_deref()) {
        Ok(output) if output.status.success() => {
            findings.push(Finding::ok("fit", "the model fits the device's memory"))
        }
        Ok(output) => {
            let advice = "axed plan tells more; a shorter model.context_length or a smaller model may fit";
            findings.push(failed("fit", &output, advice));
        }
        Err(_) => {}
    }
}

fn devices(json: &[u8]) -> Finding {
    let listed: Vec<Value> = serde_json::from_slice(json).unwrap_or_default();
    let taken = listed.iter().find(|device| device["selected"] == true);
    let Some(info) = taken.map(|device| &device["info"]) else {
        let found = format!("{} OpenCL devices, of which the configuration fits none", listed.len());
        return Finding::fail("devices", found, "look at `axed devices`, and at [device] in daemon.toml");
    };
    let word = |name: &str| info[name].as_str().unwrap_or("n/a").to_owned();
    let largest = info["max_alloc"].as_u64().map_or_else(|| "n/a".to_owned(), bytes);
    Finding::ok(
        "devices",
        format!(
            "{} ({}, driver {}) of {}; one buffer may have {largest}",
            word("name"),
            word("platform"),
            word("driver_version"),
            listed.len()
        ),
    )
}
