//! The engine in this process, and Ctrl-C.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use axe::admin::{Board, shown};
use axe::config::Config;
use axe::device::process::leave;
use axe::device::telemetry::Sampler;
use axe::engine::{Engine, EngineHandle, Event, FinishReason, Model, Options, Request, State};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::report::Answer;
use super::screen::Screen;

/// Exit status of a program that Ctrl-C ended.
pub(super) const INTERRUPTED: u8 = 130;

/// Where text cannot be shown.
const CANNOT_SHOW: &str = "cannot write to standard output";

/// A loaded model that answers.
pub(super) struct Session {
    engine: Engine,
    handle: EngineHandle,
    pub(super) model: Arc<Model>,
    /// Seconds that loading took.
    pub(super) load_s: f64,
    runtime: Runtime,
    answering: Answering,
}

impl Session {
    /// Loads the model at `path`; on a terminal, standard error shows how far it is.
    ///
    /// # Errors
    /// What the model or the device has wrong.
    pub(super) fn open(config: &Config, path: &Path) -> Result<Self> {
        let began = Instant::now();
        let (send_board, board) = mpsc::channel::<Arc<Board>>();
        let (wanted, of_model) = (config.clone(), path.to_owned());
        let engine = Engine::spawn(
            move |progress| axe::load::load(&wanted, &of_model, progress, &board.recv()?),
            Options { queue_capacity: 1, ..Options::default() },
        )
        .context("cannot start the engine's thread")?;
        let handle = engine.handle();
        // The thread waits for it, so there is a receiver.
        let _sent = send_board.send(Arc::new(Board::new(handle.clone(), shown(config), Sampler::new())));
        let runtime = Builder::new_current_thread().enable_all().build().context("cannot wait for events")?;
        let answering = Answering::watch(handle.clone())?;
        runtime.block_on(loaded(&handle))?;
        let model = handle.model().context("the engine has no model")?;
        Ok(Self { engine, handle, model, load_s: began.elapsed().as_secs_f64(), runtime, answering })
    }

    /// Has the model answer; `screen` shows what comes. Ctrl-C stops the answer, which is then what there is of it.
    ///
    /// # Errors
    /// A prompt that does not fit, a failure of the device, a screen that cannot be written to.
    pub(super) fn ask(&mut self, request: Request, screen: &mut Screen) -> Result<Answer> {
        let mut job = self.handle.submit(request)?;
        self.answering.begin(job.id);
        let model = Arc::clone(&self.model);
        let answer = self.runtime.block_on(async {
            let (mut text, mut reasoning, mut ids) = (String::new(), String::new(), Vec::new());
            while let Some(event) = job.events.recv().await {
                match event {
                    Event::Prefill { .. } => {}
                    Event::Draft { tokens, .. } => screen.draft(&model, &tokens).context(CANNOT_SHOW)?,
                    Event::Commit { tokens, text: said, reasoning: thought, .. } => {
                        screen.commit(&said, &thought).context(CANNOT_SHOW)?;
                        ids.extend(tokens);
                        text.push_str(&said);
                        reasoning.push_str(&thought);
                    }
                    Event::Finish { reason: FinishReason::Error(error), .. } => bail!("{error}"),
                    Event::Finish { reason, usage, stats } => {
                        screen.end().context(CANNOT_SHOW)?;
                        return Ok(Answer { text, reasoning, tokens: ids, reason, usage, stats });
                    }
                }
            }
            Err(anyhow!("the engine ended before the answer was complete"))
        });
        self.answering.end();
        answer
    }

    /// Lets go of model and device.
    pub(super) fn close(self) {
        self.handle.shutdown();
        self.engine.join();
    }
}

/// Waits until the model is loaded.
async fn loaded(handle: &EngineHandle) -> Result<()> {
    let mut watch = handle.watch();
    let mut line = ProgressLine::default();
    loop {
        let state = watch.borrow_and_update().clone();
        match state {
            State::Ready => {
                line.clear();
                return Ok(());
            }
            State::Failed { error } | State::Hung { error } => {
                line.clear();
                bail!("{error}");
            }
            State::Loading { progress, what } => line.show(&what, progress),
            State::Draining | State::Stopped => bail!("the engine ended before the model was loaded"),
        }
        watch.changed().await.context("the engine ended before the model was loaded")?;
    }
}

/// One line of standard error that is written over, on terminals only.
#[derive(Default)]
struct ProgressLine {
    shown: bool,
}

impl ProgressLine {
    fn show(&mut self, what: &str, progress: f64) {
        let mut err = std::io::stderr();
        if err.is_terminal() {
            self.shown = true;
            // A terminal that went away hears of nothing that matters.
            let _ = write!(err, "\r\x1b[Kloading: {what}, {:.0} %", progress * 100.0);
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// The answer that is being made, if one is. The first Ctrl-C stops it; where there is none to stop, the program ends.
struct Answering(Arc<Mutex<Option<String>>>);

impl Answering {
    /// Begins to listen for Ctrl-C.
    fn watch(handle: EngineHandle) -> Result<Self> {
        let this = Self(Arc::default());
        let current = Arc::clone(&this.0);
        let listen = move || -> std::io::Result<()> {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut interrupts = signal(SignalKind::interrupt())?;
                while interrupts.recv().await.is_some() {
                    let id = lock(&current).take();
                    // The job may have ended in this moment; then there is nothing to stop, and nothing to end for.
                    match id {
                        Some(id) => drop(handle.cancel(&id)),
                        None => {
                            crate::commands::tell("");
                            leave(INTERRUPTED);
                        }
                    }
                }
                Ok(())
            })
        };
        std::thread::Builder::new()
            .name("interrupts".to_owned())
            .spawn(move || {
                if let Err(error) = listen() {
                    tracing::warn!(%error, "cannot listen for Ctrl-C");
                }
            })
            .context("cannot listen for Ctrl-C")?;
        Ok(this)
    }

    fn begin(&self, id: String) {
        *lock(&self.0) = Some(id);
    }

    fn end(&self) {
        *lock(&self.0) = None;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
