//! The face as it is at present. Each request sees one [`App`] from its beginning to its end; a reload puts another in its
//! place for those that come later.

use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::FromRef;

use super::App;
use crate::config::Config;

/// The place where the present [`App`] is; cloning gives another handle to it.
#[derive(Clone)]
pub struct Face(Arc<RwLock<Arc<App>>>);

impl From<Arc<App>> for Face {
    fn from(app: Arc<App>) -> Self {
        Self(Arc::new(RwLock::new(app)))
    }
}

impl FromRef<Face> for Arc<App> {
    fn from_ref(face: &Face) -> Self {
        face.now()
    }
}

impl Face {
    /// What a request that comes now sees.
    pub(super) fn now(&self) -> Arc<App> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves by `config` from now on.
    pub fn change(&self, config: &Config) {
        let app = self.now().changed(config);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = app;
    }
}
