// What a matrix multiplication does to its input row first: optionally add a normed branch to the residual row, then
// optionally norm it. One work-item makes one row; the one-row matmul and pack_rows share these lines, hence the bits.

#define ADD_BRANCH 1 // row = row + rms_norm(branch) * branch_weight, kept for later in new_row
#define NORM 2       // row = rms_norm(row) * norm_weight

// 1 / sqrt(mean of squares + epsilon) over n values that are zero-padded to `padded`, a multiple of 16.
inline float inverse_rms(local const float* x, int n, int padded, float epsilon) {
    float16 squares = 0.0f;
    for (int i = 0; i < padded; i += 16) {
        float16 v = vload16(0, x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / sqrt(sum_lanes(squares) / (float)n + epsilon);
}

// Leaves the prepared row in h[padded]. row, branch: f32, readable up to `padded`, zero from n on. new_row: where the
// row with its branch added goes, by the one work-item that is asked to keep it.
inline void prepare_row(global const float* row, global const float* branch, global const float* branch_weight,
                        global const float* norm_weight, global float* new_row, int keep, int flags, int n, int padded,
                        float epsilon, local float* h) {
    if (flags & ADD_BRANCH) {
        for (int i = 0; i < padded; i += 16) vstore16(vload16(0, branch + i), 0, h + i);
        float16 r = inverse_rms(h, n, padded, epsilon);
        for (int i = 0; i < padded; i += 16)
            vstore16(vload16(0, row + i) + vload16(0, h + i) * r * vload16(0, branch_weight + i), 0, h + i);
        if (keep)
            for (int i = 0; i < padded; i += 16) vstore16(vload16(0, h + i), 0, new_row + i);
    } else {
        for (int i = 0; i < padded; i += 16) vstore16(vload16(0, row + i), 0, h + i);
    }
    if (flags & NORM) {
        float16 r = inverse_rms(h, n, padded, epsilon);
        for (int i = 0; i < padded; i += 16)
            vstore16(flush_tiny(vload16(0, h + i) * r * vload16(0, norm_weight + i)), 0, h + i);
    } else {
        for (int i = 0; i < padded; i += 16) vstore16(flush_tiny(vload16(0, h + i)), 0, h + i);
    }
}
