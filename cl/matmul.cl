// Matrix times activations for one weight format: `narrow` for a few rows, `matmul` for many. Both add a row's products
// in the same order, group by group, so their results are the same bits.

// At most FEW_ROWS rows. Each work-item prepares the rows for itself (cheap beside its share of the weights) and makes
// `pairs_each` pairs of tiles. The input starts `at` values into row, branch and new_row, `stride` values a row; the output
// `y_at` values into y and other, `y_stride` values a row. h, row_sums: local, what pack_few wants; line: local f32
// [32 * groups], not used for one row that is prepared in place.
KERNEL narrow(ITEM global const uchar* weights, global const float* row, global const float* branch,
              global const float* branch_weight, global const float* norm_weight, global float* new_row,
              global const float* other, global float* y, int flags, int finish, int at, int stride, int y_at,
              int y_stride, int rows, int n, int groups, int pairs, int pairs_each, float epsilon, local float* h,
              local float* row_sums, local float* line) {
    const int item = AT(0), last = min(pairs, (item + 1) * pairs_each);
    const size_t pair_bytes = 2 * tile_bytes(groups);
    int pair = item * pairs_each;
    for (int t = 0; t < 4; t++) fetch(weights + pair * pair_bytes + t * tile_bytes(groups), FIRST);
    local float* prepared = rows == 1 && ONE_IN_PLACE ? h : line;
    for (int r = 0; r < rows && !AGAIN; r++) {
        const size_t from = at + (size_t)r * stride;
        prepare_row(row + from, branch + from, branch_weight, norm_weight, new_row + from, item == 0, flags, n,
                    groups * GROUP, epsilon, prepared);
        pack_few(prepared, h, row_sums, groups, r, rows);
    }
    FEW_ROWS_ON(rows);
#ifdef PAIRS_AT_ONCE
    if (rows > 1) {
        rows_of_pairs(weights, pair, last, groups, rows, h, row_sums, finish, other, y, y_at, y_stride);
        pair = last;
    }
#endif
#ifdef FOUR_TILES
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
#endif
    for (; pair < last; pair++) {
        float16 results[2 * FEW_ROWS];
        global const uchar* tiles = weights + pair * pair_bytes;
        rows_of_pair(tiles, pair + 1 < last ? tiles + pair_bytes : tiles, groups, rows, h, row_sums, results);
        for (int r = 0; r < rows; r++) {
            const size_t to = y_at + (size_t)r * y_stride;
            finish_pair(finish, results[2 * r], results[2 * r + 1], pair, other + to, y + to);
        }
    }
    FEW_ROWS_OFF(rows);
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
