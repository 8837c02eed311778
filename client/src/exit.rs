//! How a command ends when it fails: an exit code for programs, advice for people.

use std::{
    io::{self, ErrorKind},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    process::ExitCode,
};

use axectl::client::ClientError;

/// A failure, ready to be told.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// A failure that was told already.
    pub fn told(code: u8) -> Self {
        Self { code, message: String::new() }
    }

    /// What went wrong, and below it what to do.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Tells it on standard error; a reader of our output that has gone away (`axectl logs | head`) is no failure.
    pub fn report(self) -> ExitCode {
        if self.code != 0 && !self.message.is_empty() {
            eprintln!("axectl: {}", self.message);
        }
        ExitCode::from(self.code)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let code = if error.kind() == ErrorKind::BrokenPipe { 0 } else { 1 };
        Self { code, message: format!("writing the output failed: {error}") }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { code: 1, message: format!("{error:#}") }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::Unreachable { .. } | ClientError::TooSlow { .. } => 3,
            ClientError::Refused { status, .. } if *status == 403 => 3,
            ClientError::Refused { status, .. } if *status == 404 => 4,
            ClientError::Refused { .. } | ClientError::Protocol { .. } => 1,
        };
        let advice = match &error {
            ClientError::Unreachable { socket, source } => advice(socket, source),
            ClientError::TooSlow { .. } => {
                "it may be overloaded or stopped; look at `systemctl status axed` and at its log \
                 (`journalctl -u axed`)"
                    .to_owned()
            }
            _ => String::new(),
        };
        let message = if advice.is_empty() { error.to_string() } else { format!("{error}\n  {advice}") };
        Self { code, message }
    }
}

/// What to check when no connection comes about.
fn advice(socket: &Path, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused
            if std::fs::metadata(socket).is_ok_and(|file| !file.file_type().is_socket()) =>
        {
            "this is no socket: name the daemon's own with --socket PATH or AXED_SOCKET (admin.socket in daemon.toml)"
                .to_owned()
        }
        ErrorKind::NotFound => "the daemon is not running, or its socket is elsewhere: start it (`systemctl start \
             axed`), or say where the socket is with --socket PATH or AXED_SOCKET (admin.socket in daemon.toml)"
            .to_owned(),
        ErrorKind::ConnectionRefused => "a daemon that is gone left this socket behind: start it again \
             (`systemctl start axed`) and see why it ended (`journalctl -u axed`)"
            .to_owned(),
        ErrorKind::PermissionDenied => {
            let group = group_of(socket).unwrap_or_else(|| "axed".to_owned());
            format!(
                "this user may not use the socket: run axectl with sudo, or join the group `{group}` (`sudo usermod \
                 -aG {group} $USER`, then log in again)"
            )
        }
        _ => "check that this path is the daemon's admin socket (admin.socket in daemon.toml)".to_owned(),
    }
}

/// The name of the group that owns the socket, where both can be read.
fn group_of(socket: &Path) -> Option<String> {
    let gid = std::fs::metadata(socket).ok()?.gid().to_string();
    let groups = std::fs::read_to_string("/etc/group").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == gid).then(|| name.to_owned())
    })
}
