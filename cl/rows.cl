// Whole rows of activations.

#define TWICE 4 // the row is packed with another norm, too

// Prepares each row and packs it for `matmul` (pack.h). TWICE: for other products as well, the same row with second_norm. One
// work-item a row. h: local f32 [32 * groups].
KERNEL pack_rows(ITEM global const float* x, global const float* branch, global const float* branch_weight,
                 global const float* norm_weight, global const float* second_norm, global float* new_rows,
                 global float* packed, global float* sums, global float* second_packed, global float* second_sums,
                 int flags, int n, int groups, int stride, float epsilon, local float* h) {
    const int row = AT(0), rows = OF(0), padded = groups * GROUP;
    const size_t at = (size_t)row * stride;
    prepare_row(x + at, branch + at, branch_weight, norm_weight, new_rows + at, 1, flags, n, padded, epsilon, h);
    pack_row(h, groups, packed, sums, row, rows);
    if (!(flags & TWICE)) return;
    global const float* sum = (flags & ADD_BRANCH ? new_rows : x) + at;
    prepare_row(sum, sum, second_norm, second_norm, new_rows + at, 0, NORM, n, padded, epsilon, h);
    pack_row(h, groups, second_packed, second_sums, row, rows);
}

// Each row becomes its RMS norm without a weight: rows f32 [rows][stride], zero from n on. One work-item a row.
KERNEL norm_rows(ITEM global float* rows, int n, int padded, int stride, float epsilon, local float* h) {
    global float* row = rows + (size_t)AT(0) * stride;
    for (int i = 0; i < padded; i += 16) vstore16(vload16(0, row + i), 0, h + i);
    float16 r = inverse_rms(h, n, padded, epsilon);
    for (int i = 0; i < padded; i += 16) vstore16(vload16(0, h + i) * r, 0, row + i);
}
