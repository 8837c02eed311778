//! `axectl doctor`

use super::{lines_of, table};
use crate::doctor::{Outcome, Report};
use crate::units::plain;

/// The findings, a line each, with what to do below those that need it.
pub fn doctor(report: &Report) -> String {
    let mut table = table(["", "CHECK", "FOUND"], 0..0);
    for finding in &report.findings {
        table.add_row([finding.outcome.name().to_owned(), finding.check.to_owned(), plain(&finding.found)]);
        if let Some(advice) = finding.advice.as_deref().filter(|_| finding.outcome != Outcome::Ok) {
            table.add_row([String::new(), String::new(), format!("-> {}", plain(advice))]);
        }
    }
    let sum = match (report.failed, report.warned) {
        (0, 0) => "all is well".to_owned(),
        (0, warned) => format!("nothing fails, {warned} to look at"),
        (failed, warned) => format!("{failed} failed, {warned} more to look at"),
    };
    format!("{}\n\n{sum}", lines_of(&table))
}
