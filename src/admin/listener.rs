//! The socket file: made without ever touching a file that is not ours, removed at the end.

use std::{
    io::{self, ErrorKind},
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;
use tokio::{
    net::{UnixListener, UnixStream},
    time::timeout,
};

/// How long another daemon may take to accept before it counts as alive but busy.
const PROBE: Duration = Duration::from_secs(1);

/// Why the socket could not be made.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another daemon answers there.
    #[error(
        "admin.socket: another daemon already answers on {}; stop it first (`systemctl stop axed`, or \
         `axectl --socket {} drain`), or give this one a socket of its own",
        .0.display(), .0.display()
    )]
    Alive(PathBuf),
    /// Something that is no socket has the name.
    #[error("admin.socket: {} exists and is {what}, not a socket; it is left alone: remove it or choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The directory is missing.
    #[error(
        "admin.socket: the directory {} does not exist, so no socket can be made in it; create it (systemd does so \
         with RuntimeDirectory=axed) or choose another path",
        .0.display()
    )]
    NoDirectory(PathBuf),
    /// The kernel has room for 107 bytes.
    #[error("admin.socket: {} has {} bytes, and the kernel allows 107 for the path of a socket; choose a shorter one",
        .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// Anything else the system refuses.
    #[error("admin.socket: {action} {} failed: {source}", path.display())]
    System {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A bound admin socket. Dropping it removes the file, unless another daemon has replaced it meanwhile.
#[derive(Debug)]
pub struct Listener {
    pub(super) socket: UnixListener,
    path: PathBuf,
    file: (u64, u64),
}

impl Listener {
    /// Binds `path`, mode 0660, owned by the group `gid` when given. A socket that a dead daemon left behind is
    /// replaced.
    ///
    /// # Errors
    /// See [`BindError`]; nothing is removed then.
    pub async fn bind(path: &Path, gid: Option<u32>) -> Result<Self, BindError> {
        let failed = |action| move |source| BindError::System { action, path: path.to_owned(), source };
        if path.as_os_str().len() > 107 {
            return Err(BindError::TooLong(path.to_owned()));
        }
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // Two daemons that start together must not take each other's fresh socket for a stale one. A lock on the
        // directory leaves no file behind.
        let handle = match std::fs::File::open(directory) {
            Ok(handle) => handle,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(BindError::NoDirectory(directory.to_owned()));
            }
            Err(source) => {
                return Err(BindError::System {
                    action: "opening the directory of",
                    path: path.to_owned(),
                    source,
                });
            }
        };
        let locked = tokio::task::spawn_blocking(move || Flock::lock(handle, FlockArg::LockExclusive))
            .await
            .map_err(|error| failed("locking the directory of")(io::Error::other(error)))?;
        let _lock = locked.map_err(|(_, error)| failed("locking the directory of")(error.into()))?;

        let socket = match UnixListener::bind(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                remove_if_stale(path).await?;
                UnixListener::bind(path)
            }
            outcome => outcome,
        }
        .map_err(failed("binding"))?;
        let metadata = std::fs::symlink_metadata(path).map_err(failed("looking at"))?;
        let listener = Self { socket, path: path.to_owned(), file: (metadata.dev(), metadata.ino()) };
        // From here on an error drops `listener`, which removes the file.
        if let Some(gid) = gid {
            std::os::unix::fs::chown(path, None, Some(gid)).map_err(failed("giving the group"))?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
            .map_err(failed("setting the mode of"))?;
        Ok(listener)
    }

    /// Where the socket is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Ok(metadata) = std::fs::symlink_metadata(&self.path)
            && (metadata.dev(), metadata.ino()) == self.file
        {
            // Nothing depends on it: a file left behind is recognised as stale by the next daemon.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

async fn remove_if_stale(path: &Path) -> Result<(), BindError> {
    let failed = |action| move |source| BindError::System { action, path: path.to_owned(), source };
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("looking at")(error)),
    };
    if !kind.is_socket() {
        let what = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_symlink() => "a symbolic link",
            () if kind.is_file() => "a regular file",
            () => "a special file",
        };
        return Err(BindError::NotASocket { path: path.to_owned(), what });
    }
    match timeout(PROBE, UnixStream::connect(path)).await {
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            tracing::info!(socket = %path.display(), "replacing the socket a dead daemon left behind");
            std::fs::remove_file(path).map_err(failed("removing the stale socket"))
        }
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => Ok(()),
        // A full backlog is a daemon that lives.
        Ok(Err(error)) if error.kind() != ErrorKind::WouldBlock => {
            Err(failed("asking who listens on")(error))
        }
        _ => Err(BindError::Alive(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_has_mode_0660_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        let listener = Listener::bind(&path, None).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o660);
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard library leaves the file behind");
        let live = Listener::bind(&path, None).await.unwrap();
        let error = Listener::bind(&path, None).await.unwrap_err();
        assert!(matches!(error, BindError::Alive(_)), "{error}");
        assert!(path.exists());
        drop(live);
    }

    #[tokio::test]
    async fn of_many_that_start_together_one_wins() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        for _ in 0..20 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let outcomes = futures::future::join_all((0..4).map(|_| Listener::bind(&path, None))).await;
            assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
            UnixStream::connect(&path).await.unwrap();
        }
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        let error = Listener::bind(&file, None).await.unwrap_err();
        assert!(error.to_string().contains("a regular file, not a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

        let folder = directory.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        assert!(matches!(Listener::bind(&folder, None).await, Err(BindError::NotASocket { .. })));

        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path().join("nowhere"), &link).unwrap();
        assert!(matches!(Listener::bind(&link, None).await, Err(BindError::NotASocket { .. })));
        assert!(std::fs::symlink_metadata(&link).is_ok());
    }

    #[tokio::test]
    async fn a_missing_directory_and_a_long_path_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let error = Listener::bind(&directory.path().join("absent/admin.sock"), None).await.unwrap_err();
        assert!(matches!(error, BindError::NoDirectory(_)), "{error}");
        assert!(error.to_string().contains("absent does not exist"), "{error}");
        let long = directory.path().join("x".repeat(120));
        assert!(matches!(Listener::bind(&long, None).await, Err(BindError::TooLong(_))));
    }

    #[tokio::test]
    async fn a_successor_keeps_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("admin.sock");
        let first = Listener::bind(&path, None).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path, None).await.unwrap();
        drop(first);
        assert!(path.exists(), "the first must not remove the second's file");
        drop(second);
    }
}
