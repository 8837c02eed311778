// Matrix times activations for one weight format: `matvec` for one row, `matmul` for many. Both add a row's products
// in the same order, group by group, so their results are the same bits.

// Asks for the weights that come a kilobyte later: arithmetic fills the processor's window before it would see them.
inline void fetch_ahead(global const uchar* codes) {
#ifdef HOST_PREFETCH
    #pragma unroll
    for (int line = 0; line < GROUP_BYTES; line += 64)
        __builtin_prefetch((const void*)(size_t)(codes + 1024 + line), 0, 3);
#endif
}

// results[t] = what T tiles, one after the other in memory, make of a row h that carries SLOT_SCALES.
#define TILES_OF_ROW(T_)                                                                                              \
    inline void tiles_of_row_##T_(global const uchar* tiles, int groups, local const float* h,                        \
                                  local const float* row_sums, float16* results) {                                    \
        enum { T = T_ };                                                                                              \
        const size_t step = tile_bytes(groups);                                                                       \
        ALL_TILES results[t] = 0.0f;                                                                                  \
        for (int g = 0; g < groups; g++) {                                                                            \
            global const uchar* codes[T];                                                                             \
            ALL_TILES codes[t] = group_codes(tiles + t * step, g);                                                    \
            ALL_TILES fetch_ahead(codes[t]);                                                                          \
            _Pragma("unroll") for (int s = 0; s < GROUP / SCALE_GROUP; s++) {                                         \
                const int scale = g * (GROUP / SCALE_GROUP) + s, first = s * SCALE_GROUP;                             \
                local const float* x = h + scale * SCALE_GROUP;                                                       \
                float16 sums[T];                                                                                      \
                ALL_TILES sums[t] = 0.0f;                                                                             \
                DOT_COLUMNS                                                                                           \
                ALL_TILES results[t] =                                                                                \
                    add_group(results[t], sums[t], row_sums[scale], group_scale(tiles + t * step, scale),             \
                              group_offset(tiles + t * step, scale));                                                 \
            }                                                                                                         \
        }                                                                                                             \
    }
TILES_OF_ROW(2)
TILES_OF_ROW(4)

// One row. Each work-item prepares the row for itself (cheap beside its share of the weights) and makes `pairs_each`
// pairs of tiles. The input starts `at` values into row, branch and new_row; the output `y_at` values into y and other.
// h: local f32 [32 * groups], sums: local f32 [32 * groups / SCALE_GROUP].
EXPLICIT_VECTOR kernel void matvec(global const uchar* weights, global const float* row, global const float* branch,
                                   global const float* branch_weight, global const float* norm_weight,
                                   global float* new_row, global const float* other, global float* y, int flags,
                                   int finish, int at, int y_at, int n, int groups, int pairs, int pairs_each,
                                   float epsilon, local float* h, local float* sums) {
    const int item = get_global_id(0);
    prepare_row(row + at, branch + at, branch_weight, norm_weight, new_row + at, item == 0, flags, n, groups * GROUP,
                epsilon, h);
    for (int g = 0; g < groups; g++) {
        float16 a = vload16(2 * g, h), b = vload16(2 * g + 1, h);
#if SCALE_GROUP == 16
        sums[2 * g] = sum_lanes(a);
        sums[2 * g + 1] = sum_lanes(b);
#else
        sums[g] = sum_lanes(a + b);
#endif
        vstore16(a * SLOT_SCALES, 2 * g, h);
        vstore16(b * SLOT_SCALES, 2 * g + 1, h);
    }
    const int last = min(pairs, (item + 1) * pairs_each);
    int pair = item * pairs_each;
    for (; pair + 2 <= last; pair += 2) {
        float16 results[4];
        tiles_of_row_4(weights + (size_t)pair * 2 * tile_bytes(groups), groups, h, sums, results);
        finish_pair(finish, results[0], results[1], pair, other + y_at, y + y_at);
        finish_pair(finish, results[2], results[3], pair + 1, other + y_at, y + y_at);
    }
    if (pair < last) {
        float16 results[2];
        tiles_of_row_2(weights + (size_t)pair * 2 * tile_bytes(groups), groups, h, sums, results);
        finish_pair(finish, results[0], results[1], pair, other + y_at, y + y_at);
    }
}

// Many rows. x, sums: packed activations as pack_rows writes them. y, other: f32, `stride` values a row, from `y_at` on.
// Global size: pairs x row blocks.
EXPLICIT_VECTOR kernel void matmul(global const uchar* weights, global const float* x, global const float* sums,
                                   global const float* other, global float* y, int finish, int y_at, int groups,
                                   int packed_groups, int rows, int stride) {
    const int pair = get_global_id(0);
    const int start = get_global_id(1) * ROW_BLOCK;
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
