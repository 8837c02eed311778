//! A forward pass over a fixed number of rows, prepared once: every launch with its arguments.

use crate::device::{Arg, Device, Launch};
use crate::ops::{Joined, Joiner, OpsError, Positioned};

/// The launches of a pass in order.
#[derive(Default)]
pub struct Pass {
    launches: Vec<Launch>,
    /// Launches that need the position of the first row, and the index of that argument.
    positioned: Vec<(usize, usize)>,
    /// How many launches there are at the end of each layer.
    layer_ends: Vec<usize>,
    /// All of them as one.
    joined: Option<Joined>,
}

impl Pass {
    /// Adds a launch whose arguments stay.
    pub fn push(&mut self, launch: Launch) {
        self.launches.push(launch);
    }

    /// Adds a launch whose argument `index` is the position of the first row.
    pub fn push_positioned(&mut self, launch: Launch, index: usize) {
        self.positioned.push((self.launches.len(), index));
        self.launches.push(launch);
    }

    /// All launches of a layer have been added.
    pub fn end_layer(&mut self) {
        self.layer_ends.push(self.launches.len());
    }

    /// How many launches there are at the end of each layer.
    pub fn layer_ends(&self) -> &[usize] {
        &self.layer_ends
    }

    /// The kernels of its launches, those of each layer by themselves: what comes before the first layer is among the
    /// first's, and what comes behind the last layer follows.
    pub fn kernels_by_layer(&self) -> Vec<Vec<String>> {
        let names: Vec<String> =
            self.launches.iter().map(|launch| launch.kernel().name().to_owned()).collect();
        let starts = std::iter::once(0).chain(self.layer_ends.iter().copied());
        let ends = self.layer_ends.iter().copied().chain(std::iter::once(names.len()));
        starts.zip(ends).map(|(start, end)| names[start..end].to_vec()).collect()
    }

    /// The launches, for a [`Joiner`].
    pub fn positioned(&self) -> impl Iterator<Item = Positioned<'_>> + Clone {
        let mut positioned = self.positioned.iter().peekable();
        self.launches.iter().enumerate().map(move |(at, launch)| {
            (launch, positioned.next_if(|(positioned, _)| *positioned == at).map(|&(_, index)| index))
        })
    }

    /// Makes one launch of all, if the joiner knows them all.
    ///
    /// # Errors
    /// What the device says.
    pub fn join(&mut self, device: &Device, joiner: &Joiner) -> Result<(), OpsError> {
        self.joined = joiner.join(device, self.positioned())?;
        Ok(())
    }

    /// Enqueues all of it for rows from position `start` on.
    ///
    /// # Errors
    /// What the device says; the pass is then incomplete.
    pub fn run(&mut self, device: &Device, start: i32) -> Result<(), OpsError> {
        if let Some(joined) = &mut self.joined {
            return joined.run(device, start);
        }
        for &(launch, index) in &self.positioned {
            self.launches[launch].set(index, Arg::I32(start))?;
            self.launches[launch].behind(u64::try_from(start).unwrap_or(0));
        }
        Ok(self.launches.iter().try_for_each(|launch| device.enqueue(launch))?)
    }

    /// Enqueues what the pass costs beside its kernels' work, where it is one launch: see [`Joined::run_hollow`]. False
    /// where it is not.
    ///
    /// # Errors
    /// What the device says.
    pub fn run_hollow(&mut self, device: &Device) -> Result<bool, OpsError> {
        self.joined.as_mut().map_or(Ok(false), |joined| joined.run_hollow(device).map(|()| true))
    }

    /// How many launches it has.
    pub fn len(&self) -> usize {
        if self.joined.is_some() { 1 } else { self.launches.len() }
    }
}
