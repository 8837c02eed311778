//! The largest logits of rows.

use super::{Sequence, upload};
use crate::device::{Device, Purpose};
use crate::ops::choice::{choice_reference, choice_values, read_choices};
use crate::ops::kernels::{Kernels, OpsError};

/// Runs the kernel that finds each row's largest logits.
///
/// # Errors
/// [`OpsError::SelfTest`] with the device and the first wrong row; or what the device says.
pub fn self_test_choice(device: &Device, kernels: &Kernels) -> Result<(), OpsError> {
    const ROWS: usize = 4;
    const LIMIT: usize = 1237;
    const STRIDE: usize = 1248;
    let mut sequence = Sequence(7);
    // Few different values, so that many are equal.
    let mut logits: Vec<f32> = (0..ROWS * STRIDE).map(|_| (sequence.next() * 200.0).round()).collect();
    logits[STRIDE + LIMIT - 1] = f32::NAN;
    logits[2 * STRIDE + 3] = f32::NEG_INFINITY;
    logits[3 * STRIDE + LIMIT] = f32::INFINITY; // not one of those that count
    let buffer = upload(device, &logits)?;
    let choices = device.alloc(Purpose::Scratch, choice_values(ROWS) * 4)?;
    device.fill(&choices, f32::NAN.to_bits())?;
    device.enqueue(&kernels.choose(device, &buffer, STRIDE, LIMIT, ROWS, &choices)?)?;
    for (row, found) in read_choices(device, &choices, ROWS)?.into_iter().enumerate() {
        let expected = choice_reference(&logits[row * STRIDE..][..LIMIT]);
        if found != expected {
            return Err(OpsError::SelfTest {
                kernel: "top_of_rows".to_owned(),
                device: device.info().name.clone(),
                what: format!("row {row} has {found:?}, the reference says {expected:?}"),
            });
        }
    }
    Ok(())
}
