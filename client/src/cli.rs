//! The command line.

use std::path::PathBuf;

use axectl::{protocol::Level, socket};
use clap::{Parser, Subcommand};
use clap_complete::Shell;

const CODES: &str = "\
Exit codes:
  0  done
  1  the daemon refused or failed, or its answer made no sense; doctor: a check failed
  2  the command line is wrong
  3  the daemon cannot be reached: not running, elsewhere, too slow, or not for this user
  4  not found: there is no such job

The socket is, in this order: --socket, AXED_SOCKET, $XDG_RUNTIME_DIR/axed/admin.sock
(or /tmp/axed-UID/admin.sock), /run/axed/admin.sock, and the only one of
/run/axed/*/admin.sock, where daemons that serve one card each have theirs.

The daemon serves root, its own user and members of its group (admin.group in daemon.toml).
The same socket speaks HTTP: curl --unix-socket /run/axed/admin.sock http://axed/status";

/// Look at and steer axed, the daemon that serves a language model.
///
/// Start with `axectl status`.
#[derive(Debug, Parser)]
#[command(name = "axectl", version, after_help = CODES, max_term_width = 100)]
pub struct Arguments {
    /// Where the daemon's admin socket is
    #[arg(long, global = true, env = socket::VARIABLE, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Print JSON, one object a line, for programs
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show state, model, device, memory and what was served; waits 5 seconds at most
    Status,
    /// Show the last lines of the daemon's log
    Logs {
        /// Go on with lines to come, until interrupted
        #[arg(short, long)]
        follow: bool,
        /// How many of the lines already written
        #[arg(short = 'n', long, default_value_t = 100, value_name = "COUNT")]
        lines: usize,
        /// Only lines this severe or more: error, warn, info, debug, trace
        #[arg(long, default_value = "trace", value_name = "LEVEL")]
        level: Level,
        /// Only lines of one request: the id of its answer, or of the header x-request-id
        #[arg(long, value_name = "ID", value_parser = identifier)]
        request: Option<String>,
    },
    /// Show card and host: memory, load, clocks, power, temperatures, firmware
    Gpu {
        /// Show it again every so many seconds (1 unless given), until interrupted
        #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = seconds)]
        watch: Option<f64>,
    },
    /// Show the running job and those that wait
    Queue,
    /// Cancel a job, whether it waits or runs
    Cancel {
        /// The job's identifier, as `axectl queue` shows it
        #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
    },
    /// Show every setting in force and where it comes from
    Config {
        /// Only what somebody set
        #[arg(long)]
        set: bool,
    },
    /// Measure prefill and decoding through the daemon's queue, beside what else it has to do
    Bench {
        /// Tokens of the prompt
        #[arg(short = 'p', long, default_value_t = 512, value_name = "TOKENS")]
        prompt: usize,
        /// Tokens to generate
        #[arg(short = 'n', long, default_value_t = 64, value_name = "TOKENS")]
        tokens: usize,
        /// How often, from 1 to 20; one more round comes first and does not count
        #[arg(short, long, default_value_t = 3, value_name = "COUNT")]
        rounds: usize,
    },
    /// Look at everything that has to be right, with or without a running daemon, and say what to do
    Doctor {
        /// Configuration of the daemon to look at: without --socket it names the socket, and it counts where no daemon tells
        /// its own [default: /etc/axed/daemon.toml if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Look at the files of another machine below this folder (/proc, /sys, /etc, /dev), and at nothing else
        #[arg(long, value_name = "FOLDER", default_value = "/", value_parser = folder)]
        root: PathBuf,
    },
    /// Show the time spent in each kernel (needs `device.profiling = true` in daemon.toml)
    Profile,
    /// Read daemon.toml anew, and load the model if another one is wanted; waits until it is done
    Reload,
    /// Accept no more jobs, finish those at hand, then end the daemon
    Drain,
    /// Change what is logged, until the next start
    LogLevel {
        /// error, warn, info, debug, trace or off; or by module, as in `info,axe::engine=debug`
        level: String,
    },
    /// Show the versions of axectl and of the daemon
    Version,
    /// Print a completion script, e.g. `axectl completions bash > /etc/bash_completion.d/axectl`
    Completions {
        /// The shell to print it for
        shell: Shell,
    },
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds from 0.1 to 86400".to_owned()),
    }
}

fn folder(text: &str) -> Result<PathBuf, String> {
    match std::fs::metadata(text) {
        Ok(found) if found.is_dir() => Ok(text.into()),
        Ok(_) => Err("this is no folder".to_owned()),
        Err(error) => Err(format!("this folder cannot be looked into: {error}")),
    }
}

/// Identifiers go into a query as they are.
fn identifier(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c)) {
        return Ok(text.to_owned());
    }
    Err("an identifier has letters, digits, hyphens and underscores, as in chatcmpl-0123abcd".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
