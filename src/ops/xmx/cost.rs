//! How long an op should take on a card: bytes and operations from its shapes, instructions from the compiled kernel.
//!
//! Memory, matrix engine and the issue of all other instructions work side by side, so the longest of the three is the
//! prediction: it is reached where there are threads enough to hide every wait. Not counted are what a kernel does outside its
//! loops, what the caches cannot deliver, and the start of a launch.

/// A card, as the model sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XmxCard {
    /// Bytes a second that the memory has by its data sheet.
    pub bandwidth: f64,
    /// The share of it that a kernel can reach.
    pub reached: f64,
    /// Vector engines, each with a matrix engine beside it.
    pub engines: f64,
    /// Clock that is held under load, Hz.
    pub clock: f64,
    /// Cycles of a matrix instruction of 8 rows, 16 columns and 16 steps in f16.
    pub cycles: f64,
    /// f16 operations a second that the matrix engines have by the data sheet.
    pub peak: f64,
}

impl XmxCard {
    /// Arc Pro B70: 32 Xe cores of 8 engines; 367 TOPS of INT8, which is twice its f16.
    pub const B70: Self =
        Self { bandwidth: 608e9, reached: 0.85, engines: 256.0, clock: 2.28e9, cycles: 16.0, peak: 183.5e12 };

    /// What `work` takes at the speeds of the data sheet: the longer of memory and operations.
    pub fn floor(&self, work: &XmxWork) -> f64 {
        (work.bytes as f64 / self.bandwidth).max(work.operations as f64 / self.peak)
    }

    /// What `work` takes with a kernel's `inner` loop.
    pub fn time(&self, work: &XmxWork, inner: &XmxLoop) -> XmxTime {
        let slots = work.turns as f64 * f64::from(inner.slots) + work.rounds as f64 * f64::from(inner.around);
        let rate = self.engines * self.clock;
        XmxTime {
            memory: work.bytes as f64 / (self.bandwidth * self.reached),
            engine: work.multiply_adds as f64 * self.cycles / rate,
            issue: slots / rate,
            floor: self.floor(work),
        }
    }
}

/// A kernel's innermost loop, as compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct XmxLoop {
    /// Instructions that a thread issues in a turn, matrix instructions left out.
    pub slots: u32,
    /// Those of the loop around it, in a turn of that one; 0 where there is none.
    pub around: u32,
}

/// What an op does, by its shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct XmxWork {
    /// Bytes that must come from memory or go there, each once.
    pub bytes: u64,
    /// Multiplications and additions that the results are made of.
    pub operations: u64,
    /// Matrix instructions, those for rows that only fill a block up among them.
    pub multiply_adds: u64,
    /// Turns of the innermost loop, of all sub-groups together.
    pub turns: u64,
    /// Turns of the loop around it.
    pub rounds: u64,
}

impl XmxWork {
    /// Both together, by the same kernel.
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            operations: self.operations + other.operations,
            multiply_adds: self.multiply_adds + other.multiply_adds,
            turns: self.turns + other.turns,
            rounds: self.rounds + other.rounds,
        }
    }

    /// One part of so many equal ones.
    pub fn share(self, of: u64) -> Self {
        Self {
            bytes: self.bytes / of,
            operations: self.operations / of,
            multiply_adds: self.multiply_adds / of,
            turns: self.turns / of,
            rounds: self.rounds / of,
        }
    }

    /// As much, `times` over.
    pub fn times(self, times: u64) -> Self {
        Self {
            bytes: self.bytes * times,
            operations: self.operations * times,
            multiply_adds: self.multiply_adds * times,
            turns: self.turns * times,
            rounds: self.rounds * times,
        }
    }
}

/// Seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XmxTime {
    /// Of the memory, at the speed that can be reached.
    pub memory: f64,
    /// Of the matrix engines.
    pub engine: f64,
    /// Of issuing all other instructions.
    pub issue: f64,
    /// What the data sheet allows: the longer of memory and operations.
    pub floor: f64,
}

impl XmxTime {
    /// Of both, one after the other or side by side in the same launch.
    pub fn and(self, other: Self) -> Self {
        Self {
            memory: self.memory + other.memory,
            engine: self.engine + other.engine,
            issue: self.issue + other.issue,
            floor: self.floor + other.floor,
        }
    }

    /// What it should take.
    pub fn predicted(&self) -> f64 {
        self.memory.max(self.engine).max(self.issue)
    }

    /// What bounds it.
    pub fn bound(&self) -> &'static str {
        let longest = self.predicted();
        match longest {
            _ if longest == self.memory => "memory",
            _ if longest == self.engine => "engine",
            _ => "issue",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_of_memory_engine_and_issue_is_predicted() {
        let inner = XmxLoop { slots: 100, around: 10 };
        let work = XmxWork { bytes: 608, operations: 1, multiply_adds: 1, turns: 1, rounds: 1 };
        let time = XmxCard::B70.time(&work, &inner);
        assert!((time.memory - 1e-9 / 0.85).abs() < 1e-15 && (time.floor - 1e-9).abs() < 1e-15);
        assert_eq!(time.bound(), "memory");
        let cycle = 1.0 / (256.0 * 2.28e9);
        assert!((time.engine - 16.0 * cycle).abs() < 1e-18 && (time.issue - 110.0 * cycle).abs() < 1e-18);
        assert_eq!(XmxCard::B70.time(&XmxWork { multiply_adds: 10_000, ..work }, &inner).bound(), "engine");
        assert_eq!(XmxCard::B70.time(&XmxWork { turns: 10_000, ..work }, &inner).bound(), "issue");
    }
}
