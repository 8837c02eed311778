//! Loaders for the engine that can load again.

use axe::decode::{Backend, BackendError, Memory};
use axe::engine::{Engine, EngineHandle, LoadProgress, Loaded, Loader, Options, State};

/// Loads whatever `make` makes, as often as it is asked; `fits` says whether beside another.
pub struct Troupe<F> {
    pub make: F,
    pub fits: bool,
}

impl<F: FnMut(&LoadProgress) -> Result<Loaded, BackendError> + Send> Loader for Troupe<F> {
    fn load(&mut self, progress: &LoadProgress) -> Result<Loaded, BackendError> {
        (self.make)(progress)
    }

    fn fits_beside(&mut self, _held: Memory) -> Result<bool, BackendError> {
        Ok(self.fits)
    }
}

/// A loader of what `make` makes, with room for it beside others.
pub fn troupe(
    make: impl FnMut(&LoadProgress) -> Result<Loaded, BackendError> + Send + 'static,
) -> Box<dyn Loader> {
    Box::new(Troupe { make, fits: true })
}

/// An engine that is ready.
pub fn engine(loader: Box<dyn Loader>, options: Options) -> EngineHandle {
    let engine = Engine::with(loader, options).unwrap().handle();
    let mut state = engine.watch();
    futures::executor::block_on(state.wait_for(|state| *state == State::Ready)).unwrap();
    engine
}

/// A model around a backend, by name.
pub fn named(name: &str, backend: impl Backend + 'static) -> Loaded {
    let mut loaded = super::loaded(backend, Some(super::TEMPLATE));
    name.clone_into(&mut loaded.model.name);
    loaded
}
