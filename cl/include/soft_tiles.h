// The head's means of table rows by AMX tiles (tiles.h), for tables of bf16, some pairs of tiles of weights at a time.
//
// A mean is the sum over tokens of a weight and a table row. The table's tile has the 16 tokens of a column side by side, which
// is a row of the first factor; so sums are [columns][rows], table [columns][tokens] times weights [tokens][rows], and turned
// round once, at the end. Weights are cut into three bf16 terms as activations are; the part of one below 2^-126 counts as zero.

#define SOFT_PAIRS 4 // pairs of tiles, of 32 tokens, that are added at a time
#define SOFT_BY_TILES

// 32 weights of a row as VNNI pairs, and what these leave.
inline float16 take_term(float16* first, float16* second) {
    const float16 a = near_bf16(*first), b = near_bf16(*second);
    *first -= a;
    *second -= b;
    return (float16)(as_float8(convert_ushort16(as_uint16(a) >> (uint16)16)),
                     as_float8(convert_ushort16(as_uint16(b) >> (uint16)16)));
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
    TILES_ON;
    for (int block = 0; block < blocks; block += 2) {
        const bool two = block + 1 < blocks;
        float16 b[SOFT_PAIRS * 2 * 3 * 16] __attribute__((aligned(64))); // [pairs][blocks][terms][16 VNNI pairs of tokens]
        for (int p = 0; p < pairs; p++)
            for (int h = 0; h < 2 && block + h < blocks; h++) {
                float16 by_row[3][16];
                for (int r = 0; r < 16; r++) {
                    float16* w = weights + 2 * (p * ROW_BLOCK + (block + h) * 16 + r);
                    #pragma unroll
                    for (int part = 2; part >= 0; part--) by_row[part][r] = take_term(w, w + 1);
                }
                #pragma unroll
                for (int part = 0; part < 3; part++) transpose(by_row[part], 1, b + ((p * 2 + h) * 3 + part) * 16, 1);
            }
        for (int g = 0; g < groups; g++) {
            float16 a[SOFT_PAIRS * 32] __attribute__((aligned(64))); // [pairs][32 columns][32 tokens]
            for (int p = 0; p < pairs; p++) {
                global const float* first = (global const float*)group_codes(tiles + 2 * p * step, g);
                global const float* second = (global const float*)group_codes(tiles + (2 * p + 1) * step, g);
                #pragma unroll
                for (int c = 0; c < 32; c++) a[p * 32 + c] = (float16)(vload8(c, first), vload8(c, second));
            }
            // Whatever stands past the vocabulary must not be multiplied, not even by zero.
            for (int v = meant; v < 32; v++)
                for (int c = 0; c < 32; c++) ((ushort*)a)[((pairs - 1) * 32 + c) * 32 + v] = 0;
            global float* sums = means + (size_t)(g * blocks + block) * 512;
            TILE_LOAD(0, sums, 64); TILE_LOAD(1, sums + 256, 64);
            if (two) { TILE_LOAD(2, sums + 512, 64); TILE_LOAD(3, sums + 768, 64); }
            for (int p = 0; p < pairs; p++) {
                TILE_LOAD(4, a + p * 32, 64); TILE_LOAD(5, a + p * 32 + 16, 64);
                #pragma unroll
                for (int part = 0; part < 3; part++) {
                    TILE_LOAD(6, b + (p * 6 + part) * 16, 64);
                    TILE_DOT(0, 4, 6); TILE_DOT(1, 5, 6);
                    if (two) {
                        TILE_LOAD(7, b + (p * 6 + 3 + part) * 16, 64);
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
