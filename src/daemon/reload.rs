//! The configuration read anew: what can change while the daemon runs does so, a new model takes the old one's place once
//! it has shown that it works, and whatever fails leaves everything as it was.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axectl::protocol;
use tokio::signal::unix::Signal;

use super::{Source, options, supervisor};
use crate::admin::{self, Board, LogControl, Reloading};
use crate::config::{Change, Config, Effect, changes};
use crate::engine::{EngineHandle, State};
use crate::http::Face;
use crate::load::Stamp;

/// Everything that a reload changes.
pub(super) struct Reloader {
    source: Arc<dyn Source>,
    handle: EngineHandle,
    board: Arc<Board>,
    face: Face,
    control: LogControl,
    /// What cannot change is compared with this.
    started: Config,
    present: Arc<Mutex<Present>>,
    /// Held by a reload.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// What is in force.
struct Present {
    config: Config,
    /// The model's files as they were when it was loaded.
    stamp: Stamp,
}

impl Reloader {
    pub(super) fn new(
        source: Arc<dyn Source>,
        config: Config,
        handle: &EngineHandle,
        board: &Arc<Board>,
        face: &Face,
        control: &LogControl,
    ) -> Self {
        let stamp = Stamp::of(&config.model);
        Self {
            source,
            handle: handle.clone(),
            board: Arc::clone(board),
            face: face.clone(),
            control: control.clone(),
            started: config.clone(),
            present: Arc::new(Mutex::new(Present { config, stamp })),
            turn: Arc::default(),
        }
    }

    /// Most time that requests get to finish.
    pub(super) fn drain_grace(&self) -> Duration {
        lock(&self.present).config.server.drain_grace
    }

    /// What the admin socket calls.
    pub(super) fn hook(self: &Arc<Self>) -> admin::Reload {
        let this = Arc::clone(self);
        Arc::new(move || {
            let this = Arc::clone(&this);
            // A task of its own: it goes on when whoever asked for it has left.
            let reload = tokio::spawn(async move {
                let Ok(turn) = this.turn.try_lock() else {
                    let error = "a reload is going on already; `axectl status` shows how far it is";
                    tracing::warn!(error, "no second reload");
                    return Err(error.to_owned());
                };
                this.reload(turn).await
            });
            Box::pin(async move {
                reload.await.unwrap_or_else(|error| Err(format!("the reload failed: {error}")))
            })
        })
    }

    /// Reloads at every SIGHUP. Those that come while a reload is at hand are one more after it: the file may have changed
    /// since it was read.
    pub(super) async fn listen(self: Arc<Self>, mut hangups: Signal) {
        while hangups.recv().await.is_some() {
            let turn = match self.turn.try_lock() {
                Ok(turn) => turn,
                Err(_busy) => {
                    tracing::info!("a reload is going on; the configuration is read once more after it");
                    self.turn.lock().await
                }
            };
            // What it changed, or why nothing, is in the log and in the status.
            let _told = self.reload(turn).await;
        }
    }

    /// Reads the configuration anew and brings it into force; `_turn` keeps others from doing so.
    async fn reload(&self, _turn: tokio::sync::MutexGuard<'_, ()>) -> Result<protocol::Reload, String> {
        let began = Instant::now();
        if matches!(self.handle.status().state, State::Draining | State::Stopped) {
            let error = "the daemon is about to end; its next start reads the configuration".to_owned();
            tracing::warn!(error, "no reload");
            self.board.pin_reload(Reloading::Ended(began, Err(error.clone())));
            return Err(error);
        }
        // Who has not been told of readiness yet, or has been told of the end, is not to hear of it now.
        let _told = (self.handle.status().state == State::Ready).then(supervisor::reloading);
        self.board.pin_reload(Reloading::Since(began));
        tracing::info!("reading the configuration anew");
        let outcome = self
            .change()
            .await
            .map(|reload| protocol::Reload { elapsed_s: began.elapsed().as_secs_f64(), ..reload });
        let words = match &outcome {
            Ok(reload) => Ok(summary(reload)),
            Err(error) => Err(error.clone()),
        };
        match &words {
            Ok(what) => tracing::info!(elapsed_s = began.elapsed().as_secs_f64(), "reloaded: {what}"),
            Err(error) => tracing::error!(error, "the reload changed nothing"),
        }
        self.board.pin_reload(Reloading::Ended(Instant::now(), words));
        outcome
    }

    async fn change(&self) -> Result<protocol::Reload, String> {
        let source = Arc::clone(&self.source);
        let (old, was) = {
            let present = lock(&self.present);
            (present.config.clone(), present.stamp.clone())
        };
        let reading = tokio::task::spawn_blocking(move || {
            let new = source.config().map_err(|error| error.to_string())?;
            let stamp = Stamp::of(&new.model);
            Ok::<_, String>((new, stamp))
        });
        let (new, stamp) =
            reading.await.map_err(|error| format!("reading the configuration failed: {error}"))??;
        // What needs a restart is told until there was one.
        let restart = changes(&self.started, &new).into_iter().filter(|c| c.effect == Effect::Restart);
        let restart = restart.map(told).collect();
        let changed: Vec<Change> =
            changes(&old, &new).into_iter().filter(|change| change.effect != Effect::Restart).collect();
        let other_model = stamp != was || changed.iter().any(|change| change.effect == Effect::Model);
        let from = self.handle.status().model;
        let switch = self.switch(&old, new.clone(), stamp);
        if other_model || !changed.is_empty() {
            self.board.pin_change();
        }
        let model = if other_model {
            let loader = self.source.loader(&new, &self.board).map_err(|error| error.to_string())?;
            let replaced = self.handle.replace(loader, switch).await?;
            Some(protocol::ModelChange {
                from,
                to: self.handle.status().model,
                beside: replaced.beside,
                load_s: replaced.load_s,
                waited_s: replaced.closed_s,
            })
        } else {
            switch();
            None
        };
        Ok(protocol::Reload {
            changed: changed.into_iter().map(told).collect(),
            restart,
            model,
            elapsed_s: 0.0,
        })
    }

    /// What brings `new` into force.
    fn switch(&self, old: &Config, new: Config, stamp: Stamp) -> Box<dyn FnOnce() + Send> {
        let (face, handle, board) = (self.face.clone(), self.handle.clone(), Arc::clone(&self.board));
        let (control, present) = (self.control.clone(), Arc::clone(&self.present));
        // What the operator has set meanwhile stays, unless the configuration says something else than before.
        let level = (new.log.level != old.log.level).then(|| new.log.level.clone());
        let shown = admin::in_force(&self.started, &new);
        Box::new(move || {
            face.change(&new);
            handle.set_options(options(&new));
            match level.map(|level| control.set(&level)) {
                None => {}
                Some(Ok(_understood)) => board.pin_level(None),
                Some(Err(error)) => tracing::error!(error, "the log level stays"),
            }
            board.pin_config(shown);
            board.pin_config_warnings(&new.warnings);
            *lock(&present) = Present { config: new, stamp };
        })
    }
}

fn told(change: Change) -> protocol::Change {
    protocol::Change { key: change.key.to_owned(), from: change.from, to: change.to }
}

/// What a reload changed, in one line.
fn summary(reload: &protocol::Reload) -> String {
    let keys = |changes: &[protocol::Change]| {
        changes.iter().map(|change| change.key.as_str()).collect::<Vec<_>>().join(", ")
    };
    let mut parts = Vec::new();
    if !reload.changed.is_empty() {
        parts.push(format!("changed {}", keys(&reload.changed)));
    }
    if let Some(model) = &reload.model {
        parts.push(format!("loaded {}", model.to.as_deref().unwrap_or("a model")));
    }
    if !reload.restart.is_empty() {
        parts.push(format!("{} need a restart", keys(&reload.restart)));
    }
    if parts.is_empty() { "nothing has changed".to_owned() } else { parts.join("; ") }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
