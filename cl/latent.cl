// Products of heads: each head of a row has its own matrix. As many matrices lie one below the other, `pairs` pairs of tiles
// each. Rows are packed for each head as pack_rows would pack the head's part of them alone.

// Packs n values of each head of each row, n a multiple of 16: head h's begin at + h * step values into its row. x: f32
// [rows][stride]. One work-item a head and row.
KERNEL pack_heads(ITEM global const float* x, global float* packed, global float* sums, int at, int step, int n,
                  int groups, int stride) {
    const int head = AT(0), row = AT(1), rows = OF(1);
    global const float* from = x + (size_t)row * stride + at + head * step;
    const int start = row / ROW_BLOCK * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    const size_t block = (size_t)head * rows + start;
    for (int g = 0; g < groups; g++) {
        float16 a = 0.0f, b = 0.0f;
        if (32 * g < n) a = flush_tiny(vload16(2 * g, from));
        if (32 * g + 16 < n) b = flush_tiny(vload16(2 * g + 1, from));
        pack_group(a, b, packed + block * groups * GROUP_FLOATS, sums + block * groups * 3, g, groups, row - start, count);
    }
}

// y: f32 [rows][stride]: the outputs of head h, `tiles` times 16, go to y_at + h * y_step. packed, sums: pack_heads.
// Global size: pairs x heads x row blocks.
KERNEL head_products(ITEM global const uchar* weights, global const float* packed, global const float* sums,
                     global float* y, int y_at, int y_step, int tiles, int groups, int packed_groups, int rows,
                     int stride) {
    const int pair = AT(0), pairs = OF(0), head = AT(1);
    const int start = AT(2) * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    const size_t block = (size_t)head * rows + start;
    global const uchar* first = weights + ((size_t)head * pairs + pair) * 2 * tile_bytes(groups);
    float16 results[2 * ROW_BLOCK];
    rows_through_pair(first, groups, packed_groups, packed + block * packed_groups * GROUP_FLOATS,
                      sums + block * packed_groups * 3, count, results);
    for (int r = 0; r < count; r++) {
        global float* out = y + (size_t)(start + r) * stride + y_at + head * y_step;
        vstore16(results[2 * r], 2 * pair, out);
        if (2 * pair + 1 < tiles) vstore16(results[2 * r + 1], 2 * pair + 1, out);
    }
}
