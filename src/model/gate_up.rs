//! The first product of a gated network.

/// The matrices of gate and up, as whatever stands for a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) enum GateUp<T> {
    /// Tiles of both alternate in one matrix.
    Joined(T),
    /// Two formats: gate, then up.
    Apart(T, T),
}

impl<T> GateUp<T> {
    /// The same of something else.
    pub(super) fn map<U>(&self, make: impl Fn(&T) -> U) -> GateUp<U> {
        match self {
            Self::Joined(both) => GateUp::Joined(make(both)),
            Self::Apart(gate, up) => GateUp::Apart(make(gate), make(up)),
        }
    }
}
