// Many rows through a pair of tiles: what `matmul` and the experts share, on top of products.h.

ADD_ROWS(2)

// `count` rows through two tiles: results[2 * count], both tiles' results of a row side by side. Each
// tile is unpacked once. x and sums: the first of them among the `rows` rows that pack_rows wrote as packed
// [packed_groups][rows][32], packed_groups >= groups, and sums [packed_groups][rows], then [packed_groups][2][rows] for
// formats with 16-column scales.
inline void rows_through_pair(global const uchar* first, int groups, int packed_groups, global const float* x,
                              global const float* sums, int rows, int count, float16* results) {
    float16 codes[2 * GROUP], scales[2 * (GROUP / SCALE_GROUP)], offsets[2 * (GROUP / SCALE_GROUP)];
    for (int r = 0; r < 2 * count; r++) results[r] = 0.0f;
    for (int g = 0; g < groups; g++) {
        load_group(first, tile_bytes(groups), 2, g, codes, scales, offsets);
        add_rows_2(codes, scales, offsets, x + (size_t)g * rows * GROUP, group_sums(sums, packed_groups, rows, g), rows,
                   count, results);
    }
}
