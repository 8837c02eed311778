// How a block of `rows` activations is packed for products of many rows: packed [groups][rows][32]; sums [groups][rows] over
// 32 columns, then [groups][2][rows] over 16.

#define GROUP_FLOATS 32 // of packed, that a row takes in each group

// Columns 32 * g and on of row `row` of the block: a and b are the 32 values.
inline void pack_group(float16 a, float16 b, global float* packed, global float* sums, int g, int groups, int row,
                       int rows) {
    global float* out = packed + ((size_t)g * rows + row) * GROUP;
    vstore16(a, 0, out);
    vstore16(b, 1, out);
    sums[(size_t)g * rows + row] = sum_lanes(a + b);
    sums[(size_t)(groups + 2 * g) * rows + row] = sum_lanes(a);
    sums[(size_t)(groups + 2 * g + 1) * rows + row] = sum_lanes(b);
}
