//! What is chosen at start where the configuration leaves it open: context, rows of a pass, kernels. A function of facts
//! and of nothing else, so that `axed plan` says what `axed serve` does.

use thiserror::Error;

use super::family::{KernelFacts, products_name};
use crate::decode::block::{Costs, MOST_ROWS};
use crate::decode::{BackendError, BlockSize};
use crate::device::DeviceKind;
use crate::model::MemoryPlan;
use crate::ops::Products;

/// Context where the model would allow more and the device's memory is others', too.
pub const DEFAULT_CONTEXT: usize = 8192;
/// Prompt tokens in one pass on a CPU: enough rows to make a pass compute-bound, few enough to cancel soon.
pub const DEFAULT_CHUNK: usize = 256;
/// The same on other devices, whose units are many.
const WIDE_CHUNK: usize = 512;
/// Fewer rows make prefill slow; memory is saved at the context before.
const LEAST_CHUNK: usize = 64;
/// A shorter context is of no use to anybody who did not ask for it.
const LEAST_CONTEXT: usize = 512;

/// Everything the choice depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// What the device is.
    pub device: DeviceFacts,
    /// What the model is.
    pub model: ModelFacts,
    /// What kernels depend on.
    pub kernels: KernelFacts,
    /// What else the configuration says.
    pub wanted: Wanted,
}

/// What the choice depends on of the device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceFacts {
    /// What it is.
    pub kind: DeviceKind,
    /// Whether its memory is the host's.
    pub unified: bool,
    /// Most bytes that may be allocated: what it has, or what the configuration says.
    pub budget: u64,
    /// Bytes of the host's memory that are free now or could be, where they count and are known.
    pub available: Option<u64>,
}

/// What the choice depends on of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// Positions it was trained for.
    pub trained: usize,
    /// Rows of a canvas of a model that denoises.
    pub canvas: Option<usize>,
    /// What passes of few rows took at an earlier start, of a causal model.
    pub costs: Option<Costs>,
}

/// What the configuration says; `None` leaves the choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// `model.context_length`
    pub context: Option<usize>,
    /// `device.prefill_chunk`
    pub rows: Option<usize>,
    /// `decode.block_size`
    pub blocks: BlockSize,
}

/// What memory depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Positions of a request, prompt and output together.
    pub context: usize,
    /// Most prompt tokens in a pass.
    pub rows: usize,
    /// How products of many rows are made.
    pub products: Products,
}

/// What was chosen, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The choice.
    pub shape: Shape,
    /// What the model takes with it.
    pub memory: MemoryPlan,
    /// Why, point by point.
    pub reasons: Vec<Reason>,
    /// What the operator should know.
    pub warnings: Vec<String>,
}

/// Why one thing was chosen.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Reason {
    /// The thing: `context`, `chunk`, `kernels` or `blocks`.
    pub what: &'static str,
    /// What was chosen.
    pub value: String,
    /// Why.
    pub why: String,
}

/// The model does not fit, whatever is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the model needs {} MiB of device memory ({} MiB weights, {} MiB for a context of {} tokens, {} MiB scratch), the \
     limit is {} MiB: {}",
    mib(total(memory)), mib(memory.weights as u64), mib(memory.kv_cache as u64), shape.context, mib(memory.scratch as u64),
    budget >> 20, self.advice()
)]
pub struct NoRoom {
    /// The least that was tried.
    pub shape: Shape,
    /// What it would take.
    pub memory: MemoryPlan,
    /// Most bytes that may be allocated.
    pub budget: u64,
    /// The longest context that would fit, if one of at least 512 positions does.
    pub would_fit: Option<usize>,
}

impl NoRoom {
    fn advice(&self) -> String {
        match self.would_fit {
            Some(context) => format!("a context of {context} tokens would fit ([model] context_length)"),
            None => "no context would fit; choose a smaller model, or one with smaller weights, or give it more memory \
                     ([device] memory_limit_mib, or another device)"
                .to_owned(),
        }
    }
}

fn total(plan: &MemoryPlan) -> u64 {
    (plan.weights + plan.kv_cache + plan.scratch) as u64
}

/// Rounded up: what is said to be needed must be enough.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Chooses. `cost` says what the model takes on the device.
///
/// # Errors
/// [`NoRoom`], with what would fit; what `cost` says.
pub fn choose(
    facts: &Facts,
    cost: impl Fn(Shape) -> Result<MemoryPlan, BackendError>,
) -> Result<Choice, BackendError> {
    let (products, why) = facts.kernels.products(facts.model.canvas.is_some());
    let kernels = Reason { what: "kernels", value: products_name(products).to_owned(), why: why.to_owned() };
    let chooser = Chooser { facts, cost: &cost, products };
    let mut warnings = Vec::new();
    let (wish, why) = chooser.wished_context(&mut warnings)?;
    let (found, short) = match chooser.fit(wish, chooser.room())? {
        Some(found) => (found, false),
        // What is free now is a guess at what there will be; only the budget is a limit.
        None => match chooser.fit(chooser.least_context(wish), facts.device.budget)? {
            Some(found) => (found, true),
            None => return Err(chooser.no_room(wish)?.into()),
        },
    };
    let (shape, memory) = found;
    if let Some(available) = facts.device.available.filter(|_| short) {
        warnings.push(format!(
            "the model takes {} MiB, and {} MiB of memory are free now: expect the system to swap; end other programs, or \
             choose a smaller context (model.context_length)",
            mib(total(&memory)),
            available >> 20
        ));
    }
    let context_why = if shape.context < wish {
        format!("the longest that fits of {wish} ({why}) and its halves: {}", chooser.limit_words(short))
    } else {
        why
    };
    let mut reasons = vec![
        Reason { what: "context", value: format!("{} tokens", shape.context), why: context_why },
        Reason { what: "chunk", value: format!("{} rows", shape.rows), why: chooser.why_rows(shape) },
        kernels,
    ];
    reasons.extend(facts.model.canvas.is_none().then(|| blocks(facts)));
    Ok(Choice { shape, memory, reasons, warnings })
}

/// Rows of a pass after the prompt. How many of them are guesses is decided pass by pass.
fn blocks(facts: &Facts) -> Reason {
    let (value, why) = match (facts.wanted.blocks, &facts.model.costs) {
        (BlockSize::Fixed(1), _) => {
            ("1 row".to_owned(), "decode.block_size says so: nothing is guessed".to_owned())
        }
        (BlockSize::Fixed(rows), _) => (format!("{rows} rows"), "decode.block_size says so".to_owned()),
        (BlockSize::Auto, costs) => {
            let why = match costs {
                Some(costs) => {
                    let ms = [1, 2, 4, 8, MOST_ROWS]
                        .map(|rows| format!("{rows} in {:.1}", 1000.0 * costs.of(rows)));
                    format!("as many as pay: rows and milliseconds of a pass were {}", ms.join(", "))
                }
                None => "as many as pay: passes are timed at the first start".to_owned(),
            };
            (format!("1 to {MOST_ROWS} rows"), why)
        }
    };
    Reason { what: "blocks", value, why }
}

struct Chooser<'a, C> {
    facts: &'a Facts,
    cost: &'a C,
    products: Products,
}

impl<C: Fn(Shape) -> Result<MemoryPlan, BackendError>> Chooser<'_, C> {
    /// Bytes to keep to if that can be done.
    fn room(&self) -> u64 {
        let device = &self.facts.device;
        device.budget.min(device.available.unwrap_or(u64::MAX))
    }

    fn cost(&self, context: usize, rows: usize) -> Result<(Shape, MemoryPlan), BackendError> {
        let shape = Shape { context, rows, products: self.products };
        Ok((shape, (self.cost)(shape)?))
    }

    /// The context to begin with, and why.
    fn wished_context(&self, warnings: &mut Vec<String>) -> Result<(usize, String), BackendError> {
        let trained = self.facts.model.trained;
        match self.facts.wanted.context {
            Some(wanted) if wanted > trained => {
                let words = format!(
                    "model.context_length is {wanted}, the model was trained for {trained}: using that"
                );
                warnings.push(words);
                Ok((trained, "what the model was trained for; model.context_length is more".to_owned()))
            }
            Some(wanted) => Ok((wanted, "model.context_length says so".to_owned())),
            None if trained <= DEFAULT_CONTEXT => Ok((trained, "what the model was trained for".to_owned())),
            None if self.facts.device.unified => {
                Ok((DEFAULT_CONTEXT, format!("the default; the model was trained for {trained}")))
            }
            None => {
                let mut wish = DEFAULT_CONTEXT;
                // A card's memory is the model's alone: use it, but not to the last byte.
                let most = self.facts.device.budget / 10 * 9;
                while wish < trained {
                    let next = (2 * wish).min(trained);
                    if total(&self.cost(next, self.wished_rows(next))?.1) > most {
                        return Ok((
                            wish,
                            "the device's own memory has room for this, and not for twice as many".to_owned(),
                        ));
                    }
                    wish = next;
                }
                Ok((wish, "what the model was trained for; the device's own memory has room".to_owned()))
            }
        }
    }

    /// Rows where memory is no matter.
    fn wished_rows(&self, context: usize) -> usize {
        let usual = if self.facts.device.kind == DeviceKind::Cpu { DEFAULT_CHUNK } else { WIDE_CHUNK };
        self.facts.wanted.rows.unwrap_or(usual).clamp(1, context.max(1))
    }

    /// The longest context up to `wish`, and the most rows with it, that take no more than `most` bytes.
    fn fit(&self, wish: usize, most: u64) -> Result<Option<(Shape, MemoryPlan)>, BackendError> {
        let mut context = wish;
        loop {
            let mut rows = self.wished_rows(context);
            loop {
                let (shape, memory) = self.cost(context, rows)?;
                if total(&memory) <= most {
                    return Ok(Some((shape, memory)));
                }
                if self.facts.wanted.rows.is_some() || rows <= LEAST_CHUNK {
                    break;
                }
                rows = (rows / 2).max(LEAST_CHUNK);
            }
            if self.facts.wanted.context.is_some() || context <= LEAST_CONTEXT {
                return Ok(None);
            }
            context = (context / 2).max(LEAST_CONTEXT);
        }
    }

    /// The shortest context that may be taken for `wish`.
    fn least_context(&self, wish: usize) -> usize {
        if self.facts.wanted.context.is_some() { wish } else { wish.min(LEAST_CONTEXT) }
    }

    /// What is told where nothing fits.
    fn no_room(&self, wish: usize) -> Result<NoRoom, BackendError> {
        let budget = self.facts.device.budget;
        let least = |context: usize| {
            let rows = self.wished_rows(context);
            self.cost(context, if self.facts.wanted.rows.is_some() { rows } else { rows.min(LEAST_CHUNK) })
        };
        let fits = |context: usize| -> Result<bool, BackendError> { Ok(total(&least(context)?.1) <= budget) };
        let mut would_fit = None;
        if wish > LEAST_CONTEXT && fits(LEAST_CONTEXT)? {
            let (mut good, mut bad) = (LEAST_CONTEXT, wish);
            while bad - good > 1 {
                let middle = good.midpoint(bad);
                if fits(middle)? { good = middle } else { bad = middle }
            }
            would_fit = Some(good);
        }
        let (shape, memory) = least(self.least_context(wish))?;
        Ok(NoRoom { shape, memory, budget, would_fit })
    }

    fn why_rows(&self, shape: Shape) -> String {
        let wish = self.wished_rows(shape.context);
        let canvas = match self.facts.model.canvas {
            Some(canvas) => format!("; a canvas is a pass of {canvas}"),
            None => String::new(),
        };
        let why = match self.facts.wanted.rows {
            Some(_) if shape.rows == wish && wish == shape.context => "the whole context",
            Some(_) => "device.prefill_chunk says so",
            None if shape.rows < wish => "fewer than usual: memory is short",
            None if shape.rows == shape.context => "the whole context",
            None if self.facts.device.kind == DeviceKind::Cpu => "enough to keep a CPU's units busy",
            None => "enough to keep many units busy",
        };
        format!("{why}{canvas}")
    }

    fn limit_words(&self, short: bool) -> String {
        let device = &self.facts.device;
        match device.available {
            Some(available) if available < device.budget && !short => {
                format!("{} MiB of memory are free now", available >> 20)
            }
            _ => format!("{} MiB may be allocated", device.budget >> 20),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Weights of 100 MiB, 16 KiB a position, 32 KiB a row.
    fn cost(shape: Shape) -> Result<MemoryPlan, BackendError> {
        let Shape { context, rows, .. } = shape;
        Ok(MemoryPlan { weights: 100 * MIB, kv_cache: context << 14, scratch: rows << 15 })
    }

    fn facts(budget_mib: usize) -> Facts {
        Facts {
            device: DeviceFacts {
                kind: DeviceKind::Cpu,
                unified: true,
                budget: (budget_mib * MIB) as u64,
                available: None,
            },
            model: ModelFacts { trained: 32_768, canvas: None, costs: None },
            kernels: KernelFacts::default(),
            wanted: Wanted::default(),
        }
    }

    fn chosen(facts: &Facts) -> (usize, usize) {
        let shape = choose(facts, cost).unwrap().shape;
        (shape.context, shape.rows)
    }

    fn refused(facts: &Facts) -> NoRoom {
        *choose(facts, cost).unwrap_err().downcast::<NoRoom>().unwrap()
    }

    fn why(facts: &Facts, what: &str) -> String {
        choose(facts, cost).unwrap().reasons.into_iter().find(|reason| reason.what == what).unwrap().why
    }

    #[test]
    fn with_memory_enough_the_usual_is_chosen() {
        assert_eq!(chosen(&facts(4096)), (8192, 256));
        assert_eq!(why(&facts(4096), "context"), "the default; the model was trained for 32768");
        let mut short = facts(4096);
        short.model.trained = 2048;
        assert_eq!(chosen(&short), (2048, 256));
        short.model.trained = 100;
        assert_eq!(chosen(&short), (100, 100));
        assert_eq!(why(&short, "chunk"), "the whole context");
    }

    #[test]
    fn a_card_s_own_memory_is_used() {
        let mut card = facts(1024);
        card.device = DeviceFacts { kind: DeviceKind::Gpu, unified: false, ..card.device };
        // 100 + 512 + 16 MiB are within nine tenths of it.
        assert_eq!(chosen(&card), (32_768, 512));
        card.device.budget = (500 * MIB) as u64;
        assert_eq!(chosen(&card), (16_384, 512));
        assert!(why(&card, "context").contains("not for twice as many"));
        card.model.trained = 20_000;
        card.device.budget = (600 * MIB) as u64;
        assert_eq!(chosen(&card), (20_000, 512));
    }

    #[test]
    fn where_memory_is_short_rows_go_first_and_then_context() {
        // 100 + 128 + 8 MiB would be needed for the usual.
        assert_eq!(chosen(&facts(236)), (8192, 256));
        assert_eq!(chosen(&facts(235)), (8192, 128));
        assert_eq!(why(&facts(235), "chunk"), "fewer than usual: memory is short");
        assert_eq!(chosen(&facts(230)), (8192, 64));
        assert_eq!(chosen(&facts(229)), (4096, 256));
        assert!(why(&facts(229), "context").contains("229 MiB may be allocated"));
        assert_eq!(chosen(&facts(110)), (512, 64));
    }

    #[test]
    fn what_is_free_now_is_kept_to_where_it_can_be() {
        let mut busy = facts(4096);
        busy.device.available = Some((229 * MIB) as u64);
        assert_eq!(chosen(&busy), (4096, 256));
        assert!(why(&busy, "context").contains("229 MiB of memory are free now"));
        assert_eq!(choose(&busy, cost).unwrap().warnings, [""; 0]);
        // Nothing would fit; the budget allows it, and somebody should know.
        busy.device.available = Some((50 * MIB) as u64);
        let choice = choose(&busy, cost).unwrap();
        assert_eq!(choice.shape.context, 512);
        assert!(choice.warnings[0].contains("takes 116 MiB, and 50 MiB"), "{:?}", choice.warnings);
        busy.wanted.context = Some(8192);
        let choice = choose(&busy, cost).unwrap();
        assert_eq!(choice.shape.context, 8192);
        assert!(choice.warnings[0].contains("takes 236 MiB, and 50 MiB"), "{:?}", choice.warnings);
    }

    #[test]
    fn what_is_configured_is_taken_or_refused() {
        let mut asked = facts(235);
        asked.wanted = Wanted { context: Some(8192), rows: Some(256), ..asked.wanted };
        let error = refused(&asked);
        assert_eq!((error.shape.context, error.shape.rows), (8192, 256));
        assert!(error.would_fit.is_some_and(|context| (7900..8192).contains(&context)), "{error:?}");
        let words = error.to_string();
        assert!(words.contains("needs 236 MiB") && words.contains("limit is 235 MiB"), "{words}");
        assert!(words.contains("would fit ([model] context_length)"), "{words}");
        asked.wanted.rows = None;
        assert_eq!(chosen(&asked), (8192, 128));
        assert_eq!(why(&asked, "context"), "model.context_length says so");
        asked.wanted = Wanted { context: Some(40_000), rows: Some(7), ..asked.wanted };
        asked.device.budget = 1 << 40;
        assert_eq!(chosen(&asked), (32_768, 7));
        assert!(choose(&asked, cost).unwrap().warnings[0].contains("trained for 32768"));
        asked.wanted.context = Some(4);
        assert_eq!(chosen(&asked), (4, 4));
    }

    #[test]
    fn what_is_said_to_fit_does() {
        for budget in [112, 120, 150, 200] {
            let mut asked = facts(budget);
            asked.wanted.context = Some(30_000);
            let fits = refused(&asked).would_fit.unwrap();
            asked.wanted.context = Some(fits);
            assert_eq!(chosen(&asked).0, fits, "{budget}");
        }
        // Weights alone are too large.
        let error = refused(&facts(99));
        assert_eq!((error.shape.context, error.would_fit), (512, None));
        assert!(error.to_string().contains("no context would fit; choose a smaller model"), "{error}");
    }

    #[test]
    fn a_canvas_is_a_pass() {
        let mut facts = facts(4096);
        facts.model.canvas = Some(256);
        assert!(why(&facts, "chunk").ends_with("; a canvas is a pass of 256"));
    }

    #[test]
    fn what_passes_took_is_told() {
        let mut facts = facts(4096);
        assert_eq!(why(&facts, "blocks"), "as many as pay: passes are timed at the first start");
        facts.model.costs = Some(Costs::given(std::array::from_fn(|more| 0.01 + 0.001 * more as f64)));
        let words = "as many as pay: rows and milliseconds of a pass were 1 in 10.0, 2 in 11.0, 4 in 13.0, 8 in 17.0, 16 in 25.0";
        assert_eq!(why(&facts, "blocks"), words);
        facts.wanted.blocks = BlockSize::Fixed(1);
        assert_eq!(why(&facts, "blocks"), "decode.block_size says so: nothing is guessed");
        facts.model.canvas = Some(256);
        assert_eq!(choose(&facts, cost).unwrap().reasons.len(), 3, "a canvas has no blocks");
    }

    #[test]
    fn what_cannot_be_counted_is_told() {
        let error = choose(&facts(4096), |_| Err("no tensor".into())).unwrap_err();
        assert_eq!(error.to_string(), "no tensor");
    }
}
