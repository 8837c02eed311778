//! `GET /metrics`: Prometheus' text format.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::App;
use super::auth::{Caller, Keys};
use crate::engine::{Histogram, Status};

pub(super) async fn show(State(app): State<Arc<App>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, render(&app.engine.status(), &app.keys())).into_response()
}

fn render(status: &Status, keys: &Keys) -> String {
    let mut page = Page(String::with_capacity(4096));
    let c = &status.counters;
    let r = c.requests;
    page.family(
        "axe_requests_total",
        "counter",
        "Requests to generate by how they ended, once for all choices.",
    );
    for (outcome, count) in [
        ("stop", r.stop),
        ("length", r.length),
        ("cancelled", r.cancelled),
        ("error", r.error),
        ("rejected", r.rejected),
    ] {
        page.labelled("axe_requests_total", "outcome", outcome, count);
    }
    page.single(
        "axe_prompt_tokens_total",
        "counter",
        "Prompt tokens, reused ones included.",
        c.prompt_tokens,
    );
    page.single(
        "axe_cached_tokens_total",
        "counter",
        "Prompt tokens reused from the request before.",
        c.cached_tokens,
    );
    page.single("axe_completion_tokens_total", "counter", "Tokens generated.", c.completion_tokens);
    page.single("axe_passes_total", "counter", "Forward passes after prefill.", c.passes);
    page.single("axe_denoising_steps_total", "counter", "Denoising steps.", c.denoising_steps);
    page.single("axe_canvases_total", "counter", "Canvases begun.", c.canvases);
    page.histogram("axe_canvas_steps", "Denoising steps of a finished canvas.", &c.canvas_steps);
    page.single("axe_rows_total", "counter", "Rows of passes that generate in blocks.", c.rows);
    page.family("axe_guesses_offered_total", "counter", "Guesses evaluated in blocks.");
    for guesses in &c.guesses {
        page.labelled("axe_guesses_offered_total", "by", guesses.by, guesses.offered);
    }
    page.family("axe_guesses_accepted_total", "counter", "Guesses that the model chose, too.");
    for guesses in &c.guesses {
        page.labelled("axe_guesses_accepted_total", "by", guesses.by, guesses.accepted);
    }
    page.single("axe_prefill_seconds_total", "counter", "Time spent encoding prompts.", c.prefill_s);
    page.single("axe_decode_seconds_total", "counter", "Time spent generating.", c.decode_s);
    page.histogram("axe_first_token_seconds", "Time from acceptance to the first token.", &c.first_token_s);
    page.histogram("axe_tokens_per_second", "Tokens a second after the first ones.", &c.tokens_per_s);
    page.single("axe_queue_depth", "gauge", "Requests that wait.", status.queue.depth);
    page.single("axe_queue_capacity", "gauge", "Requests that may wait.", status.queue.capacity);
    page.single("axe_running", "gauge", "Requests in the slot.", u8::from(status.running.is_some()));
    page.single(
        "axe_ready",
        "gauge",
        "Whether requests are taken.",
        u8::from(status.state.name() == "ready"),
    );
    let faults = c.faults;
    page.family("axe_faults_total", "counter", "Faults of the device and of the engine, by kind.");
    for (kind, count) in [
        ("lost", faults.lost),
        ("overdue", faults.overdue),
        ("panic", faults.panics),
        ("rebuild", faults.rebuilds),
    ] {
        page.labelled("axe_faults_total", "kind", kind, count);
    }
    page.single(
        "axe_engine_resets_total",
        "counter",
        "Times the engine was rebuilt after a fault.",
        c.resets,
    );
    page.single("axe_model_loads_total", "counter", "Times the model was loaded again.", c.loads);
    page.single("axe_model_unloads_total", "counter", "Times the model was put away.", c.unloads);
    page.single(
        "axe_model_loaded",
        "gauge",
        "Whether the model is on the device.",
        u8::from(status.resident),
    );
    page.single("axe_uptime_seconds", "gauge", "Time since the start.", status.uptime_s);
    page.family("axe_device_memory_bytes", "gauge", "Memory allocated on the device.");
    for (purpose, bytes) in [
        ("weights", status.memory.weights),
        ("kv_cache", status.memory.kv_cache),
        ("scratch", status.memory.scratch),
    ] {
        page.labelled("axe_device_memory_bytes", "purpose", purpose, bytes);
    }
    page.single(
        "axe_device_memory_budget_bytes",
        "gauge",
        "Most memory that may be allocated on the device.",
        status.memory.budget,
    );
    page.keys(keys);
    if let Some(bytes) = resident_bytes() {
        page.single("process_resident_memory_bytes", "gauge", "Resident memory of the process.", bytes);
    }
    page.0
}

/// Resident memory as the kernel counts it.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    pages.checked_mul(u64::try_from(page).ok()?)
}

/// The text under construction. Writing to a string cannot fail, so results of `write!` are dropped.
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _written = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// What was asked for with each key, where keys are asked for.
    fn keys(&mut self, keys: &Keys) {
        if !keys.asked_for() {
            return;
        }
        let strangers = keys.strangers.load(Ordering::Relaxed);
        let text = "Requests without a key, or with a wrong one.";
        self.single("axe_unauthorized_requests_total", "counter", text, strangers);
        let named: Vec<_> = keys.callers().filter_map(|c| Some((c.account.name()?, c))).collect();
        type Count = fn(&Caller) -> u64;
        let families: [(&str, &str, Count); 4] = [
            ("axe_key_requests_total", "Requests to routes that generate, by key.", |c| {
                c.requests.load(Ordering::Relaxed)
            }),
            ("axe_key_rate_limited_total", "Those of them that were too many.", |c| {
                c.refused.load(Ordering::Relaxed)
            }),
            ("axe_key_prompt_tokens_total", "Prompt tokens, by key.", |c| c.account.prompt_tokens()),
            ("axe_key_completion_tokens_total", "Tokens generated, by key.", |c| {
                c.account.completion_tokens()
            }),
        ];
        for (family, help, count) in families {
            self.family(family, "counter", help);
            for (name, caller) in &named {
                self.labelled(family, "key", name, count(caller));
            }
        }
    }

    fn labelled(&mut self, name: &str, label: &str, value: &str, number: impl Display) {
        let _written = writeln!(self.0, "{name}{{{label}=\"{value}\"}} {number}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, number: impl Display) {
        self.family(name, kind, help);
        let _written = writeln!(self.0, "{name} {number}");
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
            below += count;
            self.labelled(&format!("{name}_bucket"), "le", &bound.to_string(), below);
        }
        let all = histogram.count();
        self.labelled(&format!("{name}_bucket"), "le", "+Inf", all);
        let _written = write!(self.0, "{name}_sum {}\n{name}_count {all}\n", histogram.sum);
    }
}
