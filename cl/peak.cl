// What the device can do at best, to hold the other kernels against.

// Reads `words` vectors of 64 bytes a work-item and keeps a trace of them, so that no read can be left out.
EXPLICIT_VECTOR kernel void pure_read(global const uint* data, global uint* trace, int words) {
    global const uint* p = data + (size_t)get_global_id(0) * words * 16;
    uint16 a = 0, b = 0, c = 0, d = 0;
    for (int i = 0; i + 4 <= words; i += 4) {
        a ^= vload16(i, p);
        b ^= vload16(i + 1, p);
        c ^= vload16(i + 2, p);
        d ^= vload16(i + 3, p);
    }
    vstore16(a ^ b ^ c ^ d, get_global_id(0), trace);
}

// `rounds` of 12 independent multiply-adds of 16 values each.
EXPLICIT_VECTOR kernel void pure_multiply_add(global float* values, int rounds) {
    global float* v = values + get_global_id(0) * 16;
    const float16 m = vload16(0, v), a = m * 0.5f;
    float16 c0 = a, c1 = a + 1, c2 = a + 2, c3 = a + 3, c4 = a + 4, c5 = a + 5;
    float16 c6 = a + 6, c7 = a + 7, c8 = a + 8, c9 = a + 9, c10 = a + 10, c11 = a + 11;
    for (int i = 0; i < rounds; i++) {
        c0 = fma(c0, m, a), c1 = fma(c1, m, a), c2 = fma(c2, m, a), c3 = fma(c3, m, a);
        c4 = fma(c4, m, a), c5 = fma(c5, m, a), c6 = fma(c6, m, a), c7 = fma(c7, m, a);
        c8 = fma(c8, m, a), c9 = fma(c9, m, a), c10 = fma(c10, m, a), c11 = fma(c11, m, a);
    }
    vstore16(c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11, 0, v);
}
