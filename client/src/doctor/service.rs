//! The service: unit, watchdog, user and groups.

use std::path::{Path, PathBuf};

use super::{Finding, text};

/// Where units are, those of administrators before those of packages.
const UNITS: [&str; 3] = ["etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"];

/// The groups that own the nodes of graphics cards.
const NODE_GROUPS: [&str; 2] = ["render", "video"];

/// Looks at how the service is installed; `group` may operate the daemon.
pub(super) fn look(root: &Path, group: Option<String>, findings: &mut Vec<Finding>) {
    if let Some(group) = group {
        findings.push(match members(root, &group) {
            Some(members) => {
                let members = if members.is_empty() { "nobody yet".to_owned() } else { members };
                Finding::ok("operators", format!("members of group {group}: {members}"))
            }
            None => Finding::fail(
                "operators",
                format!("admin.group is {group}, and there is no such group"),
                format!("groupadd --system {group}, or change admin.group"),
            ),
        });
    }
    let Some((path, unit)) = unit(root) else {
        let found = "axed.service is not installed: the daemon is started by hand or by something else";
        findings.push(Finding::skipped("unit", found));
        return;
    };
    findings.push(state(root, &path));
    findings.push(watchdog(&path, &unit));
    findings.push(user(root, &unit));
    findings.push(groups(root, &unit));
}

fn unit(root: &Path) -> Option<(PathBuf, String)> {
    UNITS.iter().find_map(|folder| {
        let path = root.join(folder).join("axed.service");
        let text = text(&path)?;
        Some((path, text))
    })
}

/// The last value of a setting; drop-ins are not looked at.
fn setting<'a>(unit: &'a str, name: &str) -> Option<&'a str> {
    unit.lines().rev().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::trim)
}

fn state(root: &Path, path: &Path) -> Finding {
    let wanted = ["multi-user.target.wants/axed.service", "sockets.target.wants/axed.socket"];
    let enabled: Vec<&str> = wanted
        .into_iter()
        .filter(|link| root.join("etc/systemd/system").join(link).symlink_metadata().is_ok())
        .filter_map(|link| link.rsplit('/').next())
        .collect();
    let shown = path.display();
    if enabled.is_empty() {
        let advice = "to have it started at boot: systemctl enable axed";
        return Finding::warn("unit", format!("{shown}, not enabled"), advice);
    }
    Finding::ok("unit", format!("{shown}, enabled: {}", enabled.join(", ")))
}

fn watchdog(path: &Path, unit: &str) -> Finding {
    let (kind, time) = (setting(unit, "Type"), setting(unit, "WatchdogSec"));
    match (kind, time) {
        (Some("notify" | "notify-reload"), Some(time)) if time != "0" => {
            Finding::ok("watchdog", format!("a daemon that hangs is started again after {time} s at most"))
        }
        _ => Finding::warn(
            "watchdog",
            format!("{}: Type={}, WatchdogSec={}", path.display(), kind.unwrap_or("-"), time.unwrap_or("-")),
            "install the unit of this version, which has Type=notify and WatchdogSec=60: a daemon that hangs is \
             started again then",
        ),
    }
}

fn user(root: &Path, unit: &str) -> Finding {
    let Some(user) = setting(unit, "User") else {
        let advice = "install the unit of this version, which has User=axed";
        return Finding::warn("user", "the service runs as root", advice);
    };
    let users = text(&root.join("etc/passwd")).unwrap_or_default();
    if users.lines().any(|line| line.split(':').next() == Some(user))
        || setting(unit, "DynamicUser") == Some("yes")
    {
        return Finding::ok("user", format!("the service runs as {user}"));
    }
    let advice = "install axed.sysusers as /etc/sysusers.d/axed.conf and run systemd-sysusers";
    Finding::fail("user", format!("there is no user {user}"), advice)
}

/// Whether the service's user may open the nodes of graphics cards.
fn groups(root: &Path, unit: &str) -> Finding {
    let own = setting(unit, "User").unwrap_or("root");
    let given = setting(unit, "SupplementaryGroups").unwrap_or_default();
    let mut found = Vec::new();
    for name in NODE_GROUPS {
        let Some(members) = members(root, name) else { continue };
        let is_in = given.split_whitespace().any(|group| group == name)
            || members.split(',').any(|member| member.trim() == own);
        if is_in {
            found.push(name);
        }
    }
    if found.is_empty() && own != "root" {
        return Finding::warn(
            "groups",
            format!("{own} is in none of the groups that own graphics cards (render, video)"),
            "install the unit of this version, which has SupplementaryGroups=render video; groups that are missing are \
             made by systemd-sysusers",
        );
    }
    Finding::ok("groups", format!("the service may open graphics cards as {own}, by {}", shown(&found)))
}

fn shown(groups: &[&str]) -> String {
    if groups.is_empty() { "being root".to_owned() } else { groups.join(" and ") }
}

/// The members of a group, with commas between them.
fn members(root: &Path, group: &str) -> Option<String> {
    text(&root.join("etc/group"))?.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == group).then(|| fields.nth(2).unwrap_or_default().replace(',', ", "))
    })
}
