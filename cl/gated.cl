// The first product of a gated network of many rows: what matmul.cl, the activation and rows.cl would do one after the other.

// x, sums: packed activations; inner, inner_sums: the same for inner_groups. Global size: inner_groups x row blocks.
KERNEL matmul_gated(ITEM global const uchar* weights, global const float* x, global const float* sums,
                    global float* inner, global float* inner_sums, int finish, int pairs, int groups, int packed_groups,
                    int inner_groups, int rows) {
    const int start = AT(1) * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    gated_group(weights, finish, pairs, groups, packed_groups, x + (size_t)start * packed_groups * GROUP_FLOATS,
                sums + (size_t)start * packed_groups * 3, count, AT(0),
                inner + (size_t)start * inner_groups * GROUP_FLOATS, inner_sums + (size_t)start * inner_groups * 3,
                inner_groups);
}
