//! How the canvases of one generation are denoised: what the checkpoint says, changed by what the request wishes.

use super::schedule::Schedule;
use super::stop::StopTest;
use crate::decode::{BackendError, Sampling};
use crate::model::diffusion_gemma::GenerationConfig;

const MOST_STEPS: usize = GenerationConfig::MOST_STEPS;

/// How the canvases of a generation are denoised.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Steps and their temperatures.
    pub schedule: Schedule,
    /// Entropy (nats) up to which positions are accepted.
    pub entropy_bound: f32,
    /// Unchanged steps that make a canvas stable; `None`: all steps run.
    pub stability_threshold: Option<usize>,
    /// What the mean entropy of a finished canvas is below; `None`: all steps run.
    pub confidence_threshold: Option<f32>,
    /// Sample the most probable token instead of drawing one.
    pub greedy: bool,
}

impl Plan {
    /// What the checkpoint says.
    pub fn new(config: &GenerationConfig) -> Self {
        Self {
            schedule: Schedule::new(config.t_min, config.t_max, config.max_denoising_steps),
            entropy_bound: config.entropy_bound as f32,
            stability_threshold: config.stability_threshold,
            confidence_threshold: config.confidence_threshold.map(|threshold| threshold as f32),
            greedy: false,
        }
    }

    /// What the checkpoint says, with the wishes of a request. Its temperature multiplies the schedule: 1 leaves it as it
    /// is. A temperature of 0 keeps the schedule, too, and draws nothing.
    ///
    /// # Errors
    /// Wishes out of range.
    pub fn for_request(config: &GenerationConfig, sampling: &Sampling) -> Result<Self, BackendError> {
        let wishes = &sampling.denoising;
        let temperature = sampling.temperature;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(format!("temperature is {temperature}, expected a number from 0").into());
        }
        let steps = wishes.max_steps.unwrap_or(config.max_denoising_steps);
        if !(1..=MOST_STEPS).contains(&steps) {
            return Err(format!("max_denoising_steps is {steps}, expected 1 to {MOST_STEPS}").into());
        }
        for (name, wish) in
            [("entropy_bound", wishes.entropy_bound), ("confidence_threshold", wishes.confidence_threshold)]
        {
            if let Some(wish) = wish.filter(|wish| !(*wish >= 0.0 && wish.is_finite())) {
                return Err(format!("{name} is {wish}, expected a number from 0").into());
            }
        }
        let plan = Self::new(config);
        let schedule = Schedule::new(config.t_min, config.t_max, steps);
        let greedy = temperature == 0.0;
        Ok(Self {
            schedule: if greedy { schedule } else { schedule.scaled(f64::from(temperature)) },
            entropy_bound: wishes.entropy_bound.unwrap_or(plan.entropy_bound),
            confidence_threshold: wishes.confidence_threshold.or(plan.confidence_threshold),
            greedy,
            ..plan
        })
    }

    /// The stop test of a new canvas.
    pub fn stop_test(&self) -> StopTest {
        StopTest::new(self.stability_threshold, self.confidence_threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::Denoising;

    fn request(temperature: f32, denoising: Denoising) -> Result<Plan, BackendError> {
        let sampling = Sampling { temperature, denoising, ..Sampling::default() };
        Plan::for_request(&GenerationConfig::default(), &sampling)
    }

    #[test]
    fn temperature_1_is_the_checkpoint_s_own_schedule() {
        let own = Plan::new(&GenerationConfig::default());
        assert_eq!(request(1.0, Denoising::default()).unwrap(), own);
        assert_eq!(request(0.0, Denoising::default()).unwrap(), Plan { greedy: true, ..own.clone() });
        let hotter = request(2.0, Denoising::default()).unwrap();
        for step in 0..48 {
            let factor = hotter.schedule.temperature(step) / own.schedule.temperature(step);
            assert!((factor - 2.0).abs() < 1e-6);
        }
    }

    #[test]
    fn wishes_replace_what_the_checkpoint_says() {
        let plan = request(
            1.0,
            Denoising { max_steps: Some(5), entropy_bound: Some(0.0), confidence_threshold: Some(0.5) },
        )
        .unwrap();
        assert_eq!(plan.schedule.steps(), 5);
        assert_eq!(plan.schedule.temperature(0), 0.8);
        assert_eq!((plan.entropy_bound, plan.confidence_threshold), (0.0, Some(0.5)));
    }

    #[test]
    fn wishes_out_of_range_are_refused_by_name() {
        let none = Denoising::default();
        let refused = |temperature, wishes| request(temperature, wishes).unwrap_err().to_string();
        assert!(refused(f32::NAN, none).contains("temperature"));
        assert!(refused(-1.0, none).contains("temperature"));
        for steps in [0, MOST_STEPS + 1] {
            let wishes = Denoising { max_steps: Some(steps), ..none };
            assert!(refused(1.0, wishes).contains("max_denoising_steps"));
        }
        for bad in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(refused(1.0, Denoising { entropy_bound: Some(bad), ..none }).contains("entropy_bound"));
            let wishes = Denoising { confidence_threshold: Some(bad), ..none };
            assert!(refused(1.0, wishes).contains("confidence_threshold"));
        }
    }
}
