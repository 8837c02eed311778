//! Where a model comes from, and how it is fetched: the first time, after a fault, on demand, or to replace another.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use serde::Serialize;

use super::model::Loaded;
use super::shared::Shared;
use crate::decode::{BackendError, Memory, Sampling, Step, Wanted};
use crate::text::Specials;

/// Loads one model, as often as it is needed. All its methods run on the thread that the model will belong to.
pub trait Loader: Send {
    /// Brings the model onto its device.
    ///
    /// # Errors
    /// Whatever keeps it from being loaded, in words for the operator.
    fn load(&mut self, progress: &LoadProgress) -> Result<Loaded, BackendError>;

    /// Whether there is room for the model beside one that takes `held`.
    ///
    /// # Errors
    /// What shows already that it cannot be loaded at all.
    fn fits_beside(&mut self, held: Memory) -> Result<bool, BackendError>;

    /// Whether it can load once more.
    fn again(&self) -> bool {
        true
    }
}

/// A model that can be made once, and not be rebuilt.
pub(super) struct Once<F>(pub(super) Option<F>);

impl<F: FnOnce(&LoadProgress) -> Result<Loaded, BackendError> + Send> Loader for Once<F> {
    fn load(&mut self, progress: &LoadProgress) -> Result<Loaded, BackendError> {
        let load = self.0.take().ok_or("this model can be loaded only once")?;
        load(progress)
    }

    fn fits_beside(&mut self, _held: Memory) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn again(&self) -> bool {
        self.0.is_some()
    }
}

/// Why a model is being loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Occasion {
    /// The daemon has started.
    Start,
    /// The device was lost, or the engine's thread panicked.
    Fault,
    /// It was put away, and is needed again.
    Demand,
    /// It is to replace another.
    Reload,
}

/// Lets the loading code say how far it is, and ends it when nobody wants the model any more.
pub struct LoadProgress {
    shared: Arc<Shared>,
    occasion: Occasion,
}

/// What loading unwinds with that was told to stop.
struct Stopped;

impl LoadProgress {
    pub(super) fn new(shared: &Arc<Shared>, occasion: Occasion) -> Self {
        Self { shared: Arc::clone(shared), occasion }
    }

    /// `progress` is from 0 to 1, `what` e.g. `repacking weights`. Does not return after a shutdown: the loading code
    /// is unwound, which releases what it holds (device memory, unfinished cache files) from any depth.
    pub fn report(&self, progress: f64, what: impl Into<String>) {
        if !self.shared.report(self.occasion, progress.clamp(0.0, 1.0), what.into()) {
            resume_unwind(Box::new(Stopped));
        }
    }
}

/// Fetches a model; `None` if nobody wants it any more. Where requests wait for it, what is broken is to show before one
/// of them is tried: the model has to speak first.
pub(super) fn fetch(
    loader: &mut dyn Loader,
    shared: &Arc<Shared>,
    occasion: Occasion,
) -> Result<Option<Loaded>, String> {
    let progress = LoadProgress::new(shared, occasion);
    let loaded =
        guarded("loading the model", || match catch_unwind(AssertUnwindSafe(|| loader.load(&progress))) {
            Ok(loaded) => loaded.map(Some).map_err(|e| chain(&*e)),
            Err(panic) if panic.is::<Stopped>() => Ok(None),
            Err(panic) => resume_unwind(panic),
        })?;
    let Some(mut loaded) = loaded? else { return Ok(None) };
    if occasion != Occasion::Start {
        guarded("trying the model", || rehearse(&mut loaded))?
            .map_err(|error| format!("the model was loaded, but its first pass fails: {}", chain(&*error)))?;
    }
    Ok(Some(loaded))
}

/// Steps after which a model that has said nothing is taken to work.
const MOST_STEPS: usize = 64;

/// The first token or draft after a short prompt.
fn rehearse(loaded: &mut Loaded) -> Result<(), BackendError> {
    let tokenizer = &loaded.model.tokenizer;
    let mut prompt = tokenizer.with_bos(tokenizer.encode("Hello", Specials::Text));
    prompt.truncate(loaded.model.context_length.saturating_sub(1).max(1));
    if prompt.is_empty() {
        prompt.push(0);
    }
    let mut generation = loaded.backend.start(&prompt, &Sampling::default())?;
    generation.want(Wanted { most: 1, ..Wanted::default() });
    for _ in 0..MOST_STEPS {
        match generation.step()? {
            Step::Prefill { .. } => {}
            Step::Draft { .. } | Step::Commit(..) => return Ok(()),
        }
    }
    Ok(())
}

/// Runs `body`; a panic becomes an error that says what was going on.
pub(super) fn guarded<T>(what: &str, body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        format!("internal error while {what}: {}; restart the daemon and report this", message(&*panic))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message")
}

/// The message of an error and of its causes, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Messages that already embed their cause need it no second time.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
