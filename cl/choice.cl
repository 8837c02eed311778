// What a pass says of the next tokens: of each row of logits the TOP largest with their ids, and whether all are numbers.

#define SLICE_WORDS (2 * TOP + 1) // logits, ids, bad

// Puts a logit among the best, which are falling; what is there before an equal one has the lower id.
inline void keep(float logit, uint id, float* best, uint* ids) {
    int i = TOP - 1;
    for (; i > 0 && logit > best[i - 1]; i--) {
        best[i] = best[i - 1];
        ids[i] = ids[i - 1];
    }
    best[i] = logit;
    ids[i] = id;
}

inline void keep_16(float16 logits, uint first, float* best, uint* ids) {
    float values[16];
    vstore16(logits, 0, values);
    for (int i = 0; i < 16; i++)
        if (values[i] > best[TOP - 1]) keep(values[i], first + i, best, ids);
}

// logits: f32, `stride` values a row, of which the first `limit` count; whole vectors of 16 can be read.
// slices: [rows][CHOICE_SLICES][SLICE_WORDS]: f32 logits, falling; u32 ids, lower ones first where logits are equal; 1
// where a logit is not a number or not finite. Where a slice has fewer, -INFINITY and the largest u32.
// Global size: CHOICE_SLICES x rows.
KERNEL top_of_rows(ITEM global const float* logits, global uint* slices, int stride, int limit) {
    const int slice = AT(0), row = AT(1);
    global const float* x = logits + (size_t)row * stride;
    // In vectors.
    const int each = ((limit + 15) / 16 + CHOICE_SLICES - 1) / CHOICE_SLICES;
    const int from = slice * each, whole = min(from + each, limit / 16);
    float best[TOP];
    uint ids[TOP];
    for (int i = 0; i < TOP; i++) {
        best[i] = -INFINITY;
        ids[i] = 0xffffffffu;
    }
    float16 zeros = 0.0f; // NaN where something was not finite
    int at = from;
    for (; at + 4 <= whole; at += 4) {
        const float16 a = vload16(at, x), b = vload16(at + 1, x), c = vload16(at + 2, x), d = vload16(at + 3, x);
        zeros = fma(a, (float16)0.0f, zeros);
        zeros = fma(b, (float16)0.0f, zeros);
        zeros = fma(c, (float16)0.0f, zeros);
        zeros = fma(d, (float16)0.0f, zeros);
        const float16 least = best[TOP - 1];
        if (any((a > least) | (b > least) | (c > least) | (d > least))) {
            keep_16(a, 16 * at, best, ids);
            keep_16(b, 16 * at + 16, best, ids);
            keep_16(c, 16 * at + 32, best, ids);
            keep_16(d, 16 * at + 48, best, ids);
        }
    }
    for (; at < whole; at++) {
        const float16 a = vload16(at, x);
        zeros = fma(a, (float16)0.0f, zeros);
        keep_16(a, 16 * at, best, ids);
    }
    if (at < from + each && 16 * at < limit) {
        const int16 lanes = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const int16 counts = lanes < (int16)(limit - 16 * at);
        const float16 a = vload16(at, x);
        zeros = fma(select((float16)0.0f, a, counts), (float16)0.0f, zeros);
        keep_16(select((float16)(-INFINITY), a, counts), 16 * at, best, ids);
    }
    global uint* out = slices + ((size_t)row * CHOICE_SLICES + slice) * SLICE_WORDS;
    for (int i = 0; i < TOP; i++) {
        out[i] = as_uint(best[i]);
        out[TOP + i] = ids[i];
    }
    out[2 * TOP] = any(zeros != (float16)0.0f) ? 1 : 0;
}
