// Products of many rows and tiles, group by group. Every kernel that multiplies packed rows adds a row's products
// through these lines, so their results are the same bits, however many rows or tiles it takes at a time.

// Up to ROWS rows at once, 8 or 3, so that a column of codes is loaded once for all of them: as many as the device's registers hold.
#ifndef ROWS
#define ROWS 8
#endif

// Codes, scales and offsets of group g of `tiles` tiles, `step` bytes from one to the next:
// codes[32][tiles], scales and offsets [GROUP / SCALE_GROUP][tiles].
inline void load_group(global const uchar* first, size_t step, int tiles, int g, float16* codes, float16* scales,
                       float16* offsets) {
    #pragma unroll
    for (int t = 0; t < tiles; t++) {
        global const uchar* tile = first + t * step;
        unpack_group(group_codes(tile, g), codes + t, tiles);
        #pragma unroll
        for (int s = 0; s < GROUP / SCALE_GROUP; s++) {
            scales[s * tiles + t] = group_scale(tile, g * (GROUP / SCALE_GROUP) + s);
            offsets[s * tiles + t] = group_offset(tile, g * (GROUP / SCALE_GROUP) + s);
        }
    }
}

// Where the sums of group g begin: packed sums are [packed_groups][rows] over 32 columns, then [packed_groups][2][rows]
// over 16; a scale group's are `rows` after those of the one before.
inline global const float* group_sums(global const float* sums, int packed_groups, int rows, int g) {
#if SCALE_GROUP == 16
    return sums + (size_t)(packed_groups + 2 * g) * rows;
#else
    return sums + (size_t)g * rows;
#endif
}

// R rows of one group and T tiles: adds their share to results[R][T]. codes, scales, offsets: as load_group leaves them;
// x: [R][32] f32; sums: 1 per row and scale group, sum_stride apart.
#define ROWS_OF_GROUP(T, R)                                                                                           \
    inline void rows_of_group_##T##_##R(const float16* codes, const float16* scales, const float16* offsets,          \
                                        global const float* x, global const float* sums, int sum_stride,              \
                                        float16* results) {                                                           \
        _Pragma("unroll") for (int s = 0; s < GROUP / SCALE_GROUP; s++) {                                             \
            float16 dots[R][T];                                                                                       \
            _Pragma("unroll") for (int r = 0; r < R; r++)                                                             \
                _Pragma("unroll") for (int t = 0; t < T; t++) dots[r][t] = 0.0f;                                      \
            _Pragma("unroll") for (int i = s * SCALE_GROUP; i < (s + 1) * SCALE_GROUP; i++) {                         \
                float16 w[T];                                                                                         \
                _Pragma("unroll") for (int t = 0; t < T; t++) w[t] = codes[T * i + t];                                \
                _Pragma("unroll") for (int r = 0; r < R; r++) {                                                       \
                    float16 v = x[r * GROUP + i];                                                                     \
                    _Pragma("unroll") for (int t = 0; t < T; t++) dots[r][t] = fma(w[t], v, dots[r][t]);              \
                }                                                                                                     \
            }                                                                                                         \
            _Pragma("unroll") for (int r = 0; r < R; r++) {                                                           \
                float sum = sums[s * sum_stride + r];                                                                 \
                _Pragma("unroll") for (int t = 0; t < T; t++)                                                         \
                    results[r * T + t] =                                                                              \
                        add_group(results[r * T + t], dots[r][t], sum, scales[s * T + t], offsets[s * T + t]);        \
            }                                                                                                         \
        }                                                                                                             \
    }

// `count` rows of one group and T tiles, dealt out evenly over as few turns as there are registers for: a few rows alone
// would leave the multipliers waiting for each other.
#define TAKE_ROWS(T, R)                                                                                               \
    case R:                                                                                                           \
        rows_of_group_##T##_##R(codes, scales, offsets, x + r * GROUP, sums + r, sum_stride, results + r * T);        \
        r += R;                                                                                                       \
        break;
#define DEAL_ROWS(T, CASES)                                                                                           \
    inline void add_rows_##T(const float16* codes, const float16* scales, const float16* offsets,                     \
                             global const float* x, global const float* sums, int sum_stride, int count,              \
                             float16* results) {                                                                      \
        int r = 0;                                                                                                    \
        for (int turns = (count + ROWS - 1) / ROWS; turns > 0; turns--) {                                             \
            switch ((count - r) / turns) { CASES }                                                                    \
        }                                                                                                             \
    }
#if ROWS > 3
#define ADD_ROWS(T)                                                                                                   \
    ROWS_OF_GROUP(T, 1)                                                                                               \
    ROWS_OF_GROUP(T, 2)                                                                                               \
    ROWS_OF_GROUP(T, 3)                                                                                               \
    ROWS_OF_GROUP(T, 4)                                                                                               \
    ROWS_OF_GROUP(T, 5)                                                                                               \
    ROWS_OF_GROUP(T, 6)                                                                                               \
    ROWS_OF_GROUP(T, 7)                                                                                               \
    ROWS_OF_GROUP(T, 8)                                                                                               \
    DEAL_ROWS(T, TAKE_ROWS(T, 1) TAKE_ROWS(T, 2) TAKE_ROWS(T, 3) TAKE_ROWS(T, 4) TAKE_ROWS(T, 5) TAKE_ROWS(T, 6)      \
                 TAKE_ROWS(T, 7) TAKE_ROWS(T, 8))
#else
#define ADD_ROWS(T)                                                                                                   \
    ROWS_OF_GROUP(T, 1)                                                                                               \
    ROWS_OF_GROUP(T, 2)                                                                                               \
    ROWS_OF_GROUP(T, 3)                                                                                               \
    DEAL_ROWS(T, TAKE_ROWS(T, 1) TAKE_ROWS(T, 2) TAKE_ROWS(T, 3))
#endif
