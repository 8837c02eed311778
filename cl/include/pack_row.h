// A prepared row on its way into packed rows (pack.h, or tiles.h).

// Packs h, 32 * groups values, as row `row` of `rows`.
inline void pack_row(local const float* h, int groups, global float* packed, global float* sums, int row, int rows) {
    const int start = row / ROW_BLOCK * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    packed += (size_t)start * groups * GROUP_FLOATS;
    sums += (size_t)start * groups * 3;
    for (int g = 0; g < groups; g++)
        pack_group(vload16(2 * g, h), vload16(2 * g + 1, h), packed, sums, g, groups, row - start, count);
}
