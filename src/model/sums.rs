//! Checksums of the parts of a mapped file, on all processors, read ahead of: as fast as the disk gives it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::mapping::Mapping;

/// Bytes that are asked for ahead of those that are being added up.
const AHEAD: usize = 16 << 20;

/// Hands `look` the XXH3 sum of each of `parts` with its index, in whatever order they are done.
///
/// # Errors
/// What `look` says, which ends it. Parts that do not lie in the file count as empty.
pub(super) fn sums_of<E>(
    map: &Mapping,
    parts: &[Range<usize>],
    mut look: impl FnMut(usize, u64) -> Result<(), E>,
) -> Result<(), E> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(parts.len());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (done, sums) = channel();
        for _ in 0..threads {
            let (done, next) = (done.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(part) = parts.get(index) else { return };
                    if done.send((index, sum(map, part))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(done);
        sums.into_iter().try_for_each(|(index, sum)| look(index, sum))
    })
}

fn sum(map: &Mapping, part: &Range<usize>) -> u64 {
    let bytes: &[u8] = map.as_ref();
    let mut sum = Xxh3::new();
    let mut at = part.start;
    map.prefetch(at..part.end.min(at + AHEAD));
    for chunk in bytes.get(part.clone()).unwrap_or_default().chunks(AHEAD) {
        at += chunk.len();
        map.prefetch(at..part.end.min(at + AHEAD));
        sum.update(chunk);
    }
    sum.digest()
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64;

    #[test]
    fn sums_are_those_of_the_parts_and_a_refusal_ends_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..AHEAD + 70_000).map(|at| ((at * at) >> 7) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let map = Mapping::open(file.path()).unwrap();
        let parts = [0..1, 1..1, 5..AHEAD + 6, AHEAD..bytes.len(), 3..bytes.len() + 1];
        let mut found = vec![None; parts.len()];
        sums_of(&map, &parts, |index, sum| -> Result<(), ()> {
            assert_eq!(found[index].replace(sum), None);
            Ok(())
        })
        .unwrap();
        for (part, sum) in parts.iter().zip(found) {
            assert_eq!(sum, Some(xxh3_64(bytes.get(part.clone()).unwrap_or_default())), "{part:?}");
        }
        let mut looked = 0;
        let refused = sums_of(&map, &parts, |_, _| {
            looked += 1;
            Err("no")
        });
        assert_eq!((refused, looked), (Err("no"), 1));
    }
}
