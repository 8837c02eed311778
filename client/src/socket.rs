//! Where the admin socket is.

use std::path::{Path, PathBuf};

/// The environment variable that overrides the place, for the daemon and for `axectl`.
pub const VARIABLE: &str = "AXED_SOCKET";

/// Where the packaged service has it.
pub const SYSTEM: &str = "/run/axed/admin.sock";

/// Where a daemon puts its socket when nothing is configured.
///
/// In order: the runtime directory systemd made for the service, `/run/axed` for root, the user's own runtime
/// directory, `/tmp`. No directory is made for it.
pub fn for_daemon(uid: u32, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    // With several runtime directories systemd separates them by colons; ours is the first.
    let service = variable("RUNTIME_DIRECTORY").and_then(|list| match list.split_once(':') {
        // A template unit's directory holds the colons of a PCI address: that is one path.
        Some((first, rest)) if rest.starts_with('/') => Some(first.to_owned()),
        _ => Some(list),
    });
    match service.filter(|path| path.starts_with('/')) {
        Some(directory) => Path::new(&directory).join("admin.sock"),
        None if uid == 0 => PathBuf::from(SYSTEM),
        None => for_user(uid, variable),
    }
}

/// Where `axectl` looks: the given place (`--socket`), else the first that exists of the service's, the user's own
/// and, when there is exactly one, a card's own under `/run/axed/`; the service's when none exists.
pub fn for_client(uid: u32, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    let system = PathBuf::from(SYSTEM);
    let own = for_user(uid, variable);
    let cards = || match Path::new(SYSTEM).parent().map(sockets_below).unwrap_or_default() {
        mut found if found.len() == 1 => found.pop(),
        _ => None,
    };
    [Some(system.clone()), Some(own)]
        .into_iter()
        .flatten()
        .find(|path| path.exists())
        .or_else(cards)
        .unwrap_or(system)
}

/// The sockets of daemons that serve one card each (`axed@….service`), sorted.
pub fn sockets_below(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path().join("admin.sock")).filter(|path| path.exists()).collect();
    found.sort();
    found
}

fn for_user(uid: u32, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    match variable("XDG_RUNTIME_DIR").filter(|path| path.starts_with('/')) {
        Some(directory) => Path::new(&directory).join("axed.sock"),
        None => PathBuf::from(format!("/tmp/axed-{uid}.sock")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment<'a>(pairs: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn the_service_uses_its_runtime_directory() {
        let one = environment(&[("RUNTIME_DIRECTORY", "/run/axed"), ("XDG_RUNTIME_DIR", "/run/user/5")]);
        assert_eq!(for_daemon(5, one), Path::new("/run/axed/admin.sock"));
        let two = environment(&[("RUNTIME_DIRECTORY", "/run/axed:/run/other")]);
        assert_eq!(for_daemon(5, two), Path::new("/run/axed/admin.sock"));
        let card = environment(&[("RUNTIME_DIRECTORY", "/run/axed/0000:03:00.0")]);
        assert_eq!(for_daemon(5, card), Path::new("/run/axed/0000:03:00.0/admin.sock"));
    }

    #[test]
    fn without_a_service_root_and_users_have_their_own() {
        assert_eq!(for_daemon(0, environment(&[])), Path::new(SYSTEM));
        let user = environment(&[("XDG_RUNTIME_DIR", "/run/user/5")]);
        assert_eq!(for_daemon(5, user), Path::new("/run/user/5/axed.sock"));
        assert_eq!(for_daemon(5, environment(&[])), Path::new("/tmp/axed-5.sock"));
    }

    #[test]
    fn sockets_of_cards_are_found_in_order() {
        let directory = std::env::temp_dir().join(format!("axectl-socket-{}", std::process::id()));
        for card in ["0000:04:00.0", "0000:03:00.0"] {
            std::fs::create_dir_all(directory.join(card)).unwrap();
            std::fs::write(directory.join(card).join("admin.sock"), "").unwrap();
        }
        std::fs::create_dir_all(directory.join("empty")).unwrap();
        let found = sockets_below(&directory);
        std::fs::remove_dir_all(&directory).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.strip_prefix(&directory).unwrap()).collect();
        assert_eq!(names, [Path::new("0000:03:00.0/admin.sock"), Path::new("0000:04:00.0/admin.sock")]);
    }
}
