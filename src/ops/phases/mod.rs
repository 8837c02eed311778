//! Many launches as one, for processors, where a launch costs as much as a small product: `cl/phases.cl`.
//!
//! A [`Joiner`] is a program that can do any of a set of kernels. It makes [`Joined`] runs of launches of those, whose
//! results are the same bits.

mod source;

use super::kernels::{Kernels, OpsError, Products};
use super::matmul;
use crate::device::{Arg, Buffer, Device, Launch, Program, Purpose};
use source::Parameter;

/// `ENTRY_ARGS` of `cl/phases.cl`.
const ENTRY_ARGS: usize = 6;
/// Arguments of `run_phases`.
const HOLLOW: usize = 4;
const START: usize = 5;
const RUN: usize = 6;

/// Most phases, and most shares of one: their numbers have 16 bits, and groups count a few more shares as taken than
/// there are.
const MOST: usize = 1 << 15;
/// Shares for each compute unit, where there are as many work-items: few, since to take one costs about half a
/// microsecond, but enough for all to end together.
const SHARES: usize = 8;
/// Groups that may begin, for each compute unit: how often, in a run, a thread may give up waiting and come again.
const GROUPS: usize = 32;
/// Looks, of about 50 ns each, before a group gives up waiting.
const PATIENCE: i32 = 2000;

/// Cache lines apart.
const APART: usize = 128;

/// A kernel that a [`Joiner`] knows.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kind {
    /// Which of the joiner's parts defines it.
    part: usize,
    name: String,
    parameters: Vec<Parameter>,
}

/// A launch, and which of its arguments is the position of the first row, if it needs that.
pub type Positioned<'a> = (&'a Launch, Option<usize>);

/// A program that runs many launches as one.
pub struct Joiner {
    program: Program,
    /// Labels of the programs whose kernels it has.
    labels: Vec<String>,
    kinds: Vec<Kind>,
    products: Products,
    compute_units: usize,
    /// Bytes that a work-group may have.
    local_memory: usize,
    /// Words of an entry.
    words: usize,
    groups: usize,
}

/// Launches that are one.
pub struct Joined {
    launch: Launch,
    run: u16,
    /// Memory that the table names, which must stay.
    _buffers: Vec<Buffer>,
}

/// What a joiner would know of a launch; none where it can be no phase.
fn kind_of(labels: &[String], (launch, start): Positioned<'_>) -> Option<Kind> {
    launch.single_items()?;
    let label = launch.kernel().program();
    let parameters = launch.args().enumerate().map(|(index, arg)| {
        Some(match arg {
            _ if start == Some(index) => Parameter::Start,
            Some(Arg::Buffer(_)) => Parameter::Memory,
            Some(Arg::Local(_)) => Parameter::Local,
            Some(Arg::I32(_)) => Parameter::Int,
            Some(Arg::U32(_)) => Parameter::Uint,
            Some(Arg::I64(_)) => Parameter::Long,
            Some(Arg::U64(_)) => Parameter::Ulong,
            Some(Arg::F32(_)) => Parameter::Float,
            None => return None,
        })
    });
    Some(Kind {
        part: labels.iter().position(|known| known == label)?,
        name: launch.kernel().name().to_owned(),
        parameters: parameters.collect::<Option<_>>()?,
    })
}

impl Kernels {
    /// A joiner for launches like these; none where the device is not known to let kernels find memory by its address, or
    /// where some of the launches can be no phases.
    ///
    /// # Errors
    /// What the device says; its compiler may have no atomics that order memory.
    pub fn joiner<'a>(
        &self,
        device: &Device,
        launches: impl Iterator<Item = Positioned<'a>> + Clone,
    ) -> Result<Option<Joiner>, OpsError> {
        if !device.info().finds_by_address() {
            return Ok(None);
        }
        let mut labels: Vec<String> =
            launches.clone().map(|(launch, _)| launch.kernel().program().to_owned()).collect();
        labels.sort_unstable();
        labels.dedup();
        let mut kinds: Vec<Kind> = Vec::new();
        for launch in launches {
            let Some(kind) = kind_of(&labels, launch) else { return Ok(None) };
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let Some(parts) = labels.iter().map(|label| self.source(label)).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        // One order, whatever the launches', so that a kept binary is found again.
        kinds.sort_by(|a, b| (a.part, &a.name).cmp(&(b.part, &b.name)));
        let words = ENTRY_ARGS + kinds.iter().map(|kind| kind.parameters.len()).max().unwrap_or(0);
        let source = source::program(&parts, &kinds, words, device.info().takes_pause());
        let program = self.phases_program(device, &source)?;
        let compute_units = self.compute_units();
        Ok(Some(Joiner {
            program,
            labels,
            kinds,
            products: self.products(),
            compute_units,
            local_memory: self.local_memory(),
            words,
            groups: compute_units * GROUPS,
        }))
    }
}

impl Joiner {
    /// Lets that many groups begin in a run, all in all; for tests.
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups: groups.max(1), ..self }
    }

    /// The launches as one; none where one of them is like none that the joiner was made for. Their arguments, but for
    /// positions, are taken as they are now.
    ///
    /// # Errors
    /// What the device says.
    pub fn join<'a>(
        &self,
        device: &Device,
        launches: impl Iterator<Item = Positioned<'a>>,
    ) -> Result<Option<Joined>, OpsError> {
        let (mut table, mut scratch) = (Vec::new(), APART);
        // Which buffers, and which words of the table are their addresses.
        let mut buffers: Vec<(Buffer, Vec<usize>)> = Vec::new();
        for launch in launches {
            let kind = kind_of(&self.labels, launch);
            let Some(number) = kind.and_then(|kind| self.kinds.iter().position(|known| *known == kind))
            else {
                return Ok(None);
            };
            let Some(entry) = self.entry(number, launch.0, table.len(), &mut buffers, &mut scratch) else {
                return Ok(None);
            };
            table.extend(entry);
        }
        let phases = table.len() / self.words;
        if phases == 0 || phases > MOST || scratch > self.local_memory {
            return Ok(None);
        }
        for ((_, places), address) in buffers.iter().zip(self.addresses(device, &buffers)?) {
            places.iter().for_each(|&place| table[place] = address);
        }
        let on_device = device.alloc(Purpose::Arguments, table.len() * 8)?;
        device.write(&on_device, 0, bytemuck::cast_slice(&table))?;
        let word = device.alloc(Purpose::Arguments, APART)?;
        device.fill(&word, 0)?;
        let launch = Launch::with_args(
            &self.program.kernel("run_phases")?,
            &[
                Arg::Buffer(&on_device),
                Arg::Buffer(&word),
                Arg::I32(phases as i32),
                Arg::I32(PATIENCE),
                Arg::I32(0),
                Arg::I32(0),
                Arg::U32(0),
                Arg::Local(scratch),
            ],
            &[self.groups],
            Some(&[1]),
        )?;
        let buffers = buffers.into_iter().map(|(buffer, _)| buffer).collect();
        Ok(Some(Joined { launch, run: 0, _buffers: buffers }))
    }

    /// The entry of a launch, to be the table's from word `at` on; none where it has too many work-items.
    fn entry(
        &self,
        number: usize,
        launch: &Launch,
        at: usize,
        buffers: &mut Vec<(Buffer, Vec<usize>)>,
        scratch: &mut usize,
    ) -> Option<Vec<u64>> {
        let mut entry = vec![0u64; self.words];
        let mut local = 0;
        for (index, arg) in launch.args().enumerate() {
            let place = ENTRY_ARGS + index;
            entry[place] = match arg? {
                Arg::Buffer(buffer) => {
                    match buffers.iter_mut().find(|(known, _)| known.is_same(buffer)) {
                        Some((_, places)) => places.push(at + place),
                        None => buffers.push((buffer.clone(), vec![at + place])),
                    }
                    0
                }
                Arg::Local(bytes) => {
                    let from = local;
                    local += bytes.next_multiple_of(APART);
                    from as u64
                }
                Arg::I32(value) => u64::from(value as u32),
                Arg::U32(value) => u64::from(value),
                Arg::I64(value) => value as u64,
                Arg::U64(value) => value,
                Arg::F32(value) => u64::from(value.to_bits()),
            };
        }
        *scratch = local.max(*scratch);
        let mut sizes = launch.single_items()?;
        let items: usize = sizes.iter().product();
        let mut each = items.div_ceil(SHARES * self.compute_units);
        if self.kinds[number].name == matmul::NARROW {
            // Cut into shares already, but those of a wide matrix keep others waiting.
            (sizes[0], each) = (matmul::cut(&mut entry[ENTRY_ARGS..], self.products), 1);
        }
        let shares = sizes.iter().product::<usize>().div_ceil(each);
        let head = [number, shares, each, sizes[0], sizes[1], sizes[2]];
        entry.iter_mut().zip(head).for_each(|(word, value)| *word = value as u64);
        (shares <= MOST).then_some(entry)
    }

    /// Where buffers lie, as a kernel sees it.
    fn addresses(&self, device: &Device, buffers: &[(Buffer, Vec<usize>)]) -> Result<Vec<u64>, OpsError> {
        let mut addresses = vec![0u64; buffers.len()];
        if addresses.is_empty() {
            return Ok(addresses);
        }
        let found = device.alloc(Purpose::Arguments, 8 * addresses.len())?;
        let kernel = self.program.kernel("address_of")?;
        for (at, (buffer, _)) in buffers.iter().enumerate() {
            let args = [Arg::Buffer(buffer), Arg::Buffer(&found), Arg::I32(at as i32)];
            device.launch(&kernel, &args, &[1], Some(&[1]))?;
        }
        device.read(&found, 0, bytemuck::cast_slice_mut(&mut addresses))?;
        Ok(addresses)
    }
}

impl Joined {
    /// Enqueues it for rows from position `start` on.
    ///
    /// # Errors
    /// What the device says.
    pub fn run(&mut self, device: &Device, start: i32) -> Result<(), OpsError> {
        self.enqueue(device, start, false)
    }

    /// Enqueues the taking of all work-items, none of which is done: what is left is the cost of joining.
    ///
    /// # Errors
    /// What the device says.
    pub fn run_hollow(&mut self, device: &Device) -> Result<(), OpsError> {
        self.enqueue(device, 0, true)
    }

    fn enqueue(&mut self, device: &Device, start: i32, hollow: bool) -> Result<(), OpsError> {
        // Any number but the last run's; 0 is the word's first.
        self.run = self.run.checked_add(1).unwrap_or(1);
        self.launch.set(HOLLOW, Arg::I32(i32::from(hollow)))?;
        self.launch.set(START, Arg::I32(start))?;
        self.launch.set(RUN, Arg::U32(u32::from(self.run)))?;
        Ok(device.enqueue(&self.launch)?)
    }
}
