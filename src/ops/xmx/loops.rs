//! The loops of the family's kernels, as Intel's compiler makes them for a B70: what the cost model needs where there is no such
//! compiler. `loops.txt` is written by `scripts/test.sh offline`, which fails where it is not what the compiler says.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::cost::XmxLoop;

/// Program, kernel, and its loops: the matrix instructions of each, other instructions, and those of the loop around it.
const RECORDED: &str = include_str!("loops.txt");

type Loops<'a> = HashMap<(&'a str, &'a str), Vec<(u32, XmxLoop)>>;

static LOOPS: LazyLock<Loops<'static>> = LazyLock::new(|| xmx_loops(RECORDED));

/// Reads recorded loops; lines that are none are left out.
pub fn xmx_loops(text: &str) -> Loops<'_> {
    let numbers = |text: &str| {
        let (multiply_adds, slots) = text.split_once(':')?;
        let (slots, around) = slots.split_once('+')?;
        let inner = XmxLoop { slots: slots.parse().ok()?, around: around.parse().ok()? };
        Some((multiply_adds.parse().ok()?, inner))
    };
    text.lines()
        .filter_map(|line| {
            let mut parts = line.split('\t');
            let key = (parts.next()?, parts.next()?);
            Some((key, parts.map_while(numbers).collect()))
        })
        .collect()
}

/// Writes what [`xmx_loops`] reads of one kernel.
pub fn xmx_loops_line(label: &str, kernel: &str, loops: &[(u32, XmxLoop)]) -> String {
    let numbers = |(multiply_adds, inner): &(u32, XmxLoop)| {
        format!("\t{multiply_adds}:{}+{}", inner.slots, inner.around)
    };
    format!("{label}\t{kernel}{}\n", loops.iter().map(numbers).collect::<String>())
}

/// The recorded loops of all kernels.
pub fn xmx_recorded_loops() -> &'static Loops<'static> {
    &LOOPS
}

/// The loop of a kernel that has so many matrix instructions, or the one with the most where that is 0.
pub fn xmx_loop(label: &str, kernel: &str, multiply_adds: u32) -> Option<XmxLoop> {
    let loops = LOOPS.get(&(label, kernel))?;
    let found = match multiply_adds {
        0 => loops.iter().max_by_key(|(multiply_adds, _)| *multiply_adds),
        _ => loops.iter().find(|(of, _)| *of == multiply_adds),
    };
    found.map(|(_, inner)| *inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::xmx::xmx_programs;

    #[test]
    fn every_kernel_with_products_has_its_loop_recorded() {
        for program in xmx_programs() {
            for kernel in program.kernels.iter().filter(|kernel| kernel.multiply_adds > 0) {
                let inner = xmx_loop(&program.label, kernel.name, kernel.multiply_adds);
                assert!(
                    inner.is_some_and(|inner| inner.slots > 0),
                    "{}, {}: not in loops.txt; scripts/test.sh offline writes it",
                    program.label,
                    kernel.name
                );
            }
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let loops = [(4, XmxLoop { slots: 87, around: 0 }), (16, XmxLoop { slots: 351, around: 12 })];
        let line = xmx_loops_line("xmx/a.cl (Q4_K)", "wide", &loops);
        assert_eq!(xmx_loops(&line)[&("xmx/a.cl (Q4_K)", "wide")], loops);
    }
}
