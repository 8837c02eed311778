//! Passes of a few rows as one launch each, and the proof that they are the passes that launches make.

use std::collections::HashSet;

use super::{Causal, Logits, NARROW, builder};
use crate::device::{Buffer, DeviceError};
use crate::model::error::ModelError;
use crate::model::pass::Pass;
use crate::ops::{Joiner, OpsError, choice_values};

/// Widths that are compared at start, as far as the model has them: each a number of rows that kernels have a way of
/// their own for.
const COMPARED: [usize; 4] = [1, 3, 8, NARROW];

impl Causal {
    /// Makes one launch of each narrow pass from now on, where the device can do that and does it right.
    ///
    /// # Errors
    /// What the device says. A compiler that refuses is no error: passes stay many launches.
    pub(super) fn join_passes(&mut self) -> Result<(), ModelError> {
        let joiner = match self.joiner() {
            Ok(Some(joiner)) => joiner,
            Ok(None) => return Ok(()),
            Err(ModelError::Ops(OpsError::Device(DeviceError::Build { code, log, .. }))) => {
                tracing::info!(%code, log, "passes stay many launches: the compiler refuses to join them");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let same = self.makes_the_same(&joiner)?;
        self.device.note_check("joined passes", if same { 0.0 } else { f64::INFINITY }, same);
        if same {
            self.joiner = Some(joiner);
        } else {
            self.joining_failed = true;
            tracing::warn!(
                "a pass that is one launch makes other numbers than its launches: they stay many, and slower. \
                 The driver or runtime miscompiles cl/phases.cl; another version of it may not"
            );
        }
        Ok(())
    }

    /// True if passes are many launches since one launch made other numbers.
    pub fn joining_failed(&self) -> bool {
        self.joining_failed
    }

    /// A joiner for all narrow passes.
    fn joiner(&self) -> Result<Option<Joiner>, ModelError> {
        let (one, most) = ((1, Logits::All), (NARROW.min(self.logit_rows), Logits::All));
        let passes = [one, (1, Logits::None), most].map(|(rows, logits)| builder::pass(self, rows, logits));
        let passes = passes.into_iter().collect::<Result<Vec<Pass>, _>>()?;
        Ok(self.kernels.joiner(&self.device, passes.iter().flat_map(Pass::positioned))?)
    }

    /// Compares bits: of a whole pass of one row, and for the other widths of a pass through as many layers as have a kernel that
    /// none before them has, and through the head.
    fn makes_the_same(&mut self, joiner: &Joiner) -> Result<bool, ModelError> {
        let most = self.logit_rows;
        for rows in COMPARED.into_iter().filter(|&rows| rows <= most) {
            let mut pass = builder::pass(self, rows, Logits::All)?;
            if rows > 1 {
                pass = builder::pass_of_layers(self, rows, Logits::All, layers_with_all_kernels(&pass))?;
            }
            let ids = |from: usize| -> Vec<u32> {
                (from..from + rows).map(|id| (id % self.config.vocabulary) as u32).collect()
            };
            let (tokens, others) = (ids(1), ids(rows + 1));
            let expected = self.results_of(&mut pass, &tokens)?;
            // Leaves other numbers, so that the same ones are not those of before.
            self.results_of(&mut pass, &others)?;
            pass.join(&self.device, joiner)?;
            if expected != self.results_of(&mut pass, &tokens)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The bits that a pass leaves of these tokens: the stream, the last branch, logits and choices.
    fn results_of(&mut self, pass: &mut Pass, tokens: &[u32]) -> Result<Vec<u32>, ModelError> {
        self.embed(tokens)?;
        pass.run(&self.device, 0)?;
        let (scratch, hidden) = (&self.scratch, tokens.len() * self.strides.hidden);
        let [stream, other] = &scratch.residual;
        let logits = tokens.len() * self.strides.logits;
        let mut all = Vec::new();
        for (buffer, values) in [
            (stream, hidden),
            (other, hidden),
            (&scratch.branch, hidden),
            (&scratch.logits, logits),
            (&scratch.choices, choice_values(tokens.len())),
        ] {
            all.extend(self.words(buffer, values)?);
        }
        Ok(all)
    }

    fn words(&self, buffer: &Buffer, most: usize) -> Result<Vec<u32>, ModelError> {
        let mut words = vec![0u32; most.min(buffer.size() / 4)];
        self.device.read(buffer, 0, bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

/// Layers up to the first one after which none has a new kernel.
fn layers_with_all_kernels(pass: &Pass) -> usize {
    let kernels = |until: usize| -> HashSet<(String, String)> {
        let launches = pass.positioned().take(until).map(|(launch, _)| launch.kernel());
        launches.map(|kernel| (kernel.program().to_owned(), kernel.name().to_owned())).collect()
    };
    let ends = pass.layer_ends();
    let all = ends.last().map_or(0, |&end| kernels(end).len());
    ends.iter().position(|&end| kernels(end).len() == all).map_or(ends.len(), |layer| layer + 1)
}
