// The products of all experts in one launch, for one weight format. Blocks and slots: moe.cl says what they are.
//
// Matrices of the experts lie one below the other, `pairs` pairs of tiles each. Global size: pairs (or 32 columns of the
// inner row) x the most blocks there can be; work-items of unused blocks return at once.

// activation(gate) * up of every slot, packed for expert_down (gated.h). x, sums: pack_for_experts; inner, inner_sums: the
// same for inner_groups.
KERNEL expert_gate_up(ITEM global const uchar* weights, global const int4* blocks, global const float* x,
                      global const float* sums, global float* inner, global float* inner_sums, int finish, int pairs,
                      int groups, int packed_groups, int inner_groups) {
    const int4 block = blocks[AT(1)];
    if (block.z == 0) return;
    gated_group(weights + (size_t)block.x * pairs * 2 * tile_bytes(groups), finish, pairs, groups, packed_groups,
                x + (size_t)block.y * packed_groups * GROUP_FLOATS, sums + (size_t)block.y * packed_groups * 3, block.z,
                AT(0), inner + (size_t)block.y * inner_groups * GROUP_FLOATS,
                inner_sums + (size_t)block.y * inner_groups * 3, inner_groups);
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
