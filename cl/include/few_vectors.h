// A few rows through tiles by vectors: what `narrow` does with rows that it has prepared.

#define ONE_IN_PLACE 1 // a single row's line may be h

#define FEW_ROWS_ON(rows)
#define FEW_ROWS_OFF(rows)

// Row r of `rows` as rows_of_tiles wants it, from the line of it that prepare_row has left: h [groups][rows][32] of values
// that carry SLOT_SCALES, row_sums [scale groups][rows].
inline void pack_few(local const float* line, local float* h, local float* row_sums, int groups, int r, int rows) {
    for (int g = 0; g < groups; g++) {
        const float16 a = vload16(2 * g, line), b = vload16(2 * g + 1, line);
        few_sums(a, b, row_sums, g, r, rows);
        vstore16(a * SLOT_SCALES, 2 * (g * rows + r), h);
        vstore16(b * SLOT_SCALES, 2 * (g * rows + r) + 1, h);
    }
}

// results[R][T] = what T tiles, one after the other in memory, make of R rows that carry SLOT_SCALES. next: the tiles that
// come after these, or these again. h: [groups][rows][32] from the first of the R rows on, of `rows` in all; row_sums:
// [scale groups][rows] likewise.
#define ROWS_OF_TILES(T_, R_)                                                                                         \
    inline void rows_of_tiles_##T_##_##R_(global const uchar* tiles, global const uchar* next, int groups, int rows,  \
                                          local const float* h, local const float* row_sums, float16* results) {      \
        enum { T = T_, R = R_ };                                                                                      \
        const size_t step = tile_bytes(groups);                                                                       \
        ALL_ROWS ALL_TILES results[r * T + t] = 0.0f;                                                                 \
        for (int g = 0; g < groups; g++) {                                                                            \
            const size_t ahead = (size_t)g * STREAM_BYTES + AHEAD;                                                    \
            global const uchar* soon = ahead < step ? tiles + ahead : next + (ahead - step);                          \
            ALL_TILES fetch(soon + t * step, STREAM_BYTES);                                                           \
            global const uchar* codes[T];                                                                             \
            ALL_TILES codes[t] = group_codes(tiles + t * step, g);                                                    \
            _Pragma("unroll") for (int s = 0; s < GROUP / SCALE_GROUP; s++) {                                         \
                const int scale = g * (GROUP / SCALE_GROUP) + s, first = s * SCALE_GROUP;                             \
                local const float* x = h + (size_t)g * rows * GROUP + first;                                          \
                local const float* sum = row_sums + (size_t)scale * rows;                                             \
                float16 sums[R][T];                                                                                   \
                ALL_ROWS ALL_TILES sums[r][t] = 0.0f;                                                                 \
                DOT_COLUMNS                                                                                           \
                ALL_TILES {                                                                                           \
                    const float16 factor = group_scale(tiles + t * step, scale);                                      \
                    const float16 offset = group_offset(tiles + t * step, scale);                                     \
                    ALL_ROWS results[r * T + t] = add_group(results[r * T + t], sums[r][t], sum[r], factor, offset);  \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
ROWS_OF_TILES(2, 1)
ROWS_OF_TILES(4, 1)
ROWS_OF_TILES(2, 2)
ROWS_OF_TILES(2, 3)
#if ROWS > 3
ROWS_OF_TILES(4, 2)
ROWS_OF_TILES(4, 3)
ROWS_OF_TILES(2, 4)
ROWS_OF_TILES(2, 5)
ROWS_OF_TILES(2, 6)
ROWS_OF_TILES(2, 7)
ROWS_OF_TILES(2, 8)
#endif

#define TAKE_ROWS_OF_TILES(T, R)                                                                                      \
    case R: rows_of_tiles_##T##_##R(tiles, next, groups, rows, h + r * GROUP, row_sums + r, results + r * T); break;

// All rows through a pair of tiles, dealt out evenly over as few turns as there are registers for. Turns after the first
// find the tiles in a cache.
inline void rows_of_pair(global const uchar* tiles, global const uchar* next, int groups, int rows,
                         local const float* h, local const float* row_sums, float16* results) {
    int r = 0;
    for (int turns = (rows + ROWS - 1) / ROWS; turns > 0; turns--) {
        const int count = (rows - r) / turns;
        switch (count) {
            TAKE_ROWS_OF_TILES(2, 1)
            TAKE_ROWS_OF_TILES(2, 2)
            TAKE_ROWS_OF_TILES(2, 3)
#if ROWS > 3
            TAKE_ROWS_OF_TILES(2, 4)
            TAKE_ROWS_OF_TILES(2, 5)
            TAKE_ROWS_OF_TILES(2, 6)
            TAKE_ROWS_OF_TILES(2, 7)
            TAKE_ROWS_OF_TILES(2, 8)
#endif
        }
        r += count;
    }
}

// The most rows of `narrow`.
#define FEW_ROWS 8
// Rows for which four tiles at a time have registers; two would leave the multipliers waiting for each other.
#if ROWS > 3
#define FOUR_TILES 3
#else
#define FOUR_TILES 1
#endif

// All of at most FOUR_TILES rows through two pairs of tiles.
inline void rows_of_two_pairs(global const uchar* tiles, global const uchar* next, int groups, int rows,
                              local const float* h, local const float* row_sums, float16* results) {
    const int r = 0;
    switch (rows) {
        TAKE_ROWS_OF_TILES(4, 1)
#if ROWS > 3
        TAKE_ROWS_OF_TILES(4, 2)
        TAKE_ROWS_OF_TILES(4, 3)
#endif
    }
}
