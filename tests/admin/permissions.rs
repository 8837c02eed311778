//! Who is let in, asked with real processes of other users. Needs root to become them; told when it is skipped.

use std::{
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Output},
};

use axe::admin::{LogRing, Policy};

use crate::{axectl::binary, support::Daemon};

/// A user id nobody has.
const STRANGER: u32 = 61_234;

/// Runs `axectl version` as another user; `None` when this process may not.
fn as_user(uid: u32, gid: u32, socket: &Path) -> Option<Output> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can act as other users");
        return None;
    }
    let program = socket.with_file_name("axectl");
    // Other users cannot enter the build folder.
    std::fs::copy(binary(), &program).unwrap();
    let mut command = Command::new(program);
    // Standard's `gid` drops the supplementary groups, too, as root.
    command.args(["--json", "version", "--socket"]).arg(socket).uid(uid).gid(gid).current_dir("/");
    Some(command.output().unwrap())
}

/// A daemon whose socket the file system lets everyone open, so that only the daemon's own check is left.
async fn open_daemon(group: Option<&str>) -> Daemon {
    let daemon = Daemon::start_with(Policy::new(group).unwrap(), LogRing::new(10)).await;
    let open = |path: &Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    open(daemon.directory.path());
    open(&daemon.socket);
    daemon
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_403_and_the_cure() {
    let daemon = open_daemon(None).await;
    let Some(output) = as_user(STRANGER, STRANGER, &daemon.socket) else { return };
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains("may not operate this daemon") && told.contains("admin.group"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_refused_connection_is_closed_after_one_answer() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let daemon = open_daemon(None).await;
    let request = r#"
import socket, sys
s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(sys.argv[1])
s.sendall(b"POST /drain HTTP/1.1\r\n\r\nGET /status HTTP/1.1\r\n\r\n")
answer = b""
while chunk := s.recv(65536): answer += chunk
sys.stdout.buffer.write(answer)
"#;
    let mut command = Command::new("python3");
    command.args(["-c", request]).arg(&daemon.socket).uid(STRANGER).gid(STRANGER).current_dir("/");
    let output = command.output().unwrap();
    let answer = String::from_utf8_lossy(&output.stdout);
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("connection: close"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
    assert!(!daemon.queue_until(|_| true).await.draining, "a refused request has no effect");
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_in_and_the_socket_belongs_to_the_group() {
    use std::os::unix::fs::MetadataExt;
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // Debian's static groups and users: `daemon` (1) and `games` (user 5, group 60).
    let daemon = open_daemon(Some("games")).await;
    assert_eq!(std::fs::metadata(&daemon.socket).unwrap().gid(), 60);
    let by_process_group = as_user(STRANGER, 60, &daemon.socket).unwrap();
    assert_eq!(by_process_group.status.code(), Some(0), "{by_process_group:?}");
    // This process runs with another group, but the user database counts the user to the group.
    let by_database = as_user(5, STRANGER, &daemon.socket).unwrap();
    assert_eq!(by_database.status.code(), Some(0), "{by_database:?}");
    let outsider = as_user(1, 1, &daemon.socket).unwrap();
    assert_eq!(outsider.status.code(), Some(3), "{outsider:?}");
    assert!(String::from_utf8_lossy(&outsider.stderr).contains("usermod -aG games daemon"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_mode_keeps_strangers_out_before_that() {
    let daemon = Daemon::start().await;
    std::fs::set_permissions(daemon.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let Some(output) = as_user(STRANGER, STRANGER, &daemon.socket) else { return };
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains("join the group"), "{told}");
}
