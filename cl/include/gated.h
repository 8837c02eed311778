// The first product of a gated network, whose results are packed for the second one.

// activation(gate) * up for columns 32 g to 32 g + 31 of the inner row, of a block of `count` rows, at most SLOT_BLOCK. The
// matrix's tiles of gate and up alternate, a pair of them makes 16 columns; columns past the last pair are zero. x, sums: the
// block's packed rows; inner, inner_sums: the same of its inner rows.
inline void gated_group(global const uchar* tiles, int finish, int pairs, int groups, int packed_groups,
                        global const float* x, global const float* sums, int count, int g, global float* inner,
                        global float* inner_sums, int inner_groups) {
    const size_t step = tile_bytes(groups);
    float16 columns[2][SLOT_BLOCK];
    for (int half_group = 0; half_group < 2; half_group++) {
        const int pair = 2 * g + half_group;
        if (pair < pairs) {
            float16 results[2 * SLOT_BLOCK];
            rows_through_pair(tiles + (size_t)pair * 2 * step, groups, packed_groups, x, sums, count, results);
            for (int r = 0; r < count; r++)
                columns[half_group][r] = flush_tiny(gated(finish, results[2 * r], results[2 * r + 1]));
        } else {
            for (int r = 0; r < count; r++) columns[half_group][r] = 0.0f;
        }
    }
    for (int r = 0; r < count; r++)
        pack_group(columns[0][r], columns[1][r], inner, inner_sums, g, inner_groups, r, count);
}
