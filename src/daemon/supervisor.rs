//! What systemd hears: progress of loading, readiness, the watchdog's beat, the end. Without systemd all of it is silent.

use std::net::SocketAddr;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::engine::{EngineHandle, State};

/// Time that loading may go on without a word, in microseconds.
const PATIENCE_US: u32 = 60_000_000;

/// How often the state is looked at when no watchdog asks for more.
const LOOK: Duration = Duration::from_secs(10);

/// Tells the supervisor of every change, and that we live, until aborted.
pub(super) async fn report(handle: EngineHandle, address: SocketAddr) {
    let mut limit_us = 0;
    let watched = sd_notify::watchdog_enabled(false, &mut limit_us);
    // Twice within the limit, as systemd's manual recommends.
    let beat = if watched { Duration::from_micros(limit_us / 2).max(Duration::from_millis(1)) } else { LOOK };
    let mut state = handle.watch();
    let mut said_ready = false;
    let mut said = String::new();
    loop {
        let now = state.borrow_and_update().clone();
        let status = match &now {
            State::Loading { progress, what } => format!("loading: {what}, {:.0} %", progress * 100.0),
            State::Ready => format!("ready on http://{address}"),
            State::Hung { error } => format!("hung: {error}"),
            State::Draining => "draining".to_owned(),
            State::Stopped => "stopped".to_owned(),
            State::Failed { error } => format!("failed: {error}"),
        };
        // A status is one line; errors may carry a compiler's log.
        let status = status.replace('\n', " ");
        let mut news = Vec::new();
        if status != said {
            news.push(NotifyState::Status(&status));
        }
        match now {
            State::Loading { .. } => news.push(NotifyState::ExtendTimeoutUsec(PATIENCE_US)),
            State::Ready if !said_ready => {
                said_ready = true;
                tracing::info!(%address, "ready");
                news.push(NotifyState::Ready);
            }
            _ => {}
        }
        // An engine that has failed or hangs stops the beat: the watchdog then restarts the daemon.
        if watched && !matches!(now, State::Failed { .. } | State::Hung { .. }) {
            news.push(NotifyState::Watchdog);
        }
        if !news.is_empty() {
            notify(&news);
        }
        said = status;
        // The time runs out when nothing changes; a closed channel means that the engine is gone.
        if let Ok(Err(_gone)) = tokio::time::timeout(beat, state.changed()).await {
            return;
        }
    }
}

/// Tells the supervisor that the configuration is being read anew, and returns what tells it that this is over.
pub(super) fn reloading() -> Reloading {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "cannot notify the supervisor"),
    }
    Reloading
}

/// A reload, for as long as it lives.
pub(super) struct Reloading;

impl Drop for Reloading {
    fn drop(&mut self) {
        notify(&[NotifyState::Ready]);
    }
}

/// Tells the supervisor that the end has begun.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(news: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, news) {
        tracing::debug!(%error, "cannot notify the supervisor");
    }
}
