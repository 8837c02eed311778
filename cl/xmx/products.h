// Rows through a pair of tiles: what every product of the family is made of. One sub-group makes 32 outputs of up to 32 rows.

#define AHEAD 4 // spans from the one that is read to the one that is asked for

// Rows of activations: f16, and their sums over each group of 32 columns, f32 [groups][sums_stride], for formats with
// offsets. Row and column 0 of the surface are the first ones.
typedef struct {
    Surface rows;
    global const float* sums;
    int sums_stride;
} Rows;

// Blocks of 8 rows from `row` on, columns of spans [from, to), through the pair of tiles at `tiles`: c0 and c1 hold the
// sums of the first and of the second tile, one float8 a block. `shared_scales`: how many spans have the same scale, a
// power of two; those of all but the first are not read. A row's sums are the same numbers, added in the same order, whatever
// else is in a launch.
__attribute__((always_inline)) inline void
rows_through_pair(const int BLOCKS, Rows x, int row, global const uchar* tiles, size_t tile_bytes, uint from, uint to,
                  uint shared_scales, private float8* c0, private float8* c1) {
    UNROLL for (int m = 0; m < BLOCKS; m++) c0[m] = c1[m] = 0.0f;
    if (from >= to) return;
    global const uchar* second = tiles + tile_bytes;
    uint next0[WORDS], next1[WORDS];
    load_words(tiles, codes_offset(from), next0);
    load_words(second, codes_offset(from), next1);
    Scale scale0 = no_scale(), scale1 = scale0;
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
        ushort a[SPAN_GROUPS * 2 * 8 * 4]; // [groups][steps of 16][rows]
        UNROLL for (int g = 0; g < SPAN_GROUPS; g++) {
            const int column = (s * SPAN_GROUPS + g) * GROUP;
            private ushort* to_group = a + g * BLOCKS * 16;
            if (BLOCKS == 1) load_8x2(x.rows, column, row, to_group);
            else if (BLOCKS == 2) load_16x2(x.rows, column, row, to_group);
            else load_32x2(x.rows, column, row, to_group);
        }
#ifdef SCALES_NONE
        UNROLL for (int j = 0; j < STEPS; j++) {
            const int8 b0 = operand(words0 + j * STEP_WORDS, 0), b1 = operand(words1 + j * STEP_WORDS, 0);
            UNROLL for (int m = 0; m < BLOCKS; m++) {
                const ushort8 rows = vload8(j * BLOCKS + m, a);
                c0[m] = multiply_add(rows, b0, c0[m]);
                c1[m] = multiply_add(rows, b1, c1[m]);
            }
        }
#else
        int8 b0[STEPS], b1[STEPS];
        UNROLL for (int j = 0; j < STEPS; j++) {
            b0[j] = operand(words0 + j * STEP_WORDS, scale0.base);
            b1[j] = operand(words1 + j * STEP_WORDS, scale1.base);
        }
        UNROLL for (int m = 0; m < BLOCKS; m++) {
            float8 p0 = 0.0f, p1 = 0.0f;
            UNROLL for (int j = 0; j < STEPS; j++) {
                const ushort8 rows = vload8(j * BLOCKS + m, a);
                p0 = multiply_add(rows, b0[j], p0);
                p1 = multiply_add(rows, b1[j], p1);
            }
            c0[m] = fma(p0, (float8)scale0.scale, c0[m]);
            c1[m] = fma(p1, (float8)scale1.scale, c1[m]);
#ifdef OFFSET
            const float sum = as_float(intel_sub_group_block_read(
                (global const uint*)(x.sums + (size_t)s * x.sums_stride + row + m * 8)));
            float row_sums[8];
            UNROLL for (int r = 0; r < 8; r++) row_sums[r] = sub_group_broadcast(sum, r);
            const float8 all = vload8(0, row_sums);
            c0[m] = fma(all, (float8)scale0.offset, c0[m]);
            c1[m] = fma(all, (float8)scale1.offset, c1[m]);
#endif
        }
#endif
    }
}
