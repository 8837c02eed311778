// Matrix times activations for one weight format: `narrow` for a few rows, `matmul` for many. Both add a row's products
// in the same order, group by group, so their results are the same bits.

#define STREAM_BYTES (BLOCK_BYTES / BLOCK_GROUPS) // of a tile for each group
#define AHEAD (4 * STREAM_BYTES)                  // bytes of a tile that are asked for before they are needed

// Asks for weights that come soon: arithmetic fills the processor's window before it would see them.
inline void fetch(global const uchar* from, int bytes) {
#ifdef HOST_PREFETCH
    #pragma unroll
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const void*)(size_t)(from + line), 0, 3);
#endif
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

// At most FEW_ROWS rows. Each work-item prepares the rows for itself (cheap beside its share of the weights) and makes
// `pairs_each` pairs of tiles. The input starts `at` values into row, branch and new_row, `stride` values a row; the output
// `y_at` values into y and other, `y_stride` values a row. h: local f32 [32 * groups * rows], row_sums: local f32
// [32 * groups / SCALE_GROUP * rows], line: local f32 [32 * groups], not used for one row.
KERNEL narrow(ITEM global const uchar* weights, global const float* row, global const float* branch,
              global const float* branch_weight, global const float* norm_weight, global float* new_row,
              global const float* other, global float* y, int flags, int finish, int at, int stride, int y_at,
              int y_stride, int rows, int n, int groups, int pairs, int pairs_each, float epsilon, local float* h,
              local float* row_sums, local float* line) {
    const int item = AT(0), last = min(pairs, (item + 1) * pairs_each);
    const size_t pair_bytes = 2 * tile_bytes(groups);
    int pair = item * pairs_each;
    for (int t = 0; t < 4; t++) fetch(weights + pair * pair_bytes + t * tile_bytes(groups), AHEAD);
    for (int r = 0; r < rows && !AGAIN; r++) {
        local float* prepared = rows == 1 ? h : line;
        const size_t from = at + (size_t)r * stride;
        prepare_row(row + from, branch + from, branch_weight, norm_weight, new_row + from, item == 0, flags, n,
                    groups * GROUP, epsilon, prepared);
        for (int g = 0; g < groups; g++) {
            const float16 a = vload16(2 * g, prepared), b = vload16(2 * g + 1, prepared);
#if SCALE_GROUP == 16
            row_sums[2 * g * rows + r] = sum_lanes(a);
            row_sums[(2 * g + 1) * rows + r] = sum_lanes(b);
#else
            row_sums[g * rows + r] = sum_lanes(a + b);
#endif
            vstore16(a * SLOT_SCALES, 2 * (g * rows + r), h);
            vstore16(b * SLOT_SCALES, 2 * (g * rows + r) + 1, h);
        }
    }
    for (; rows <= FOUR_TILES && pair + 2 <= last; pair += 2) {
        float16 results[4 * FOUR_TILES];
        global const uchar* tiles = weights + pair * pair_bytes;
        rows_of_two_pairs(tiles, pair + 2 < last ? tiles + 2 * pair_bytes : tiles, groups, rows, h, row_sums, results);
        for (int r = 0; r < rows; r++) {
            const size_t to = y_at + (size_t)r * y_stride;
            finish_pair(finish, results[4 * r], results[4 * r + 1], pair, other + to, y + to);
            finish_pair(finish, results[4 * r + 2], results[4 * r + 3], pair + 1, other + to, y + to);
        }
    }
    for (; pair < last; pair++) {
        float16 results[2 * FEW_ROWS];
        global const uchar* tiles = weights + pair * pair_bytes;
        rows_of_pair(tiles, pair + 1 < last ? tiles + pair_bytes : tiles, groups, rows, h, row_sums, results);
        for (int r = 0; r < rows; r++) {
            const size_t to = y_at + (size_t)r * y_stride;
            finish_pair(finish, results[2 * r], results[2 * r + 1], pair, other + to, y + to);
        }
    }
}

// Many rows. x, sums: packed activations as pack_rows writes them. y, other: f32, `stride` values a row, from `y_at` on.
// Global size: pairs x row blocks.
KERNEL matmul(ITEM global const uchar* weights, global const float* x, global const float* sums,
              global const float* other, global float* y, int finish, int y_at, int groups, int packed_groups, int rows,
              int stride) {
    const int pair = AT(0);
    const int start = AT(1) * ROW_BLOCK;
    const int count = min(ROW_BLOCK, rows - start);
    global const uchar* first = weights + (size_t)pair * 2 * tile_bytes(groups);
    float16 results[2 * ROW_BLOCK];
    rows_through_pair(first, groups, packed_groups, x + (size_t)start * packed_groups * GROUP_FLOATS,
                      sums + (size_t)start * packed_groups * 3, count, results);
    for (int r = 0; r < count; r++) {
        const size_t at = (size_t)(start + r) * stride + y_at;
        finish_pair(finish, results[2 * r], results[2 * r + 1], pair, other + at, y + at);
    }
}
