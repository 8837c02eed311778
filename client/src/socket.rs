//! Where the admin socket is, when nobody says.

use std::path::{Path, PathBuf};

/// The environment variable that tells `axectl` the place.
pub const VARIABLE: &str = "AXED_SOCKET";

/// Where the packaged service has it.
pub const SYSTEM: &str = "/run/axed/admin.sock";

/// Where `axectl` looks for the user `uid`: the first that exists of the user's own place, the service's and, when
/// there is exactly one, a card's own under `/run/axed/`; the service's place when none exists.
///
/// These are the places where the daemon puts its socket when its configuration does not say.
pub fn for_client(uid: u32, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    let system = PathBuf::from(SYSTEM);
    let own = for_user(uid, variable);
    if let Some(found) = [&own, &system].into_iter().find(|path| path.exists()) {
        return found.clone();
    }
    let mut cards = system.parent().map(sockets_below).unwrap_or_default();
    match (cards.pop(), cards.is_empty()) {
        (Some(only), true) => only,
        _ => system,
    }
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
    let folder = |name: &str| variable(name).filter(|path| path.starts_with('/')).map(PathBuf::from);
    match folder("XDG_RUNTIME_DIR") {
        Some(directory) => directory.join("axed/admin.sock"),
        None => {
            let temporary = folder("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"));
            temporary.join(format!("axed-{uid}/admin.sock"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_place_of_their_own() {
        let variable = |name: &str| (name == "XDG_RUNTIME_DIR").then(|| "/run/user/5".to_owned());
        assert_eq!(for_user(5, variable), Path::new("/run/user/5/axed/admin.sock"));
        assert_eq!(for_user(5, |_| None), Path::new("/tmp/axed-5/admin.sock"));
        assert_eq!(for_user(5, |_| Some("relative".into())), Path::new("/tmp/axed-5/admin.sock"));
        let elsewhere = |name: &str| (name == "TMPDIR").then(|| "/scratch".to_owned());
        assert_eq!(for_user(5, elsewhere), Path::new("/scratch/axed-5/admin.sock"));
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
