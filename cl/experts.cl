// The products of all experts in one launch, for one weight format. Blocks and slots: moe.cl says what they are.
//
// Matrices of the experts lie one below the other, `pairs` pairs of tiles each. Global size: pairs (or 32 columns of the
// inner row) x the most blocks there can be; work-items of unused blocks return at once.

// activation(gate) * up for 32 columns of the inner row, packed for expert_down. The matrices' tiles of gate and up
// alternate, a pair of them makes 16 columns, so a work-item takes two pairs; columns past the last pair are zero.
// x, sums: pack_for_experts; inner, inner_sums: the same for inner_groups.
KERNEL expert_gate_up(ITEM global const uchar* weights, global const int4* blocks, global const float* x,
                      global const float* sums, global float* inner, global float* inner_sums, int finish, int pairs,
                      int groups, int packed_groups, int inner_groups) {
    const int4 block = blocks[AT(1)];
    const int count = block.z, g = AT(0);
    if (count == 0) return;
    const size_t step = tile_bytes(groups);
    global const float* block_x = x + (size_t)block.y * packed_groups * GROUP_FLOATS;
    global const float* block_sums = sums + (size_t)block.y * packed_groups * 3;
    float16 columns[2][SLOT_BLOCK];
    for (int half_group = 0; half_group < 2; half_group++) {
        const int pair = 2 * g + half_group;
        if (pair < pairs) {
            global const uchar* gate = weights + ((size_t)block.x * pairs + pair) * 2 * step;
            float16 results[2 * SLOT_BLOCK];
            rows_through_pair(gate, groups, packed_groups, block_x, block_sums, count, results);
            for (int r = 0; r < count; r++)
                columns[half_group][r] = flush_tiny(gated(finish, results[2 * r], results[2 * r + 1]));
        } else {
            for (int r = 0; r < count; r++) columns[half_group][r] = 0.0f;
        }
    }
    global float* out = inner + (size_t)block.y * inner_groups * GROUP_FLOATS;
    global float* out_sums = inner_sums + (size_t)block.y * inner_groups * 3;
    for (int r = 0; r < count; r++) pack_group(columns[0][r], columns[1][r], out, out_sums, g, inner_groups, r, count);
}

// y = the second product of each slot, f32 [slots][stride]. x, sums: what expert_gate_up left.
KERNEL expert_down(ITEM global const uchar* weights, global const int4* blocks, global const float* x,
                   global const float* sums, global float* y, int pairs, int groups, int packed_groups, int stride) {
    const int4 block = blocks[AT(1)];
    const int count = block.z, pair = AT(0);
    if (count == 0) return;
    const size_t step = tile_bytes(groups);
    global const uchar* first = weights + ((size_t)block.x * pairs + pair) * 2 * step;
    float16 results[2 * SLOT_BLOCK];
    rows_through_pair(first, groups, packed_groups, x + (size_t)block.y * packed_groups * GROUP_FLOATS,
                      sums + (size_t)block.y * packed_groups * 3, count, results);
    for (int r = 0; r < count; r++) {
        global float* row = y + (size_t)(block.y + r) * stride;
        vstore16(results[2 * r], 2 * pair, row);
        vstore16(results[2 * r + 1], 2 * pair + 1, row);
    }
}
