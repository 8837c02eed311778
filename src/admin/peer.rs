//! Who may speak to the daemon.

use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User};
use thiserror::Error;

/// The process at the other end of a connection, as the kernel recorded it when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its primary group.
    pub gid: u32,
}

/// Who is let in: root, the daemon's own user, and the members of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    own_uid: u32,
    group: Option<(String, u32)>,
}

/// The configured group cannot be used.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// There is no such group.
    #[error(
        "admin.group: there is no group `{0}` on this machine; create it with `groupadd --system {0}` or change the key"
    )]
    NoSuchGroup(String),
    /// The user database could not be read.
    #[error("admin.group: looking up the group `{name}` failed: {source}")]
    Lookup {
        /// The group.
        name: String,
        /// What the system said.
        source: nix::Error,
    },
}

impl Policy {
    /// The policy of this process with the group called `group`, if any.
    ///
    /// # Errors
    /// When the group does not exist or cannot be looked up.
    pub fn new(group: Option<&str>) -> Result<Self, PolicyError> {
        let group = match group {
            None => None,
            Some(name) => match Group::from_name(name) {
                Ok(Some(group)) => Some((group.name, group.gid.as_raw())),
                Ok(None) => return Err(PolicyError::NoSuchGroup(name.to_owned())),
                Err(source) => return Err(PolicyError::Lookup { name: name.to_owned(), source }),
            },
        };
        Ok(Self { own_uid: Uid::effective().as_raw(), group })
    }

    /// The group's id, which the socket is given to.
    pub fn gid(&self) -> Option<u32> {
        self.group.as_ref().map(|(_, gid)| *gid)
    }

    /// Whether `peer` is let in; `groups` returns the groups of a user and is asked only when they matter.
    pub fn admits(&self, peer: Peer, groups: impl FnOnce(u32) -> Vec<u32>) -> bool {
        if peer.uid == 0 || peer.uid == self.own_uid {
            return true;
        }
        match &self.group {
            Some((_, gid)) => peer.gid == *gid || groups(peer.uid).contains(gid),
            None => false,
        }
    }

    /// Why `peer` is turned away and how that can be changed.
    pub fn refusal(&self, peer: Peer) -> String {
        let user = name_of(peer.uid);
        match &self.group {
            Some((group, _)) => format!(
                "user {user} may not operate this daemon: it serves root, its own user and members of the group \
                 `{group}`. To add this user: `sudo usermod -aG {group} {user}`, then log in again"
            ),
            None => format!(
                "user {user} may not operate this daemon: it serves root and its own user {}. To let others in, \
                 set admin.group in daemon.toml",
                name_of(self.own_uid)
            ),
        }
    }
}

/// All groups the user database names for `uid`, the primary one included. Asks the system's name services, so it
/// may block.
///
/// A process may have been started before its user joined the group, and the kernel's record of a connection holds
/// the primary group only; so membership is what the database says now.
pub fn groups_of(uid: u32) -> Vec<u32> {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(uid)) else { return Vec::new() };
    let Ok(name) = CString::new(user.name) else { return Vec::new() };
    let groups: Result<Vec<Gid>, _> = nix::unistd::getgrouplist(&name, user.gid);
    groups.map(|groups| groups.into_iter().map(Gid::as_raw).collect()).unwrap_or_default()
}

fn name_of(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(group: Option<(&str, u32)>) -> Policy {
        Policy { own_uid: 900, group: group.map(|(name, gid)| (name.to_owned(), gid)) }
    }

    fn never(_: u32) -> Vec<u32> {
        panic!("the groups do not matter here")
    }

    #[test]
    fn root_and_the_own_user_need_no_group() {
        for policy in [policy(None), policy(Some(("axed", 70)))] {
            assert!(policy.admits(Peer { uid: 0, gid: 0 }, never));
            assert!(policy.admits(Peer { uid: 900, gid: 1 }, never));
        }
    }

    #[test]
    fn members_come_in_by_primary_or_supplementary_group() {
        let policy = policy(Some(("axed", 70)));
        assert!(policy.admits(Peer { uid: 5, gid: 70 }, never));
        assert!(policy.admits(Peer { uid: 5, gid: 5 }, |uid| vec![uid, 44, 70]));
        assert!(!policy.admits(Peer { uid: 5, gid: 5 }, |uid| vec![uid, 44]));
        assert!(!policy.admits(Peer { uid: 5, gid: 5 }, |_| Vec::new()));
    }

    #[test]
    fn without_a_group_strangers_stay_out() {
        assert!(!policy(None).admits(Peer { uid: 5, gid: 0 }, never));
    }

    #[test]
    fn the_database_knows_roots_groups() {
        assert!(groups_of(0).contains(&0));
        assert!(groups_of(4_000_000_001).is_empty());
    }

    #[test]
    fn refusals_name_user_group_and_cure() {
        let stranger = Peer { uid: 4_000_000_001, gid: 4_000_000_001 };
        let text = policy(Some(("operators", 70))).refusal(stranger);
        assert!(text.contains("usermod -aG operators 4000000001"), "{text}");
        assert!(policy(None).refusal(stranger).contains("admin.group"));
    }

    #[test]
    fn an_unknown_group_is_an_error() {
        let error = Policy::new(Some("no-such-group-here")).unwrap_err();
        assert!(error.to_string().contains("groupadd --system no-such-group-here"), "{error}");
        assert_eq!(Policy::new(Some("root")).unwrap().gid(), Some(0));
    }
}
