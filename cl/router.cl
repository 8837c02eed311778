// A router whole: the scores of a block of rows, and the experts of each row.

// x, sums: packed rows; scores: f32 [rows][stride], a multiple of 32; the rest as `route` (moe.cl). Global size: row blocks.
KERNEL route_rows(ITEM global const uchar* tiles, global const float* x, global const float* sums, global float* scores,
                  global const float* per_expert, global const float* bias, global int* chosen, global float* weights,
                  int pairs, int tile_groups, int packed_groups, int rows, int experts, int top, int stride, int flags,
                  int groups, int groups_used, float scale, local float* left) {
    const int start = AT(0) * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    for (int pair = 0; pair < pairs; pair++) {
        float16 results[2 * ROW_BLOCK];
        rows_through_pair(tiles + (size_t)pair * 2 * tile_bytes(tile_groups), tile_groups, packed_groups,
                          x + (size_t)start * packed_groups * GROUP_FLOATS, sums + (size_t)start * packed_groups * 3,
                          count, results);
        for (int r = 0; r < count; r++) {
            global float* to = scores + (size_t)(start + r) * stride;
            finish_pair(FINISH_STORE, results[2 * r], results[2 * r + 1], pair, to, to);
        }
    }
    for (int row = start; row < start + count; row++)
        choose_experts(scores + (size_t)row * stride, per_expert, bias, chosen + (size_t)row * top,
                       weights + (size_t)row * top, experts, top, flags, groups, groups_used, scale, left);
}
