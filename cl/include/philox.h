// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (2011), and Gumbel noise made of it.

inline void philox_round(uint8* c0, uint8* c1, uint8* c2, uint8* c3, uint key0, uint key1) {
    const uint8 m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
    uint8 high0 = mul_hi(m0, *c0), low0 = m0 * *c0;
    uint8 high1 = mul_hi(m1, *c2), low1 = m1 * *c2;
    *c0 = high1 ^ *c1 ^ key0;
    *c1 = low1;
    *c2 = high0 ^ *c3 ^ key1;
    *c3 = low0;
}

#define MOST_NOISE 23.0f

// -log(-log(1 - v)) of a word's uniform number v in (0, 1): standard Gumbel noise, from -2.9 to 22.9.
inline float16 gumbel(uint16 word) {
    float16 v = fmin((convert_float16(word) + 0.5f) * 0x1p-32f, (float16)0x1.fffffep-1f);
    return -log(-log1p(-v));
}

// Words of the 32 tokens from `first`, a multiple of 32: word token % 4 of counter [token / 4, row, step, canvas].
inline void words_32(int first, uint row, uint step, uint canvas, uint key0, uint key1, uint16* words) {
    uint8 a = (uint8)((uint)first / 4) + (uint8)(0, 1, 2, 3, 4, 5, 6, 7), b = row, c = step, d = canvas;
    for (int round = 0; round < 10; round++) {
        philox_round(&a, &b, &c, &d, key0, key1);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = (uint16)(a.s0, b.s0, c.s0, d.s0, a.s1, b.s1, c.s1, d.s1, //
                        a.s2, b.s2, c.s2, d.s2, a.s3, b.s3, c.s3, d.s3);
    words[1] = (uint16)(a.s4, b.s4, c.s4, d.s4, a.s5, b.s5, c.s5, d.s5, //
                        a.s6, b.s6, c.s6, d.s6, a.s7, b.s7, c.s7, d.s7);
}

// More than any of these words makes: noise is below -log v, and v at least the power of two below it.
inline float most_noise(const uint16* words) {
    uint8 a = min(min(words[0].lo, words[0].hi), min(words[1].lo, words[1].hi));
    uint4 b = min(a.lo, a.hi);
    uint2 c = min(b.lo, b.hi);
    return (float)(clz(min(c.x, c.y)) + 1) * 0.6931472f + 0.01f;
}
