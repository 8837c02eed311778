//! What a checkpoint would take on a device, told from its headers and its small tensors.

use super::parts::Parts;
use super::source::Source;
use super::{DenseWeights, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, ExpertWeights};
use crate::model::error::ModelError;
use crate::model::plan::MemoryPlan;
use crate::model::workload::Workload;
use crate::ops::Products;

impl DiffusionGemma {
    /// What the model takes on a device when it is loaded with these options, and products of many rows are made so.
    ///
    /// # Errors
    /// What the checkpoint lacks or has wrong, by name.
    pub fn plan(
        checkpoint: &DiffusionCheckpoint,
        options: &DiffusionOptions,
        products: Products,
    ) -> Result<MemoryPlan, ModelError> {
        let config = checkpoint.config()?;
        let mut source = Source::new(checkpoint, &config, (options.experts, options.dense));
        Ok(Parts::find(&mut source, &config)?.plan(&config, options, products))
    }

    /// What its passes have to do, when it is loaded with these choices of weights.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan).
    pub fn workload(
        checkpoint: &DiffusionCheckpoint,
        kinds: (ExpertWeights, DenseWeights),
    ) -> Result<Workload, ModelError> {
        let config = checkpoint.config()?;
        Ok(Parts::find(&mut Source::new(checkpoint, &config, kinds), &config)?.workload(&config))
    }

    /// What [`formats`](Self::formats) will say once it is loaded.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan).
    pub fn planned_formats(
        checkpoint: &DiffusionCheckpoint,
        kinds: (ExpertWeights, DenseWeights),
    ) -> Result<String, ModelError> {
        let config = checkpoint.config()?;
        Ok(Parts::find(&mut Source::new(checkpoint, &config, kinds), &config)?.formats().to_string())
    }
}
