//! What is no number in rows that begin with a wrong guess stays in those rows: attention of the rows before them, and of
//! the passes after them, has the bits that it has without the guess, however rows share work-items.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use ops_support::*;

use axe::device::{Arg, Device};
use axe::ops::{
    ATTENTION_START, Attention, Cache, CacheKind, Family, Kernels, LATENT_START, LatentRotation, Pairing,
    ROTATE_START, Rotation,
};

/// Values of a value head, or of a latent.
const VALUE: usize = 32;
/// Values that turn beside a latent.
const TURNS: usize = 16;
const WIDTHS: [usize; 6] = [1, 2, 3, 4, 8, 16];

/// Heads over a cache.
#[derive(Debug, Clone, Copy)]
struct Heads {
    kind: CacheKind,
    /// A key is a latent and values that turn, the value its first part.
    latent: bool,
    kv_heads: usize,
    group: usize,
    window: Option<usize>,
}

impl Heads {
    fn key(&self) -> usize {
        if self.latent { VALUE + TURNS } else { VALUE }
    }

    fn k_at(&self) -> usize {
        self.kv_heads * self.group * self.key()
    }

    fn stride(&self) -> usize {
        self.k_at() + self.kv_heads * (self.key() + VALUE)
    }

    fn cache(&self, (device, kernels): &(Device, Kernels), positions: usize) -> Cache {
        if self.latent {
            Cache::latent(device, self.kind, self.key(), VALUE, positions).unwrap()
        } else {
            let family = kernels.products().attention(self.kind, VALUE);
            Cache::of_family(device, family, self.kind, self.kv_heads, VALUE, positions).unwrap()
        }
    }

    /// One pass: `rows` go into the cache from `start` on, and what their heads see comes back.
    fn pass(&self, on: &(Device, Kernels), cache: &Cache, rows: &[f32], start: usize) -> Vec<f32> {
        let (device, kernels) = on;
        let (stride, q_heads) = (self.stride(), self.kv_heads * self.group);
        let count = rows.len() / stride;
        let rows = upload(device, rows);
        let queries = match cache.family {
            Family::Vector => rows.clone(),
            Family::Xmx => poisoned(device, cache.query_bytes(q_heads, count) / 4),
        };
        let still = upload(device, &[1.0, 0.0].repeat((start + count) * TURNS / 2));
        let (turning, norm) =
            (upload(device, &vec![0.25; count * q_heads * TURNS]), upload(device, &[1.5; VALUE]));
        let (mut rotate, at) = if self.latent {
            let rotation = LatentRotation {
                rows: &rows,
                stride,
                q_heads,
                k_at: self.k_at(),
                turning: &turning,
                turning_stride: q_heads * TURNS,
                turning_step: TURNS,
                turning_at: 0,
                angles: &still,
                pairing: Pairing::Neighbours,
                norm: &norm,
                epsilon: EPSILON,
            };
            (kernels.rotate_and_cache_latent(device, &rotation, cache, count).unwrap(), LATENT_START)
        } else {
            let rotation = Rotation {
                qkv: &rows,
                stride,
                q_heads,
                k_at: self.k_at(),
                v_at: self.k_at() + self.kv_heads * VALUE,
                bias: None,
                angles: &still,
                half_rotated: 0,
                pairing: Pairing::Neighbours,
                norms: None,
                value_norms: false,
                queries_only: false,
                queries: Some(&queries),
                epsilon: EPSILON,
            };
            (kernels.rotate_and_cache(device, &rotation, cache, count).unwrap(), ROTATE_START)
        };
        rotate.set(at, Arg::I32(start as i32)).unwrap();
        device.enqueue(&rotate).unwrap();
        let out = poisoned(device, count * q_heads * VALUE);
        let looks = Attention {
            q: &queries,
            stride,
            out: &out,
            out_stride: q_heads * VALUE,
            q_heads,
            window: self.window,
            canvas: false,
            scale: 0.3,
            softcap: 0.0,
        };
        let mut launch = kernels.attention(device, &looks, cache, count).unwrap();
        launch.set(ATTENTION_START, Arg::I32(start as i32)).unwrap();
        device.enqueue(&launch).unwrap();
        download(device, &out)
    }

    /// Passes of every width after `start` positions, of whose rows the last are spoilt, and a pass that replaces them.
    fn check(&self, on: &(Device, Kernels), start: usize) {
        let widest = WIDTHS[WIDTHS.len() - 1];
        let (stride, out) = (self.stride(), self.kv_heads * self.group * VALUE);
        let mut random = Random(start as u64 + 1);
        let rows: Vec<f32> = (0..(start + 2 * widest) * stride).map(|_| random.unit() * 2.0).collect();
        let of = |from: usize, to: usize| &rows[from * stride..to * stride];
        let whole = self.cache(on, start + 2 * widest);
        let expected: Vec<Vec<f32>> = (0..start + 2 * widest)
            .map(|position| self.pass(on, &whole, of(position, position + 1), position))
            .collect();
        assert!(expected.iter().flatten().all(|value| value.is_finite()));
        let expected = |from: usize, to: usize| expected[from..to].concat();
        // With a window, the cache has no more room than passes need: a guess is written over what is out of sight.
        let positions = self.window.map_or(start + 2 * widest, |window| window - 1 + widest);
        for width in WIDTHS {
            for right in [1, 2, width - width / 4] {
                if right > width {
                    continue;
                }
                let cache = self.cache(on, positions);
                for from in (0..start).step_by(widest) {
                    self.pass(on, &cache, of(from, start.min(from + widest)), from);
                }
                let mut guessed = of(start, start + width).to_vec();
                for (i, value) in guessed[right * stride..].iter_mut().enumerate() {
                    *value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3];
                }
                let found = self.pass(on, &cache, &guessed, start);
                let what = format!("{self:?}: {right} of {width} rows from {start} on");
                assert!(same_bits(&found[..right * out], &expected(start, start + right)), "{what}");
                assert!(found[right * out..].iter().all(|value| value.is_nan()), "{what}: a spoilt row");
                let next = start + right;
                for (width, from) in [(1, next), (3, next + 1)] {
                    let found = self.pass(on, &cache, of(from, from + width), from);
                    assert!(
                        same_bits(&found, &expected(from, from + width)),
                        "{what}, then {width} from {from}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_behind_a_guess_does_not_reach_rows_before_it() {
    let on = open();
    let starts: &[usize] = if simulated() { &[3] } else { &[0, 60, 130] };
    for kind in [CacheKind::F16, CacheKind::F32] {
        // Every number of looks that kernels are made for, by heads of a group and by rows.
        for (kv_heads, group) in [(1, 1), (2, 2), (1, 3), (1, 6), (2, 8)] {
            for window in [None, Some(3), Some(40)] {
                for &start in starts {
                    Heads { kind, latent: false, kv_heads, group, window }.check(&on, start);
                }
            }
        }
    }
}

#[test]
fn nor_by_the_kernels_of_the_xmx_family() {
    let device = open().0;
    let Some(kernels) = Kernels::with_xmx(&device).unwrap() else { return };
    let on = (device, kernels);
    for (kv_heads, group) in [(1, 1), (2, 8)] {
        for window in [None, Some(3), Some(40)] {
            for start in [0, 60] {
                Heads { kind: CacheKind::F16, latent: false, kv_heads, group, window }.check(&on, start);
            }
        }
    }
}

#[test]
fn nor_where_values_are_parts_of_keys() {
    let on = open();
    for kind in [CacheKind::F16, CacheKind::F32] {
        for group in [1, 4, 5] {
            Heads { kind, latent: true, kv_heads: 1, group, window: None }.check(&on, 60);
        }
    }
}
