//! How much one caller may ask for: a share that grows back by the minute.
//!
//! What is left of a share is told in the headers that OpenAI's clients know, `x-ratelimit-limit-requests` and so on.

use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::config::RateLimits;

/// Shares are those of a minute.
const MINUTE: f64 = 60.0;

/// A share: full at first, growing by its size a minute, never more than full.
#[derive(Debug, Clone, Copy)]
struct Share {
    size: f64,
    left: f64,
}

impl Share {
    fn new(size: u64) -> Self {
        Self { size: size as f64, left: size as f64 }
    }

    fn grow(&mut self, by: Duration) {
        self.left = (self.left + by.as_secs_f64() * self.size / MINUTE).min(self.size);
    }

    /// Time until `wanted` is there.
    fn wait(&self, wanted: f64) -> Duration {
        Duration::from_secs_f64(((wanted - self.left) * MINUTE / self.size).max(0.0))
    }
}

/// What is left to one caller.
#[derive(Debug)]
pub(super) struct Shares {
    requests: Option<Share>,
    tokens: Option<Share>,
    /// Those of requests and of tokens where there is no limit, but was one: what was used of it grows back meanwhile.
    lifted: [Option<Share>; 2],
    looked: Instant,
    /// Tokens used in all, as far as they are counted here.
    used: u64,
}

/// A request that may not be served now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Exhausted {
    /// What there is none left of: `requests` or `tokens`.
    pub(super) what: &'static str,
    /// How many there are a minute.
    pub(super) limit: u64,
    /// When to ask again.
    pub(super) wait: Duration,
}

impl Shares {
    pub(super) fn new(limits: RateLimits, now: Instant, used: u64) -> Self {
        let [requests, tokens] = [limits.requests, limits.tokens].map(|limit| limit.map(Share::new));
        Self { requests, tokens, lifted: [None; 2], looked: now, used }
    }

    /// The same under other limits: what was used of the old ones is used of these, and of later ones.
    pub(super) fn under(&mut self, limits: RateLimits, now: Instant, used: u64) -> Self {
        self.look(now, used);
        let mut new = Self::new(limits, now, used);
        let old = [self.requests.or(self.lifted[0]), self.tokens.or(self.lifted[1])];
        for (place, (new_share, old)) in [&mut new.requests, &mut new.tokens].into_iter().zip(old).enumerate()
        {
            match (new_share, old) {
                (Some(new), Some(old)) => new.left -= old.size - old.left,
                (None, old) => new.lifted[place] = old,
                (Some(_), None) => {}
            }
        }
        new
    }

    /// Takes one request out of its share. `used` are all tokens that were ever used; they are paid for when they are
    /// known, so that a share may be overdrawn by what runs at one time.
    pub(super) fn take(&mut self, now: Instant, used: u64) -> Result<(), Exhausted> {
        self.look(now, used);
        if let Some(tokens) = self.tokens.filter(|tokens| tokens.left < 1.0) {
            return Err(Exhausted { what: "tokens", limit: tokens.size as u64, wait: tokens.wait(1.0) });
        }
        if let Some(requests) = &mut self.requests {
            if requests.left < 1.0 {
                let (limit, wait) = (requests.size as u64, requests.wait(1.0));
                return Err(Exhausted { what: "requests", limit, wait });
            }
            requests.left -= 1.0;
        }
        Ok(())
    }

    fn look(&mut self, now: Instant, used: u64) {
        let passed = now.saturating_duration_since(self.looked);
        self.looked = now;
        let spent = used.saturating_sub(self.used);
        self.used = used;
        let limited = [&mut self.requests, &mut self.tokens];
        limited.into_iter().chain(&mut self.lifted).flatten().for_each(|share| share.grow(passed));
        if let Some(tokens) = &mut self.tokens {
            tokens.left -= spent as f64;
        }
    }

    /// Tells what is left, with what was used up to now.
    pub(super) fn tell(&mut self, headers: &mut HeaderMap, now: Instant, used: u64) {
        self.look(now, used);
        let names = [
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ];
        for (share, [limit, remaining, reset]) in [self.requests, self.tokens].into_iter().zip(names) {
            let Some(share) = share else { continue };
            let mut put = |name: &'static str, value: HeaderValue| {
                headers.insert(HeaderName::from_static(name), value);
            };
            put(limit, HeaderValue::from(share.size as u64));
            put(remaining, HeaderValue::from(share.left.max(0.0) as u64));
            if let Ok(time) = HeaderValue::from_str(&words(share.wait(share.size))) {
                put(reset, time);
            }
        }
    }
}

/// A time as `6m0s`, `1s` or `20ms`, which is how OpenAI writes it.
fn words(time: Duration) -> String {
    let millis = time.as_millis();
    let (minutes, seconds) = (millis / 60_000, millis.div_ceil(1000) % 60);
    match millis {
        0..1000 => format!("{millis}ms"),
        1000..=59_000 => format!("{}s", millis.div_ceil(1000)),
        _ if seconds == 0 => format!("{}m0s", millis.div_ceil(60_000)),
        _ => format!("{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(requests: Option<u64>, tokens: Option<u64>) -> (Shares, Instant) {
        let now = Instant::now();
        (Shares::new(RateLimits { requests, tokens }, now, 0), now)
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn requests_run_out_and_grow_back() {
        let (mut shares, now) = shares(Some(2), None);
        assert_eq!([shares.take(now, 0), shares.take(now, 0)], [Ok(()), Ok(())]);
        let refused = shares.take(now, 0).unwrap_err();
        assert_eq!((refused.what, refused.limit, refused.wait), ("requests", 2, seconds(30.0)));
        // A refusal costs nothing.
        assert_eq!(shares.take(now + seconds(15.0), 0).unwrap_err().wait, seconds(15.0));
        assert_eq!(shares.take(now + seconds(30.0), 0), Ok(()));
        // Never more than a minute's worth.
        let later = now + seconds(3600.0);
        assert_eq!([shares.take(later, 0), shares.take(later, 0)], [Ok(()), Ok(())]);
        assert!(shares.take(later, 0).is_err());
    }

    #[test]
    fn tokens_are_paid_for_afterwards() {
        let (mut shares, now) = shares(Some(100), Some(600));
        assert_eq!(shares.take(now, 0), Ok(()));
        assert_eq!(shares.take(now, 599), Ok(()));
        // 100 too many: gone after 10 s, and the first whole token 0.1 s later.
        let refused = shares.take(now, 700).unwrap_err();
        assert_eq!((refused.what, refused.limit, refused.wait), ("tokens", 600, seconds(10.1)));
        assert_eq!(shares.take(now + seconds(10.2), 700), Ok(()));
    }

    #[test]
    fn other_limits_forget_nothing() {
        let (mut shares, now) = shares(Some(3), Some(600));
        assert_eq!(
            [shares.take(now, 0), shares.take(now, 0), shares.take(now, 300)],
            [Ok(()), Ok(()), Ok(())]
        );
        let limits = |requests, tokens| RateLimits { requests, tokens };
        let mut more = shares.under(limits(Some(5), Some(400)), now, 450);
        assert_eq!(
            [more.take(now, 450), more.take(now, 450)].map(|taken| taken.err()),
            [
                // 450 of 400.
                Some(Exhausted { what: "tokens", limit: 400, wait: seconds(7.65) }),
                Some(Exhausted { what: "tokens", limit: 400, wait: seconds(7.65) }),
            ]
        );
        let mut more = shares.under(limits(Some(5), None), now, 450);
        assert_eq!([more.take(now, 450), more.take(now, 450)], [Ok(()), Ok(())]);
        assert_eq!(more.take(now, 450).unwrap_err().wait, seconds(12.0));
        // A limit where there was none begins with all of it, and what has grown back counts.
        let later = now + seconds(20.0);
        let mut fewer = shares.under(limits(Some(2), None), later, 450);
        assert_eq!(fewer.take(later, 450).unwrap_err().wait, seconds(30.0));
        let (mut free, now) = self::shares(None, None);
        free.take(now, 0).unwrap();
        assert_eq!(free.under(limits(Some(1), None), now, 0).take(now, 0), Ok(()));
    }

    #[test]
    fn a_limit_that_was_lifted_for_a_while_forgets_nothing() {
        let (mut shares, now) = shares(Some(6), Some(600));
        for _ in 0..6 {
            shares.take(now, 0).unwrap();
        }
        let limits = |requests, tokens| RateLimits { requests, tokens };
        let mut free = shares.under(limits(None, None), now, 600);
        // What is not limited is not counted.
        free.take(now, 700).unwrap();
        let mut free = free.under(limits(None, None), now, 800);
        let later = now + seconds(5.0);
        let mut again = free.under(limits(Some(6), None), later, 900);
        assert_eq!(again.take(later, 900).unwrap_err().wait, seconds(5.0));
        assert_eq!(again.take(now + seconds(10.0), 900), Ok(()));
        let mut both = again.under(limits(Some(6), Some(600)), now + seconds(10.0), 900);
        let refused = both.take(now + seconds(10.0), 900).unwrap_err();
        assert_eq!(
            (refused.what, refused.wait),
            ("requests", seconds(10.0)),
            "tokens have grown back to 100"
        );
    }

    #[test]
    fn what_is_left_is_told() {
        let (mut shares, now) = shares(Some(60), Some(1000));
        shares.take(now, 100).unwrap();
        let mut headers = HeaderMap::new();
        // The request itself has used some by now.
        shares.tell(&mut headers, now, 250);
        for (name, value) in [
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-limit-tokens", "1000"),
            ("x-ratelimit-remaining-tokens", "750"),
            ("x-ratelimit-reset-tokens", "15s"),
        ] {
            assert_eq!(headers[name], value, "{name}");
        }
        let mut none = HeaderMap::new();
        Shares::new(RateLimits::default(), now, 0).tell(&mut none, now, 9);
        assert!(none.is_empty());
    }

    #[test]
    fn times_read_as_openai_writes_them() {
        let shown = [0.0, 0.02, 1.0, 1.2, 59.5, 60.0, 61.5, 119.5, 360.0].map(|s| words(seconds(s)));
        assert_eq!(shown, ["0ms", "20ms", "1s", "2s", "1m0s", "1m0s", "1m2s", "2m0s", "6m0s"]);
    }
}
