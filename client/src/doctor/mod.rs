//! `axectl doctor`: looks at everything that has to be right, with or without a running daemon, and says what to do.
//!
//! Nothing is changed. What other programs know better is asked of them: a running daemon tells its configuration and its
//! device; where none runs, `axed config` reads the configuration, `axed
//! devices` loads the OpenCL runtimes, `axed plan` tells whether the model fits.

mod cards;
mod daemon;
mod machine;
mod service;

use std::path::{Path, PathBuf};

use axectl::client::Client;
use serde::Serialize;

/// What there is to look at.
pub struct Doctor {
    /// Where `/proc`, `/sys`, `/etc` and `/dev` are: `/`, or a recorded tree.
    pub root: PathBuf,
    /// The admin socket.
    pub client: Client,
    /// Whether somebody has named it; if not, it is where the configuration says.
    pub named: bool,
    /// The configuration file to take where no daemon tells its own.
    pub config: Option<PathBuf>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should be.
    Ok,
    /// It works, but not as well as it could, or not for long.
    Warn,
    /// The daemon cannot work like this.
    Fail,
    /// Not to be told here.
    Skipped,
}

impl Outcome {
    /// One word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skipped => "skipped",
        }
    }
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl Finding {
    fn new(check: &'static str, outcome: Outcome, found: impl Into<String>) -> Self {
        Self { check, outcome, found: found.into(), advice: None }
    }

    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Outcome::Ok, found)
    }

    fn skipped(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Outcome::Skipped, found)
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(check, Outcome::Warn, found) }
    }

    fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(check, Outcome::Fail, found) }
    }
}

/// All findings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// They, in the order in which to read them.
    pub findings: Vec<Finding>,
    /// How many checks failed.
    pub failed: usize,
    /// How many warn.
    pub warned: usize,
}

impl Doctor {
    /// Runs every check.
    pub async fn look(&self) -> Report {
        let mut findings = Vec::new();
        // A tree of another machine has neither its daemon nor its programs.
        let here = self.root == Path::new("/");
        let asked = if here { daemon::look(self, &mut findings).await } else { daemon::Asked::default() };
        machine::look(&self.root, &asked, &mut findings);
        cards::look(&self.root, asked.pci(), &mut findings);
        service::look(&self.root, asked.group(), &mut findings);
        let count = |outcome| findings.iter().filter(|finding| finding.outcome == outcome).count();
        Report { failed: count(Outcome::Fail), warned: count(Outcome::Warn), findings }
    }
}

/// A file's text without blanks around it, if it can be read.
fn text(path: &Path) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}
