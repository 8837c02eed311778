// The head's means of table rows by AMX tiles (tiles.h), for tables of bf16 and Q8_0, some pairs of tiles of weights at a time.
//
// A mean is the sum over tokens of a weight and a table row. The table's tile has the 16 tokens of a column side by side, which
// is a row of the first factor; so sums are [columns][rows], table [columns][tokens] times weights [tokens][rows], and turned
// round once, at the end. Weights are cut into three bf16 terms as activations are; the part of one below 2^-126 counts as zero.
// So are a Q8_0 table's numbers, 19 bits each; of the nine products of terms the three smallest are left out, at most 2^-24 of
// the whole each: as much as rounding a product to f32 may lose.

#define SOFT_BY_TILES
// SOFT_PAIRS: pairs of tiles, of 32 tokens, that are added at a time. TABLE_TERMS: of bf16 that a number of the table is cut into.
// TOKEN_AT: where a pair's token lies along a tile's row, which is all one as long as table and weights agree: those of a table
// of bf16 one tile after the other, else both tiles' alternately.
#if FORMAT == FORMAT_BF16
#define SOFT_PAIRS 4
#define TABLE_TERMS 1
#define TOKEN_AT(v) (v)
#else
#define SOFT_PAIRS 2
#define TABLE_TERMS 3
#define TOKEN_AT(v) ((v) % 16 * 2 + (v) / 16)
#endif

// The nearest bf16, as an f32; of two as near the larger one.
inline float16 round_bf16(float16 x) { return as_float16((as_uint16(x) + (uint16)0x8000) & (uint16)0xffff0000); }

// Both tiles' tokens, bf16 as f32, as one vector.
inline float16 join_tokens(float16 a, float16 b) {
#if FORMAT == FORMAT_BF16
    return (float16)(as_float8(convert_ushort16(as_uint16(a) >> (uint16)16)),
                     as_float8(convert_ushort16(as_uint16(b) >> (uint16)16)));
#else
    return as_float16(as_uint16(a) >> (uint16)16 | as_uint16(b));
#endif
}

// 32 weights of a row as VNNI pairs, and what these leave.
inline float16 take_term(float16* first, float16* second) {
    const float16 a = near_bf16(*first), b = near_bf16(*second);
    *first -= a;
    *second -= b;
    return join_tokens(a, b);
}

// A group of a pair of tiles as the first factor: [TABLE_TERMS][32 columns][32 tokens], the largest term first; zero from token
// `meant` on: whatever stands past the vocabulary must not be multiplied, not even by zero.
inline void load_columns(global const uchar* tiles, size_t step, int g, int meant, float16* columns) {
    global const uchar* first = group_codes(tiles, g);
    global const uchar* second = group_codes(tiles + step, g);
#if FORMAT == FORMAT_BF16
    #pragma unroll
    for (int c = 0; c < 32; c++)
        columns[c] = (float16)(vload8(c, (global const float*)first), vload8(c, (global const float*)second));
#else
    // A code that stays where it is in its word counts 2^(8 * i) times as much.
    const float16 s = group_scale(tiles, g), t = group_scale(tiles + step, g);
    const float16 by[3] = {s, s * 0x1p-8f, s * 0x1p-16f}, ty[3] = {t, t * 0x1p-8f, t * 0x1p-16f};
    const float16 zero = s * -CENTRE, zero_t = t * -CENTRE;
    for (int j = 0; j < 8; j++) {
        const uint16 v = vload16(j, (global const uint*)first), w = vload16(j, (global const uint*)second);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float16 a = i < 3 ? fma(by[i % 3], TO_FLOAT(v & (uint16)(255u << (8 * i))), zero)
                              : fma(s, TO_FLOAT(v >> (uint16)24), zero);
            float16 b = i < 3 ? fma(ty[i % 3], TO_FLOAT(w & (uint16)(255u << (8 * i))), zero_t)
                              : fma(t, TO_FLOAT(w >> (uint16)24), zero_t);
            const float16 a_hi = round_bf16(a), b_hi = round_bf16(b);
            columns[j * 4 + i] = join_tokens(a_hi, b_hi);
            a -= a_hi;
            b -= b_hi;
            const float16 a_mid = round_bf16(a), b_mid = round_bf16(b);
            columns[32 + j * 4 + i] = join_tokens(a_mid, b_mid);
            columns[64 + j * 4 + i] = join_tokens(a - a_mid, b - b_mid);
        }
    }
#endif
    for (int v = meant; v < 32; v++)
        for (int c = 0; c < TABLE_TERMS * 32; c++) ((ushort*)columns)[c * 32 + TOKEN_AT(v)] = 0;
}

// Adds the share of `pairs` pairs to the means of a block's rows, [groups][blocks of 16 rows][32 columns][16 rows]. weights:
// [pairs][ROW_BLOCK][2], spoiled here; shares: [pairs][ROW_BLOCK] what sums were worth when a pair came. Both for whole blocks
// of 16 rows. `meant` tokens of the last pair count.
inline void add_means(global const uchar* tiles, size_t step, int groups, int pairs, int meant, float16* weights,
                      const float* shares, int padded_rows, global float* means) {
    const int blocks = padded_rows / 16;
    float worth[ROW_BLOCK];
    bool same = true;
    for (int r = 0; r < padded_rows; r++) {
        worth[r] = 1.0f;
        for (int p = pairs - 1; p >= 0; p--) {
            weights[2 * (p * ROW_BLOCK + r)] *= worth[r];
            weights[2 * (p * ROW_BLOCK + r) + 1] *= worth[r];
            worth[r] *= shares[p * ROW_BLOCK + r];
        }
        same = same && worth[r] == 1.0f;
    }
    for (int i = 0; !same && i < groups * blocks; i++) {
        const float16 w = vload16(i % blocks, worth);
        #pragma unroll
        for (int c = 0; c < 32; c++) vstore16(vload16(i * 32 + c, means) * w, i * 32 + c, means);
    }
    float16 b[SOFT_PAIRS * 4 * 3 * 16] __attribute__((aligned(64))); // [pairs][blocks][terms][16 VNNI pairs of tokens]
    for (int p = 0; p < pairs; p++)
        for (int block = 0; block < blocks; block++) {
            float16 by_row[3][16];
            for (int r = 0; r < 16; r++) {
                float16* w = weights + 2 * (p * ROW_BLOCK + block * 16 + r);
                #pragma unroll
                for (int part = 0; part < 3; part++) by_row[part][r] = take_term(w, w + 1);
            }
            #pragma unroll
            for (int part = 0; part < 3; part++) transpose(by_row[part], 1, b + ((p * 4 + block) * 3 + part) * 16, 1);
        }
    TILES_ON;
    for (int g = 0; g < groups; g++) {
        float16 a[SOFT_PAIRS * TABLE_TERMS * 32] __attribute__((aligned(64))); // [pairs][terms][32 columns][32 tokens]
        for (int p = 0; p < pairs; p++)
            load_columns(tiles + 2 * p * step, step, g, p + 1 < pairs ? 32 : meant, a + p * TABLE_TERMS * 32);
        for (int block = 0; block < blocks; block += 2) {
            const bool two = block + 1 < blocks;
            global float* sums = means + (size_t)(g * blocks + block) * 512;
            TILE_LOAD(0, sums, 64); TILE_LOAD(1, sums + 256, 64);
            if (two) { TILE_LOAD(2, sums + 512, 64); TILE_LOAD(3, sums + 768, 64); }
            for (int p = 0; p < pairs; p++)
                #pragma unroll
                for (int term = TABLE_TERMS - 1; term >= 0; term--) {
                    const float16* columns = a + (p * TABLE_TERMS + term) * 32;
                    TILE_LOAD(4, columns, 64); TILE_LOAD(5, columns + 16, 64);
                    #pragma unroll
                    for (int part = 2 - term; part >= 0; part--) {
                        const float16* w = b + ((p * 4 + block) * 3 + part) * 16;
                        TILE_LOAD(6, w, 64);
                        TILE_DOT(0, 4, 6); TILE_DOT(1, 5, 6);
                        if (two) {
                            TILE_LOAD(7, w + 48, 64);
                            TILE_DOT(2, 4, 7); TILE_DOT(3, 5, 7);
                        }
                    }
                }
            TILE_STORE(0, sums, 64); TILE_STORE(1, sums + 256, 64);
            if (two) { TILE_STORE(2, sums + 512, 64); TILE_STORE(3, sums + 768, 64); }
        }
    }
    TILES_OFF;
}

// Turns [blocks of 16 rows][32 columns][16 rows] into [rows][32 columns], in place.
inline void turn_means(global float* means, int blocks) {
    for (int i = 0; i < blocks; i++) {
        float16 in[32], out[32];
        for (int c = 0; c < 32; c++) in[c] = vload16(i * 32 + c, means);
        transpose(in, 1, out, 2);
        transpose(in + 16, 1, out + 1, 2);
        for (int c = 0; c < 32; c++) vstore16(out[c], i * 32 + c, means);
    }
}
