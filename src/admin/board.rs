//! What operators look at and act on: the engine, and what the loading code pins up about device and model.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axectl::protocol::{
    Config, Counters, Device, Drain, Faults, Gpu, Job, JobState, Kernels, Loading, Memory, Model, Profile,
    Queue, ReloadState, Source, State, Status,
};

use crate::{
    device::telemetry::Sampler,
    engine::{self, EngineHandle, Occasion, Phase},
};

/// The daemon as its operators see it. All methods answer from what is at hand; none waits for the device.
pub struct Board {
    engine: EngineHandle,
    facts: Mutex<Facts>,
    sampler: Mutex<Sampler>,
}

/// What is known once it is known.
#[derive(Default)]
struct Facts {
    config: Config,
    listen: Option<String>,
    device: Option<Device>,
    model: Option<Model>,
    kernels: Option<Kernels>,
    profile: Profile,
    warnings: Vec<String>,
    /// Those of the present configuration.
    config_warnings: Vec<String>,
    /// The log's level, if the operator has set it since the configuration did.
    level: Option<String>,
    /// Those of the present model.
    model_warnings: Vec<String>,
    reload: Reloading,
    /// When a reload last began to change something.
    changed: Option<Instant>,
}

/// What is known of reloads.
#[derive(Debug, Clone, Default)]
pub enum Reloading {
    /// There was none.
    #[default]
    Never,
    /// One has been going on since then.
    Since(Instant),
    /// The last one ended then: with what changed, or why nothing did.
    Ended(Instant, Result<String, String>),
}

impl Board {
    /// The board of `engine`, with the configuration in force as it may be shown (secrets hidden), and a sampler
    /// that need not know the card yet.
    pub fn new(engine: EngineHandle, config: Config, sampler: Sampler) -> Self {
        let facts = Facts { config, ..Facts::default() };
        Self { engine, facts: Mutex::new(facts), sampler: Mutex::new(sampler) }
    }

    /// Shows another configuration from now on.
    pub fn pin_config(&self, config: Config) {
        self.facts().config = config;
    }

    /// Shows the level that the operator has set for the log, or again that of the configuration.
    pub fn pin_level(&self, level: Option<String>) {
        self.facts().level = level;
    }

    /// Pins up what there is to warn of about the present configuration, instead of what there was about the one before;
    /// what is new of it is told in the log.
    pub fn pin_config_warnings(&self, warnings: &[String]) {
        let before = std::mem::replace(&mut self.facts().config_warnings, warnings.to_vec());
        for warning in warnings.iter().filter(|warning| !before.contains(warning)) {
            tracing::warn!("{warning}");
        }
    }

    /// Notes that a reload has begun, or how it has ended.
    pub fn pin_reload(&self, reload: Reloading) {
        self.facts().reload = reload;
    }

    /// Notes that a reload changes something, or loads a model to do so.
    pub fn pin_change(&self) {
        self.facts().changed = Some(Instant::now());
    }

    /// Whether a reload has begun to change something since then.
    pub(super) fn changed_since(&self, then: Instant) -> bool {
        self.facts().changed.is_some_and(|changed| changed >= then)
    }

    /// What is known of reloads.
    pub(super) fn reload(&self) -> Reloading {
        self.facts().reload.clone()
    }

    /// Pins up where the public HTTP interface listens, e.g. `http://127.0.0.1:8080`.
    pub fn pin_address(&self, listen: impl Into<String>) {
        self.facts().listen = Some(listen.into());
    }

    /// Pins up a device if none is.
    pub fn pin_first_device(&self, device: &Device) {
        if self.facts().device.is_none() {
            self.pin_device(device.clone());
        }
    }

    /// Pins up the device in use, and warns, here and in the log, of what is known to go wrong with it.
    pub fn pin_device(&self, device: Device) {
        if self.facts().device.as_ref() == Some(&device) {
            return;
        }
        let warnings = {
            let mut sampler = lock(&self.sampler);
            if let Some(pci) = &device.pci {
                sampler.look_at(pci, Some(device.memory_bytes));
            }
            sampler.sample().warnings
        };
        self.facts().device = Some(device);
        for warning in warnings {
            self.warn(warning);
        }
    }

    /// Pins up the model that is loaded.
    pub fn pin_model(&self, model: Model) {
        self.facts().model = Some(model);
    }

    /// Pins up what there is to warn of about the present model, instead of what there was about the one before.
    pub fn pin_warnings(&self, warnings: Vec<String>) {
        self.facts().model_warnings = warnings;
    }

    /// Pins up the kernels in use, and how they did against their references.
    pub fn pin_kernels(&self, kernels: Kernels) {
        self.facts().kernels = Some(kernels);
    }

    /// Pins up the kernels' times, which only the engine's thread can read.
    pub fn pin_profile(&self, mut profile: Profile) {
        profile.kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.total_ns));
        self.facts().profile = profile;
    }

    /// Warns the operator: in the log now, and in the status for as long as the daemon runs.
    pub fn warn(&self, warning: impl Into<String>) {
        let warning = warning.into();
        tracing::warn!("{warning}");
        let warnings = &mut self.facts().warnings;
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    /// The configuration in force.
    pub(super) fn config(&self) -> Config {
        let facts = self.facts();
        let mut config = facts.config.clone();
        let level = config.settings.iter_mut().find(|setting| setting.key == "log.level");
        if let (Some(setting), Some(level)) = (level, &facts.level) {
            setting.value = level.as_str().into();
            setting.source = Source::Operator;
            setting.place = Some("axectl log-level".to_owned());
        }
        config
    }

    /// The job on the device, if any.
    pub fn running_id(&self) -> Option<String> {
        self.engine.status().running.map(|job| job.id)
    }

    /// The engine that is looked at.
    pub(super) fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Time per kernel.
    pub(super) fn profile(&self) -> Profile {
        self.facts().profile.clone()
    }

    /// The daemon as a whole.
    pub(super) fn status(&self) -> Status {
        let now = self.engine.status();
        let facts = self.facts();
        let (state, reason) = state(&now.state);
        let counters = &now.counters;
        Status {
            state,
            reason,
            version: super::version(),
            pid: std::process::id(),
            uptime_s: now.uptime_s,
            listen: facts.listen.clone(),
            device: facts.device.clone(),
            model: facts.model.clone(),
            kernels: facts.kernels.clone(),
            memory: memory(&now),
            running: running(&now),
            waiting: now.queue.depth,
            capacity: now.queue.capacity,
            counters: Counters {
                finished: counters.requests.stop + counters.requests.length,
                cancelled: counters.requests.cancelled,
                failed: counters.requests.error,
                rejected: counters.requests.rejected,
                prompt_tokens: counters.prompt_tokens,
                cached_tokens: counters.cached_tokens,
                completion_tokens: counters.completion_tokens,
                prefill_s: counters.prefill_s,
                decode_s: counters.decode_s,
            },
            unloaded: facts.model.is_some() && !now.resident && now.state == engine::State::Ready,
            loading: now.successor.as_ref().or(now.loading.as_ref()).map(loading),
            reload: facts.reload.state(),
            faults: Faults {
                lost: counters.faults.lost,
                overdue: counters.faults.overdue,
                panics: counters.faults.panics,
                rebuilds: counters.faults.rebuilds,
                resets: counters.resets,
            },
            warnings: [&facts.warnings, &facts.config_warnings, &facts.model_warnings]
                .into_iter()
                .flatten()
                .cloned()
                .collect(),
        }
    }

    /// The jobs at hand.
    pub(super) fn queue(&self) -> Queue {
        let now = self.engine.status();
        let running = running(&now);
        // Further choices of the running request wait under its name, and take no place of their own.
        let others = now.queue.jobs.iter().filter(|job| running.as_ref().is_none_or(|now| now.id != job.id));
        let waiting = others.map(|job| Job {
            id: job.id.clone(),
            state: JobState::Waiting,
            prompt_tokens: job.prompt_tokens,
            prefilled_tokens: 0,
            completion_tokens: 0,
            elapsed_s: job.waited_s,
        });
        Queue {
            waiting: waiting.collect(),
            running,
            capacity: now.queue.capacity,
            draining: matches!(now.state, engine::State::Draining | engine::State::Stopped),
        }
    }

    /// What the kernel shows, with what the engine knows of the device. Reads files, so it may take a while.
    pub(super) fn gpu(&self) -> Gpu {
        let mut gpu = lock(&self.sampler).sample();
        if let Some(device) = self.facts().device.clone() {
            gpu.name = Some(device.name);
            gpu.opencl_driver = Some(device.driver);
        }
        gpu.memory = memory(&self.engine.status());
        gpu
    }

    /// Cancels the job `id`; says what it was doing, `None` when there is no such job.
    pub(super) fn cancel(&self, id: &str) -> Option<JobState> {
        let queue = self.queue();
        // Between this look and the next call a waiting job may start, which changes the word and nothing else.
        let was = queue.running.iter().chain(&queue.waiting).find(|job| job.id == id)?.state;
        self.engine.cancel(id).then_some(was)
    }

    /// Has the engine take no job from now on and end when those at hand are done.
    pub(super) fn drain(&self) -> Drain {
        self.engine.drain();
        let now = self.engine.status();
        Drain { running: usize::from(now.running.is_some()), waiting: now.queue.depth }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        lock(&self.facts)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn state(state: &engine::State) -> (State, Option<String>) {
    match state {
        engine::State::Loading { progress, what } => {
            (State::Loading, Some(format!("{what}, {:.0} %", progress * 100.0)))
        }
        engine::State::Ready => (State::Ready, None),
        engine::State::Draining => (State::Draining, None),
        engine::State::Stopped => (State::Stopped, None),
        engine::State::Failed { error } | engine::State::Hung { error } => {
            (State::Failed, Some(error.clone()))
        }
    }
}

fn loading(loading: &engine::Loading) -> Loading {
    let occasion = match loading.occasion {
        Occasion::Start => "start",
        Occasion::Fault => "fault",
        Occasion::Demand => "demand",
        Occasion::Reload => "reload",
    };
    Loading { occasion: occasion.to_owned(), what: loading.what.clone(), progress: loading.progress }
}

impl Reloading {
    fn state(&self) -> Option<ReloadState> {
        let (running, since, outcome) = match self {
            Self::Never => return None,
            Self::Since(since) => (true, since, None),
            Self::Ended(since, outcome) => (false, since, Some(outcome)),
        };
        let message = outcome.map(|outcome| outcome.clone().unwrap_or_else(|error| error));
        Some(ReloadState {
            running,
            since_s: since.elapsed().as_secs_f64(),
            succeeded: outcome.map(Result::is_ok),
            message: message.unwrap_or_default(),
        })
    }
}

fn running(now: &engine::Status) -> Option<Job> {
    now.running.as_ref().map(|job| Job {
        id: job.id.clone(),
        state: match job.phase {
            Phase::Prefill => JobState::Prefill,
            Phase::Generate => JobState::Generating,
        },
        prompt_tokens: job.prompt_tokens,
        prefilled_tokens: job.prefilled,
        completion_tokens: job.committed,
        elapsed_s: job.elapsed_s,
    })
}

/// `None` until something is allocated.
fn memory(now: &engine::Status) -> Option<Memory> {
    let memory = now.memory;
    let total = memory.weights + memory.kv_cache + memory.scratch;
    (total > 0).then_some(Memory {
        weights_bytes: memory.weights,
        kv_cache_bytes: memory.kv_cache,
        scratch_bytes: memory.scratch,
        total_bytes: total,
        budget_bytes: memory.budget,
    })
}
