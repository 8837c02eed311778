// The product of many rows and a pair of tiles, for one weight format: what `matmul` and the experts share. A row's
// result is made group by group in the same order whatever rows are beside it.

// Up to ROWS rows at once, 8 or 3, so that a column of codes is loaded once for all of them: as many as the device's
// registers hold.
#ifndef ROWS
#define ROWS 8
#endif

// R rows of one group: adds their share to results[2 * R]. x: [R][32] f32, sums: 1 per row and scale group,
// sum_stride apart.
#define ROWS_OF_GROUP(R)                                                                                              \
    inline void rows_of_group_##R(const float16* codes, const float16* scale0, const float16* scale1,                 \
                                  const float16* offset0, const float16* offset1, global const float* x,              \
                                  global const float* sums, int sum_stride, float16* results) {                       \
        _Pragma("unroll") for (int s = 0; s < GROUP / SCALE_GROUP; s++) {                                             \
            float16 dots[R][2];                                                                                       \
            _Pragma("unroll") for (int r = 0; r < R; r++) { dots[r][0] = 0.0f; dots[r][1] = 0.0f; }                   \
            _Pragma("unroll") for (int i = s * SCALE_GROUP; i < (s + 1) * SCALE_GROUP; i++) {                         \
                float16 w0 = codes[2 * i], w1 = codes[2 * i + 1];                                                     \
                _Pragma("unroll") for (int r = 0; r < R; r++) {                                                       \
                    float16 v = x[r * GROUP + i];                                                                     \
                    dots[r][0] = fma(w0, v, dots[r][0]);                                                              \
                    dots[r][1] = fma(w1, v, dots[r][1]);                                                              \
                }                                                                                                     \
            }                                                                                                         \
            _Pragma("unroll") for (int r = 0; r < R; r++) {                                                           \
                float sum = sums[s * sum_stride + r];                                                                 \
                results[2 * r] = add_group(results[2 * r], dots[r][0], sum, scale0[s], offset0[s]);                   \
                results[2 * r + 1] = add_group(results[2 * r + 1], dots[r][1], sum, scale1[s], offset1[s]);           \
            }                                                                                                         \
        }                                                                                                             \
    }
ROWS_OF_GROUP(1)
ROWS_OF_GROUP(2)
ROWS_OF_GROUP(3)
#if ROWS > 3
ROWS_OF_GROUP(4)
ROWS_OF_GROUP(5)
ROWS_OF_GROUP(6)
ROWS_OF_GROUP(7)
ROWS_OF_GROUP(8)
#endif

// `count` rows through two tiles: results[2 * count], both tiles' results of a row side by side. Each
// tile is unpacked once. x and sums: the first of them among the `rows` rows that pack_rows wrote as packed
// [packed_groups][rows][32], packed_groups >= groups, and sums [packed_groups][rows], then [packed_groups][2][rows] for
// formats with 16-column scales.
inline void rows_through_pair(global const uchar* first, global const uchar* second, int groups, int packed_groups,
                              global const float* x, global const float* sums, int rows, int count,
                              float16* results) {
    float16 codes[2 * GROUP];
    for (int r = 0; r < 2 * count; r++) results[r] = 0.0f;
    for (int g = 0; g < groups; g++) {
        unpack_group(group_codes(first, g), codes, 2);
        unpack_group(group_codes(second, g), codes + 1, 2);
        float16 scale0[GROUP / SCALE_GROUP], scale1[GROUP / SCALE_GROUP];
        float16 offset0[GROUP / SCALE_GROUP], offset1[GROUP / SCALE_GROUP];
        #pragma unroll
        for (int s = 0; s < GROUP / SCALE_GROUP; s++) {
            const int scale = g * (GROUP / SCALE_GROUP) + s;
            scale0[s] = group_scale(first, scale);
            scale1[s] = group_scale(second, scale);
            offset0[s] = group_offset(first, scale);
            offset1[s] = group_offset(second, scale);
        }
        global const float* xg = x + (size_t)g * rows * GROUP;
#if SCALE_GROUP == 16
        global const float* sg = sums + (size_t)(packed_groups + 2 * g) * rows;
#else
        global const float* sg = sums + (size_t)g * rows;
#endif
        // Dealt out evenly: a few rows alone would leave the multipliers waiting for each other.
#define TAKE(R)                                                                                                       \
    case R:                                                                                                           \
        rows_of_group_##R(codes, scale0, scale1, offset0, offset1, xg + r * GROUP, sg + r, rows, results + 2 * r);    \
        r += R;                                                                                                       \
        break;
        int r = 0;
        for (int parts = (count + ROWS - 1) / ROWS; parts > 0; parts--) {
            switch ((count - r) / parts) {
                TAKE(1)
                TAKE(2)
                TAKE(3)
#if ROWS > 3
                TAKE(4)
                TAKE(5)
                TAKE(6)
                TAKE(7)
                TAKE(8)
#endif
            }
        }
    }
}
