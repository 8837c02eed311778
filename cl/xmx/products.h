// Rows through a pair of tiles: what every product of the family is made of. One sub-group makes 32 outputs of up to 32 rows.

// TERMS is the program's: 1, or 2 for products as exact as those of f32.
// Blocks of 8 rows that are loaded together: registers hold 32 rows of one term, and half as many where offsets are multiplied.
#ifdef STEP_OFFSETS
#define AT_ONCE (TERMS == 1 ? 2 : 1)
#else
#define AT_ONCE (TERMS == 1 ? 4 : 2)
#endif
#define AHEAD 4                      // spans from the one that is read to the one that is asked for

// Where weights have no scales, sums of two terms are as exact as those of f32 only if each span's begins from zero, like those of
// other formats; SPANS_IN_A_CHAIN says that there are no registers for that.
#if !defined(SCALES_STEPS) && !(defined(SCALES_NONE) && (TERMS == 1 || defined(SPANS_IN_A_CHAIN)))
#define SPANS_FROM_ZERO
#endif

// Rows of activations: f16 in one term or two, whose sum they are, the second `plane` values behind the first; and their sums
// over each group of 32 columns, f32 [groups][sums_stride], for formats with offsets.
typedef struct {
    Surface rows;
    size_t plane;
    global const float* sums;
    int sums_stride;
} Rows;

// Adds the sum of a span of 8 rows, times its scale, and its offset.
inline void add_span(Scale scale, float8 part, Rows x, uint s, int row, private float8* c) {
    *c = fma(part, (float8)scale.scale, *c);
#ifdef OFFSET
    const float sum = as_float(
        intel_sub_group_block_read((global const uint*)(x.sums + (size_t)s * x.sums_stride + row)));
    float row_sums[8];
    UNROLL for (int r = 0; r < 8; r++) row_sums[r] = sub_group_broadcast(sum, r);
    *c = fma(vload8(0, row_sums), (float8)scale.offset, *c);
#endif
}

#ifdef SCALES_STEPS
// The same for 16 columns, which are multiplied here. Offsets are weights, too, equal ones for all columns.
inline void add_step(Scale scale, int j, private const ushort8* rows, int8 b, private float8* c) {
    float8 part = 0.0f;
    UNROLL for (int t = TERMS - 1; t >= 0; t--) part = multiply_add(rows[t], b, part);
    *c = fma(part, (float8)(j == 0 ? scale.scale : scale.second), *c);
#ifdef STEP_OFFSETS
    float8 sum = 0.0f;
    UNROLL for (int t = TERMS - 1; t >= 0; t--) sum = multiply_add(rows[t], (int8)scale.offsets[j], sum);
    *c = fma(sum, (float8)scale.offset, *c);
#endif
}
#endif

// Blocks of 8 rows from `row` on, columns of spans [from, to), through the pair of tiles at `tiles`: c0 and c1 hold the
// sums of the first and of the second tile, one float8 a block. `shared_scales`: how many spans have the same scale, a
// power of two; those of all but the first are not read. A row's sums are the same numbers, added in the same order, whatever
// else is in a launch.
SPECIALISED void
rows_through_pair(const int BLOCKS, Rows x, int row, global const uchar* tiles, size_t tile_bytes, uint from, uint to,
                  uint shared_scales, private float8* c0, private float8* c1) {
    UNROLL for (int m = 0; m < BLOCKS; m++) c0[m] = c1[m] = 0.0f;
    if (from >= to) return;
    global const uchar* second = tiles + tile_bytes;
    uint next0[WORDS], next1[WORDS];
    load_words(tiles, codes_offset(from), next0);
    load_words(second, codes_offset(from), next1);
    Scale scale0 = no_scale(), scale1 = scale0;
    ushort a[TERMS][64]; // [steps of 16][rows loaded]
#pragma unroll 1
    for (uint s = from; s < to; s++) {
        uint words0[WORDS], words1[WORDS];
        UNROLL for (int w = 0; w < WORDS; w++) {
            words0[w] = next0[w];
            words1[w] = next1[w];
        }
        const uint next = codes_offset(min(s + 1, to - 1)), soon = codes_offset(min(s + AHEAD, to - 1));
        load_words(tiles, next, next0);
        load_words(second, next, next1);
        fetch_words(tiles, soon);
        fetch_words(second, soon);
#ifdef ZERO_POINT
        if (s == from || (s & (shared_scales - 1)) == 0)
#endif
        {
            scale0 = scale_of(tiles, s, s == from, scale0);
            scale1 = scale_of(second, s, s == from, scale1);
        }
        // Of a span of one group, a block of rows is done with before the next one is begun: sums of all of them would have no
        // registers beside the sums of `wide`.
#ifdef SPANS_FROM_ZERO
        float8 p0[4], p1[4];
        UNROLL for (int m = 0; m < BLOCKS; m++) p0[m] = p1[m] = 0.0f;
#endif
        UNROLL for (int g = 0; g < SPAN_GROUPS; g++) {
            const int column = (s * SPAN_GROUPS + g) * GROUP;
            int8 b0[2], b1[2];
            UNROLL for (int j = 0; j < 2; j++) {
                b0[j] = operand(words0 + g * CODE_BITS, j, scale0.base);
                b1[j] = operand(words1 + g * CODE_BITS, j, scale1.base);
            }
            UNROLL for (int m = 0; m < BLOCKS; m++) {
                const int loaded = min(AT_ONCE, BLOCKS < 3 ? BLOCKS : 4);
                if (m % AT_ONCE == 0) {
                    UNROLL for (int t = 0; t < TERMS; t++) {
                        Surface term = x.rows;
                        term.values += t * x.plane;
                        if (loaded == 1) load_8x2(term, column, row + m * 8, a[t]);
                        else if (loaded == 2) load_16x2(term, column, row + m * 8, a[t]);
                        else load_32x2(term, column, row, a[t]);
                    }
                }
#ifdef SCALES_STEPS
                UNROLL for (int j = 0; j < 2; j++) {
                    ushort8 rows[TERMS];
                    UNROLL for (int t = 0; t < TERMS; t++) rows[t] = vload8(j * loaded + m % AT_ONCE, a[t]);
                    add_step(scale0, j, rows, b0[j], c0 + m);
                    add_step(scale1, j, rows, b1[j], c1 + m);
                }
#else
                // The small term first, from zero: its sum has no rounding of large numbers in it.
                UNROLL for (int t = TERMS - 1; t >= 0; t--) {
                    UNROLL for (int j = 0; j < 2; j++) {
                        const ushort8 rows = vload8(j * loaded + m % AT_ONCE, a[t]);
#ifdef SPANS_FROM_ZERO
                        p0[m] = multiply_add(rows, b0[j], p0[m]);
                        p1[m] = multiply_add(rows, b1[j], p1[m]);
#else
                        c0[m] = multiply_add(rows, b0[j], c0[m]);
                        c1[m] = multiply_add(rows, b1[j], c1[m]);
#endif
                    }
                }
#endif
#if defined(SPANS_FROM_ZERO) && defined(SCALES_NONE)
                c0[m] += p0[m];
                c1[m] += p1[m];
#elif defined(SPANS_FROM_ZERO) && SPAN_GROUPS == 1
                add_span(scale0, p0[m], x, s, row + m * 8, c0 + m);
                add_span(scale1, p1[m], x, s, row + m * 8, c1 + m);
#endif
            }
        }
#if SPAN_GROUPS > 1 && !defined(SCALES_NONE)
        UNROLL for (int m = 0; m < BLOCKS; m++) {
            add_span(scale0, p0[m], x, s, row + m * 8, c0 + m);
            add_span(scale1, p1[m], x, s, row + m * 8, c1 + m);
        }
#endif
    }
}
