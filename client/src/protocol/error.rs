//! How a request fails.

use serde::{Deserialize, Serialize};

/// Body of every answer whose status is not 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// A word for programs: `forbidden`, `not_found`, `method_not_allowed`, `bad_request`, `too_large`, `timeout`,
    /// `busy`, `unavailable`, `reload_failed`.
    pub code: String,
    /// A sentence for people: what was tried, what was found, what to do.
    pub message: String,
}
