//! Who asks: API keys, the accounts behind them, and how much each may ask for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use super::error::ApiError;
use super::rate::{Exhausted, Shares};
use super::{App, studio};
use crate::config::{RateLimits, ServerConfig};
use crate::engine::Account;

/// What probes may ask without a key; so may browsers for the pages of the studio, which hold nothing of the model.
const OPEN: [&str; 2] = ["/health", "/ready"];

/// Where Anthropic's clients send their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

tokio::task_local! {
    /// The account of the request that the task serves.
    static ACCOUNT: Arc<Account>;
}

/// In whose name the request at hand is served. None outside of a request.
pub(super) fn account() -> Option<Arc<Account>> {
    ACCOUNT.try_with(Arc::clone).ok()
}

/// Somebody who may ask.
pub(super) struct Caller {
    pub(super) account: Arc<Account>,
    /// Requests to routes that generate.
    pub(super) requests: Arc<AtomicU64>,
    /// Those that were too many.
    pub(super) refused: Arc<AtomicU64>,
    limits: RateLimits,
    shares: Mutex<Shares>,
}

impl Caller {
    fn new(account: Account, limits: RateLimits) -> Self {
        let shares = Mutex::new(Shares::new(limits, Instant::now(), account.tokens()));
        let (requests, refused) = Default::default();
        Self { account: Arc::new(account), requests, refused, limits, shares }
    }

    /// The same caller under other limits.
    fn under(self: &Arc<Self>, limits: RateLimits) -> Arc<Self> {
        if self.limits == limits {
            return Arc::clone(self);
        }
        let shares = self.with_shares(|shares| shares.under(limits, Instant::now(), self.account.tokens()));
        let shares = Mutex::new(shares);
        // Shared: what was begun under the old limits is counted in the same place.
        let [requests, refused] = [&self.requests, &self.refused].map(Arc::clone);
        Arc::new(Self { account: Arc::clone(&self.account), requests, refused, limits, shares })
    }

    fn take(&self) -> Result<(), ApiError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let taken = self.with_shares(|shares| shares.take(Instant::now(), self.account.tokens()));
        taken.map_err(|Exhausted { what, limit, wait }| {
            self.refused.fetch_add(1, Ordering::Relaxed);
            let wait = Duration::from_secs(wait.as_secs_f64().ceil().max(1.0) as u64);
            let message =
                format!("the limit of {limit} {what} a minute is reached; try again in {} s", wait.as_secs());
            ApiError::too_many(message).code("rate_limit_exceeded").retry_after(wait)
        })
    }

    fn with_shares<T>(&self, look: impl FnOnce(&mut Shares) -> T) -> T {
        look(&mut self.shares.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The keys in force, each with who may use it.
pub(super) struct Keys {
    /// Digests of the keys, which are compared in their place.
    known: Vec<([u8; 32], Arc<Caller>)>,
    /// Who asks where no key is asked for.
    anybody: Arc<Caller>,
    /// Requests without a key, or with a wrong one.
    pub(super) strangers: AtomicU64,
}

impl Keys {
    /// The keys of a configuration.
    pub(super) fn new(server: &ServerConfig) -> Self {
        Self::after(None, server)
    }

    /// The keys of another configuration. Whoever keeps a name keeps what is counted for it.
    pub(super) fn renewed(&self, server: &ServerConfig) -> Self {
        Self::after(Some(self), server)
    }

    fn after(before: Option<&Self>, server: &ServerConfig) -> Self {
        let caller = |name: Option<&str>, limits: RateLimits| {
            let known = before.and_then(|before| before.callers().find(|c| c.account.name() == name));
            match known {
                Some(known) => known.under(limits),
                None => Arc::new(Caller::new(Account::new(name.map(str::to_owned)), limits)),
            }
        };
        let digest = |secret: &str| Sha256::digest(secret.as_bytes()).into();
        Self {
            known: server
                .api_keys
                .iter()
                .map(|key| (digest(key.secret.expose()), caller(Some(&key.name), key.limits)))
                .collect(),
            anybody: caller(None, server.limits),
            strangers: AtomicU64::new(before.map_or(0, |before| before.strangers.load(Ordering::Relaxed))),
        }
    }

    /// Everybody who may ask; without a name where no key is asked for.
    pub(super) fn callers(&self) -> impl Iterator<Item = &Arc<Caller>> {
        self.known.iter().map(|(_, caller)| caller).chain([&self.anybody])
    }

    /// Whether a key is asked for.
    pub(super) fn asked_for(&self) -> bool {
        !self.known.is_empty()
    }

    fn caller(&self, headers: &HeaderMap) -> Result<&Arc<Caller>, &'static str> {
        if !self.asked_for() {
            return Ok(&self.anybody);
        }
        let key = presented(headers)
            .ok_or("an API key is needed: send it as `Authorization: Bearer <key>`, or in `x-api-key`")?;
        self.owner(key).ok_or("the API key is wrong")
    }

    /// Compares digests byte by byte without stopping early, so that the time tells nothing about the keys.
    fn owner(&self, candidate: &str) -> Option<&Arc<Caller>> {
        let candidate: [u8; 32] = Sha256::digest(candidate.as_bytes()).into();
        self.known.iter().fold(None, |found, (key, caller)| {
            let difference = candidate.iter().zip(key).fold(0, |sum, (a, b)| sum | (a ^ b));
            if std::hint::black_box(difference) == 0 { Some(caller) } else { found }
        })
    }
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    };
    bearer().or_else(|| headers.get(X_API_KEY)?.to_str().ok().map(str::trim))
}

/// Lets a request pass that brings a key, if keys are configured.
pub(super) async fn check(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if OPEN.contains(&path) || studio::is_page(request.method(), path) {
        return next.run(request).await;
    }
    let keys = app.keys();
    let caller = match keys.caller(request.headers()) {
        Ok(caller) => Arc::clone(caller),
        Err(message) => {
            keys.strangers.fetch_add(1, Ordering::Relaxed);
            return ApiError::refused(StatusCode::UNAUTHORIZED, message)
                .code("invalid_api_key")
                .header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
                .into_response();
        }
    };
    if let Some(name) = caller.account.name() {
        tracing::Span::current().record("key", name);
    }
    request.extensions_mut().insert(Arc::clone(&caller));
    ACCOUNT.scope(Arc::clone(&caller.account), next.run(request)).await
}

/// Takes a request that is to generate out of its caller's share, whatever becomes of it, and tells what is left when the
/// answer begins.
pub(super) async fn spend(request: Request, next: Next) -> Response {
    let Some(caller) = request.extensions().get::<Arc<Caller>>().cloned() else {
        return next.run(request).await;
    };
    let mut response = match caller.take() {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    };
    let used = caller.account.tokens();
    caller.with_shares(|shares| shares.tell(response.headers_mut(), Instant::now(), used));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ApiKey, Config, Secret};
    use crate::engine::Usage;

    fn server(keys: &[(&str, &str, Option<u64>)]) -> ServerConfig {
        let mut server =
            Config::from_sources(None, std::collections::BTreeMap::new(), Vec::new()).unwrap().server;
        server.api_keys = keys
            .iter()
            .map(|(name, key, requests)| ApiKey {
                name: (*name).to_owned(),
                secret: Secret::new(*key),
                limits: RateLimits { requests: *requests, tokens: None },
            })
            .collect();
        server
    }

    fn asking(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))])
    }

    #[test]
    fn a_key_is_its_owners_and_nobody_elses() {
        let keys = Keys::new(&server(&[("a", "one", None), ("b", "two", None)]));
        let owner = |key| keys.owner(key).and_then(|caller| caller.account.name());
        assert_eq!((owner("one"), owner("two")), (Some("a"), Some("b")));
        for wrong in ["", "on", "one ", "ONE", "onetwo"] {
            assert_eq!(owner(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn keys_come_in_either_header() {
        let keys = Keys::new(&server(&[("a", "one", None)]));
        for headers in [
            asking("authorization", "Bearer one"),
            asking("authorization", "bearer  one "),
            asking("x-api-key", "one"),
        ] {
            assert!(keys.caller(&headers).is_ok(), "{headers:?}");
        }
        for headers in [asking("authorization", "Basic one"), asking("x-api-key", "two"), HeaderMap::new()] {
            assert!(keys.caller(&headers).is_err(), "{headers:?}");
        }
        assert!(Keys::new(&server(&[])).caller(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn who_keeps_a_name_keeps_an_account_and_what_is_left() {
        let keys = Keys::new(&server(&[("a", "one", Some(1)), ("b", "two", Some(1))]));
        let spent = Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() };
        for key in ["one", "two"] {
            let caller = keys.owner(key).unwrap();
            caller.take().unwrap();
            assert!(caller.take().is_err());
            caller.account.add(spent);
        }
        // The first got another key, the second another limit.
        let renewed =
            keys.renewed(&server(&[("a", "new", Some(1)), ("b", "two", Some(5)), ("c", "x", None)]));
        assert!(renewed.owner("one").is_none());
        let [a, b] = ["new", "two"].map(|key| renewed.owner(key).unwrap());
        assert_eq!((a.account.tokens(), b.account.tokens()), (7, 7));
        assert_eq!(b.requests.load(Ordering::Relaxed), 2);
        assert!(a.take().is_err() && b.take().is_ok());
        // What ends later is still counted in the same place.
        keys.owner("two").unwrap().account.add(spent);
        assert_eq!(b.account.tokens(), 14);
    }
}
