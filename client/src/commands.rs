//! One function a command: ask the daemon, show the answer.

use std::{
    io::{self, IsTerminal, Write},
    os::unix::fs::MetadataExt,
    time::Duration,
};

use axectl::{
    client::Client,
    protocol::{
        Bench, BenchRequest, CancelResult, Config, Drain, Gpu, LogLevel, Profile, Queue, Reload, Status,
        Version,
    },
    socket,
};
use clap::CommandFactory;
use serde::Serialize;

use crate::{
    cli::{Arguments, Command},
    doctor::Doctor,
    exit::Failure,
    show,
};

/// The longest any command but `logs --follow` and `gpu --watch` takes.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest a measurement takes.
const BENCH: Duration = Duration::from_secs(1800);

/// Loading a large model, after long requests, takes its time.
const RELOAD_PATIENCE: Duration = Duration::from_secs(3600);

type Outcome = Result<(), Failure>;

/// Runs the command.
pub async fn run(arguments: Arguments) -> Outcome {
    if let Command::Completions { shell } = arguments.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "axectl", &mut script);
        return Ok(io::stdout().write_all(&script)?);
    }
    // An empty variable is as good as none.
    let given = arguments.socket.filter(|path| !path.as_os_str().is_empty());
    let named = given.is_some();
    let socket = given.unwrap_or_else(|| {
        let uid = std::fs::metadata("/proc/self").map_or(0, |metadata| metadata.uid());
        socket::for_client(uid, |name| std::env::var(name).ok())
    });
    let client = Client::new(&socket, PATIENCE);
    let json = arguments.json;
    let nothing = None::<&()>;
    match arguments.command {
        Command::Status => tell(json, &client.get::<Status>("/status").await?, show::status),
        Command::Queue => tell(json, &client.get::<Queue>("/queue").await?, show::queue),
        Command::Profile => tell(json, &client.get::<Profile>("/profile").await?, show::profile),
        Command::Reload => {
            let client = Client::new(client.socket(), RELOAD_PATIENCE);
            tell(json, &client.post::<Reload>("/reload", nothing).await?, show::reload)
        }
        Command::Drain => tell(json, &client.post::<Drain>("/drain", nothing).await?, show::drain),
        Command::Cancel { id } => {
            let path = format!("/cancel/{}", segment(&id));
            tell(json, &client.post::<CancelResult>(&path, nothing).await?, show::cancelled)
        }
        Command::LogLevel { level } => {
            let wanted = LogLevel { level };
            tell(json, &client.post::<LogLevel>("/log-level", Some(&wanted)).await?, show::log_level)
        }
        Command::Gpu { watch: None } => tell(json, &client.get::<Gpu>("/gpu").await?, show::gpu),
        Command::Gpu { watch: Some(seconds) } => watch(&client, json, Duration::from_secs_f64(seconds)).await,
        Command::Logs { follow, lines, level, request } => {
            let mut path = format!("/logs?lines={lines}&level={level}&follow={}", u8::from(follow));
            if let Some(request) = request {
                path.push_str(&format!("&request={request}"));
            }
            logs(&client, json, &path).await
        }
        Command::Config { set } => {
            tell(json, &client.get::<Config>("/config").await?, |config| show::config(config, set))
        }
        Command::Doctor { config, root } => {
            let report = Doctor { root, client, named, config }.look().await;
            tell(json, &report, show::doctor)?;
            if report.failed == 0 { Ok(()) } else { Err(Failure::told(1)) }
        }
        Command::Bench { prompt, tokens, rounds } => {
            let asked = BenchRequest { prompt_tokens: prompt, completion_tokens: tokens, rounds };
            let client = Client::new(&socket, BENCH);
            tell(json, &client.post::<Bench>("/bench", Some(&asked)).await?, show::bench)
        }
        Command::Version => version(&client, json).await,
        Command::Completions { .. } => Ok(()),
    }
}

/// Prints an answer as one line of JSON or as `show` makes it.
fn tell<T: Serialize>(json: bool, answer: &T, show: impl FnOnce(&T) -> String) -> Outcome {
    let mut text = if json { encode(answer)? } else { show(answer) };
    text.push('\n');
    Ok(io::stdout().write_all(text.as_bytes())?)
}

fn encode(answer: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(answer).map_err(|error| Failure::from(anyhow::Error::from(error)))
}

async fn watch(client: &Client, json: bool, pause: Duration) -> Outcome {
    let clears = !json && io::stdout().is_terminal();
    loop {
        let gpu = client.get::<Gpu>("/gpu").await?;
        if clears {
            // To the top left corner, and away with what was there.
            io::stdout().write_all(b"\x1b[H\x1b[2J")?;
        }
        tell(json, &gpu, show::gpu)?;
        tokio::time::sleep(pause).await;
    }
}

async fn logs(client: &Client, json: bool, path: &str) -> Outcome {
    let colours =
        !json && io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let mut lines = client.lines(path).await?;
    while let Some(line) = lines.next().await? {
        tell(json, &line, |line| show::log_line(line, colours))?;
    }
    Ok(())
}

/// Both versions; the client's own is told even when there is no daemon.
#[derive(Serialize)]
struct Versions {
    axectl: String,
    axed: Option<Version>,
}

async fn version(client: &Client, json: bool) -> Outcome {
    let answer = client.get::<Version>("/version").await;
    let versions =
        Versions { axectl: env!("CARGO_PKG_VERSION").to_owned(), axed: answer.as_ref().ok().cloned() };
    tell(json, &versions, |versions| show::versions(&versions.axectl, versions.axed.as_ref()))?;
    answer.map(drop).map_err(Failure::from)
}

/// `text` as one segment of a path.
fn segment(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_stay_one_segment() {
        assert_eq!(segment("chatcmpl-1_a.b~"), "chatcmpl-1_a.b~");
        assert_eq!(segment("a/b ?ä"), "a%2Fb%20%3F%C3%A4");
    }
}
