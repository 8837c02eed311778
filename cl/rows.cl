// Whole rows of activations.

// Prepares each row and packs it for `matmul` (pack.h). One work-item a row. h: local f32 [32 * groups].
KERNEL pack_rows(ITEM global const float* x, global const float* branch, global const float* branch_weight,
                 global const float* norm_weight, global float* new_rows, global float* packed, global float* sums,
                 int flags, int n, int groups, int stride, float epsilon, local float* h) {
    const int row = AT(0), rows = OF(0);
    const size_t at = (size_t)row * stride;
    prepare_row(x + at, branch + at, branch_weight, norm_weight, new_rows + at, 1, flags, n, groups * GROUP, epsilon, h);
    const int start = row / ROW_BLOCK * ROW_BLOCK, count = min(ROW_BLOCK, rows - start);
    for (int g = 0; g < groups; g++)
        pack_group(vload16(2 * g, h), vload16(2 * g + 1, h), packed + (size_t)start * groups * GROUP_FLOATS,
                   sums + (size_t)start * groups * 3, g, groups, row - start, count);
}

// Each row becomes its RMS norm without a weight: rows f32 [rows][stride], zero from n on. One work-item a row.
KERNEL norm_rows(ITEM global float* rows, int n, int padded, int stride, float epsilon, local float* h) {
    global float* row = rows + (size_t)AT(0) * stride;
    for (int i = 0; i < padded; i += 16) vstore16(vload16(0, row + i), 0, h + i);
    float16 r = inverse_rms(h, n, padded, epsilon);
    for (int i = 0; i < padded; i += 16) vstore16(vload16(0, h + i) * r, 0, row + i);
}
