// What is done to whole rows between products: by itself where no product can do it on the way.

// Logits become cap * tanh(logit / cap), in place; what is not finite becomes NaN, since a cap would make a number of it.
// x: f32 [rows][stride]. Global size: vectors of 16 x rows.
KERNEL cap_rows(ITEM global float* x, int stride, float cap) {
    global float* row = x + (size_t)AT(1) * stride;
    const int i = AT(0);
    const float16 v = vload16(i, row);
    vstore16(select((float16)(NAN), cap * tanh(v / cap), isfinite(v)), i, row);
}

// result = (x + rms_norm(branch) * weight) * scalar. All rows f32 [rows][stride], zero from n on. One work-item a row.
// h: local f32 [padded].
KERNEL join_rows(ITEM global const float* x, global const float* branch, global const float* weight,
                 global float* result, float scalar, int n, int padded, int stride, float epsilon, local float* h) {
    const size_t at = (size_t)AT(0) * stride;
    for (int i = 0; i < padded; i += 16) vstore16(vload16(0, branch + at + i), 0, h + i);
    const float16 r = inverse_rms(h, n, padded, epsilon);
    for (int i = 0; i < padded; i += 16) {
        const float16 sum = vload16(0, x + at + i) + vload16(0, h + i) * r * vload16(0, weight + i);
        vstore16(sum * scalar, 0, result + at + i);
    }
}

// gate = activation(gate) * other, in place. gate: f32 [rows][stride]; other: f32 [rows][other_stride], from value `at` on.
// Global size: vectors of 16 x rows.
KERNEL gate_rows(ITEM global float* gate, global const float* other, int finish, int stride, int at, int other_stride) {
    const int i = AT(0), row = AT(1);
    global float* g = gate + (size_t)row * stride;
    vstore16(gated(finish, vload16(i, g), vload16(i, other + (size_t)row * other_stride + at)), i, g);
}

// The part of a row for each layer: part = (rms_norm(part * scale) * weight + embedded) * share, in place, in parts of
// `size` values, a multiple of 16. parts, embedded: f32 [rows][stride]. Global size: parts x rows. h: local f32 [size].
KERNEL mix_parts(ITEM global float* parts, global const float* embedded, global const float* weight, float scale,
                 float share, int size, int stride, float epsilon, local float* h) {
    const size_t at = (size_t)AT(1) * stride + AT(0) * size;
    for (int i = 0; i < size; i += 16) vstore16(vload16(0, parts + at + i) * scale, 0, h + i);
    const float16 r = inverse_rms(h, size, size, epsilon);
    for (int i = 0; i < size; i += 16) {
        const float16 mixed = vload16(0, h + i) * r * vload16(0, weight + i) + vload16(0, embedded + at + i);
        vstore16(mixed * share, 0, parts + at + i);
    }
}
