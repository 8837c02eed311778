//! Reading Intel's assembly: loops, and what their instructions cost.

/// What was found in a kernel's code.
#[derive(Debug, Clone, Default)]
pub struct Code {
    /// Instructions in all.
    pub instructions: usize,
    /// Loads from global memory where each lane has an address of its own.
    pub scattered: u32,
    /// Its loops, the outer ones among them.
    pub loops: Vec<Loop>,
}

/// A loop.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loop {
    /// Instructions.
    pub instructions: u32,
    /// Times that the thread must be chosen to issue one, for all but matrix instructions.
    pub slots: u32,
    /// Matrix instructions of 8 rows, 16 columns and 16 steps.
    pub multiply_adds: u32,
    /// Messages that load from global memory.
    pub loads: u32,
    /// Of them, loads of two-dimensional blocks.
    pub blocks: u32,
    /// Bytes that they load.
    pub load_bytes: u32,
    /// Its first instruction.
    start: usize,
}

impl Code {
    /// Reads the disassembly of one kernel.
    pub fn of(text: &str) -> Self {
        let mut instructions: Vec<&str> = Vec::new();
        let mut labels = std::collections::HashMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")) {
            match line.strip_suffix(':').filter(|label| is_label(label)) {
                Some(label) => {
                    labels.insert(label, instructions.len());
                }
                None => instructions.push(line),
            }
        }
        let mut loops: Vec<Loop> = Vec::new();
        for (at, line) in instructions.iter().enumerate() {
            if !["jmpi", "while", "goto"].contains(&operation(line).0) {
                continue;
            }
            let back = line.split_whitespace().filter_map(|word| labels.get(word)).find(|&&to| to <= at);
            if let Some(&start) = back {
                loops.push(Loop::of(start, &instructions[start..=at]));
            }
        }
        let scattered = instructions.iter().filter(|line| is_scattered(line)).count() as u32;
        Self { instructions: instructions.len(), scattered, loops }
    }

    /// The innermost loops with matrix instructions.
    pub fn innermost(&self) -> impl Iterator<Item = &Loop> {
        self.loops.iter().filter(|one| {
            let within = |other: &Loop| {
                one.holds(other) && other.instructions < one.instructions && other.multiply_adds > 0
            };
            one.multiply_adds > 0 && !self.loops.iter().any(within)
        })
    }

    /// The loop where products are made: of the innermost ones with matrix instructions that with the most.
    pub fn products(&self) -> Option<&Loop> {
        self.innermost().max_by_key(|one| one.multiply_adds)
    }

    /// The loop right around one.
    pub fn around(&self, inner: &Loop) -> Option<&Loop> {
        let holds = |one: &&Loop| one.holds(inner) && one.instructions > inner.instructions;
        self.loops.iter().filter(holds).min_by_key(|one| one.instructions)
    }
}

impl Loop {
    fn holds(&self, other: &Self) -> bool {
        self.start <= other.start
            && other.start + other.instructions as usize <= self.start + self.instructions as usize
    }

    fn of(start: usize, instructions: &[&str]) -> Self {
        let mut all = Self { start, instructions: instructions.len() as u32, ..Self::default() };
        for line in instructions {
            let (name, lanes) = operation(line);
            if name.starts_with("dpas") {
                all.multiply_adds += 1;
            } else {
                all.slots += slots(name, lanes, line);
            }
            if let Some(load) =
                message(line).filter(|message| message.starts_with("load") && message.contains(".ugm"))
            {
                all.loads += 1;
                all.blocks += u32::from(load.starts_with("load_block2d"));
                all.load_bytes += 64 * returned(line);
            }
        }
        all
    }
}

fn is_label(text: &str) -> bool {
    text.strip_prefix('L')
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Name and lanes of an instruction, its predicate left out.
fn operation(line: &str) -> (&str, u32) {
    let rest = match line.strip_prefix('(') {
        Some(predicated) => predicated.split_once(')').map_or("", |(_, rest)| rest.trim_start()),
        None => line,
    };
    let (name, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let lanes = rest
        .trim_start()
        .strip_prefix('(')
        .and_then(|rest| rest.split_once('|'))
        .and_then(|(n, _)| n.parse().ok());
    (name, lanes.unwrap_or(1))
}

/// A unit takes 64 bytes of operands at a time, and a quarter of that where it computes functions.
fn slots(name: &str, lanes: u32, line: &str) -> u32 {
    if name.starts_with("math") {
        return lanes.div_ceil(4);
    }
    let narrow = [":hf", ":w", ":uw", ":bf", ":b", ":ub"].iter().any(|kind| {
        let first = line.find("<1>:").or_else(|| line.find("<2>:"));
        first.is_some_and(|at| line[at + 3..].starts_with(kind))
    });
    if lanes > 16 && !narrow { lanes / 16 } else { 1 }
}

/// What a message does, which the disassembler writes behind it.
fn message(line: &str) -> Option<&str> {
    operation(line).0.starts_with("send").then(|| line.rsplit("; ").next().unwrap_or(""))
}

/// Registers that come back; 31 stands for 32.
fn returned(line: &str) -> u32 {
    let digits = line
        .split("rd:")
        .nth(1)
        .map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
    let count: u32 = digits.and_then(|digits| digits.parse().ok()).unwrap_or(0);
    if count == 31 { 32 } else { count }
}

/// `d32x16t` is one run of values for all lanes; without the `t`, each lane brings its own address.
fn is_scattered(line: &str) -> bool {
    let Some(kind) = message(line).and_then(|message| message.strip_prefix("load.ugm.")) else {
        return false;
    };
    !kind.split('.').next().unwrap_or("").ends_with('t')
}
