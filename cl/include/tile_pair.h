// Many rows through a pair of tiles: what `matmul` and the experts share, on top of products.h.

ADD_ROWS(2)

// A block of `rows` rows through two tiles: results[2 * rows], both tiles' results of a row side by side; room for whole
// 16 rows. Each tile is unpacked once. x and sums: what pack_group wrote of the block, packed_groups >= groups.
inline void rows_through_pair(global const uchar* first, int groups, int packed_groups, global const float* x,
                              global const float* sums, int rows, float16* results) {
    float16 codes[2 * GROUP], scales[2 * (GROUP / SCALE_GROUP)], offsets[2 * (GROUP / SCALE_GROUP)];
    for (int r = 0; r < 2 * rows; r++) results[r] = 0.0f;
    for (int g = 0; g < groups; g++) {
        load_group(first, tile_bytes(groups), 2, g, codes, scales, offsets);
        add_rows_2(codes, scales, offsets, x + (size_t)g * rows * GROUP, group_sums(sums, packed_groups, rows, g), rows,
                   rows, results);
    }
}
