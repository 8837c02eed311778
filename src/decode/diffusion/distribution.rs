//! What a row of logits says, worked out on the host in f64: the reference for the head's kernel, and what a replay
//! compares.

/// The softmax of a row of logits, after a temperature.
#[derive(Debug, Clone)]
pub struct Distribution {
    argmax: usize,
    entropy: f64,
    /// Sums of the probabilities up to each token, that one included; not normalised.
    sums: Vec<f64>,
}

impl Distribution {
    /// Of logits before the temperature, which divides them in f32 as the reference does. `None` if one is not finite
    /// or there is none.
    pub fn new(logits: &[f32], temperature: f32) -> Option<Self> {
        let tempered: Vec<f32> = logits.iter().map(|&logit| logit / temperature).collect();
        let mut argmax = 0;
        for (token, &logit) in tempered.iter().enumerate() {
            if !logit.is_finite() {
                return None;
            }
            if logit > tempered[argmax] {
                argmax = token;
            }
        }
        let peak = f64::from(*tempered.get(argmax)?);
        let (mut total, mut weighted) = (0f64, 0f64);
        let mut sums = Vec::with_capacity(tempered.len());
        for &logit in &tempered {
            let below = f64::from(logit) - peak;
            let weight = below.exp();
            total += weight;
            weighted += weight * below;
            sums.push(total);
        }
        Some(Self { argmax, entropy: total.ln() - weighted / total, sums })
    }

    /// The most probable token; of equals the one with the lower id.
    pub fn argmax(&self) -> u32 {
        self.argmax as u32
    }

    /// The entropy in nats.
    pub fn entropy(&self) -> f32 {
        self.entropy as f32
    }

    /// The token at which the cumulative probability first exceeds `u`, from 0 to 1.
    pub fn draw(&self, u: f64) -> u32 {
        let total = self.sums.last().copied().unwrap_or(0.0);
        let token = self.sums.partition_point(|&sum| sum / total <= u);
        token.min(self.sums.len().saturating_sub(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_known_probabilities() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].map(|p| p.ln() * 0.5).to_vec();
        let seen = Distribution::new(&logits, 0.5).unwrap();
        assert_eq!(seen.argmax(), 0);
        assert!((f64::from(seen.entropy()) - 1.75 * 2f64.ln()).abs() < 1e-6);
        assert_eq!([0.0, 0.49, 0.51, 0.74, 0.76, 0.999, 1.0].map(|u| seen.draw(u)), [0, 0, 1, 1, 2, 3, 3]);
    }

    #[test]
    fn equal_logits_go_to_the_lower_id_and_a_certain_token_has_no_entropy() {
        let seen = Distribution::new(&[1.0, 3.0, 3.0], 1.0).unwrap();
        assert_eq!(seen.argmax(), 1);
        let sure = Distribution::new(&[0.0, 1000.0, -1000.0], 0.5).unwrap();
        assert_eq!((sure.entropy(), sure.draw(0.0), sure.draw(0.999)), (0.0, 1, 1));
    }

    #[test]
    fn broken_logits_give_none() {
        assert!(Distribution::new(&[], 1.0).is_none());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(Distribution::new(&[0.0, bad, 1.0], 1.0).is_none());
        }
    }
}
