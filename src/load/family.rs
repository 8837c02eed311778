//! Which kernels make a model's products.

use crate::config::{DeviceConfig, KernelFamily};
use crate::device::DeviceInfo;
use crate::ops::{Products, Xmx};

/// What the choice of kernels depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelFacts {
    /// `device.kernels`
    pub family: KernelFamily,
    /// `device.matrix_unit`
    pub matrix_unit: bool,
    /// Whether kernels may use a matrix unit of the host's processor.
    pub has_unit: bool,
    /// Whether they may use its instructions for products of bytes, too.
    pub has_byte_products: bool,
    /// Whether the device has the matrix engine that the `xmx` family is for.
    pub has_engine: bool,
}

impl KernelFacts {
    /// What the configuration says, and what the device has.
    pub fn new(config: &DeviceConfig, info: &DeviceInfo) -> Self {
        Self {
            family: config.kernels,
            matrix_unit: config.matrix_unit,
            has_unit: info.grants_matrix_unit(),
            has_byte_products: info.takes_byte_products(),
            has_engine: Xmx::has_matrix_engine(info),
        }
    }

    /// How products are to be made, and why so; of a model that denoises a canvas, or a causal one. Whether these kernels compute
    /// what they should, their self-test says at start.
    pub fn products(&self, canvas: bool) -> (Products, &'static str) {
        match self.family {
            KernelFamily::Xmx => return (Products::Xmx, "device.kernels is xmx"),
            KernelFamily::Auto if self.has_engine => {
                return (Products::Xmx, "the device has a matrix engine");
            }
            KernelFamily::Auto | KernelFamily::Vector => {}
        }
        match (self.matrix_unit, self.has_unit) {
            (false, _) => (Products::Vector, "device.matrix_unit is false"),
            (true, false) => (Products::Vector, "the device has no matrix unit that may be used"),
            (true, true) if canvas => {
                (Products::MatrixUnit, "a canvas is many rows, and the processor has AMX")
            }
            (true, true) if self.has_byte_products => {
                (Products::Integer, "the processor has AMX, and VNNI for single rows")
            }
            (true, true) => (Products::Vector, "the processor has AMX, but no VNNI for single rows"),
        }
    }
}

/// What operators call such products.
pub fn products_name(products: Products) -> &'static str {
    match products {
        Products::Vector => "vectors",
        Products::MatrixUnit => "matrix unit",
        Products::Integer => "integers",
        Products::Xmx => "xmx",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_unit_is_used_where_there_is_one() {
        let mut facts = KernelFacts { matrix_unit: true, has_unit: true, ..KernelFacts::default() };
        assert_eq!(facts.products(true).0, Products::MatrixUnit);
        facts.matrix_unit = false;
        assert_eq!(facts.products(true), (Products::Vector, "device.matrix_unit is false"));
        facts.matrix_unit = true;
        facts.has_unit = false;
        assert_eq!(
            facts.products(true),
            (Products::Vector, "the device has no matrix unit that may be used")
        );
    }

    #[test]
    fn causal_models_multiply_integers_where_the_processor_can() {
        let mut facts = KernelFacts {
            matrix_unit: true,
            has_unit: true,
            has_byte_products: true,
            ..KernelFacts::default()
        };
        assert_eq!(facts.products(false).0, Products::Integer);
        facts.has_byte_products = false;
        assert_eq!(
            facts.products(false),
            (Products::Vector, "the processor has AMX, but no VNNI for single rows")
        );
        facts.has_byte_products = true;
        facts.matrix_unit = false;
        assert_eq!(facts.products(false), (Products::Vector, "device.matrix_unit is false"));
    }

    #[test]
    fn a_matrix_engine_is_used_unless_something_else_is_asked_for() {
        let mut facts = KernelFacts { matrix_unit: true, has_engine: true, ..KernelFacts::default() };
        assert_eq!(facts.products(true), (Products::Xmx, "the device has a matrix engine"));
        assert_eq!(facts.products(false).0, Products::Xmx);
        facts.family = KernelFamily::Vector;
        assert_eq!(facts.products(true).0, Products::Vector);
        facts = KernelFacts { family: KernelFamily::Xmx, ..KernelFacts::default() };
        assert_eq!(facts.products(false), (Products::Xmx, "device.kernels is xmx"));
    }
}
