// The head's means of table rows by vectors: each pair of tiles (32 tokens) joins the running sums of the rows it has weight
// for.

// Adds 32 tokens' share to 32 columns of R rows' running means. weights: [R][32]; share: what the sums so far are
// worth; tokens: [32][2] the 32 columns of each token; rows: which rows of `soft` they are.
#define SOFT_ROWS(R)                                                                                                  \
    inline void soft_rows_##R(const float* weights, const float* share, const float16* tokens, const int* rows,       \
                              global float* soft) {                                                                   \
        float16 sums[R][2];                                                                                           \
        _Pragma("unroll") for (int r = 0; r < R; r++) {                                                               \
            sums[r][0] = vload16(2 * rows[r], soft) * share[r];                                                       \
            sums[r][1] = vload16(2 * rows[r] + 1, soft) * share[r];                                                   \
        }                                                                                                             \
        _Pragma("unroll") for (int v = 0; v < 32; v++) {                                                              \
            float16 e0 = tokens[2 * v], e1 = tokens[2 * v + 1];                                                       \
            _Pragma("unroll") for (int r = 0; r < R; r++) {                                                           \
                float16 p = weights[r * 32 + v];                                                                      \
                sums[r][0] = fma(e0, p, sums[r][0]);                                                                  \
                sums[r][1] = fma(e1, p, sums[r][1]);                                                                  \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("unroll") for (int r = 0; r < R; r++) {                                                               \
            vstore16(sums[r][0], 2 * rows[r], soft);                                                                  \
            vstore16(sums[r][1], 2 * rows[r] + 1, soft);                                                              \
        }                                                                                                             \
    }
SOFT_ROWS(1)
SOFT_ROWS(2)
#if ROWS > 4
SOFT_ROWS(4)
SOFT_ROWS(8)
#else
SOFT_ROWS(3)
#endif
// Rows active[0 .. some] of 32 columns, as many at once as there are registers for.
#define TAKE_SOFT(R) soft_rows_##R(weights + r * 32, share + r, tokens, active + r, soft), r += R
inline void add_soft(const float* weights, const float* share, const float16* tokens, const int* active, int some,
                     global float* soft) {
    int r = 0;
#if ROWS > 4
    while (r + 8 <= some) TAKE_SOFT(8);
    if (r + 4 <= some) TAKE_SOFT(4);
#else
    while (r + 3 <= some) TAKE_SOFT(3);
#endif
    if (r + 2 <= some) TAKE_SOFT(2);
    if (r < some) TAKE_SOFT(1);
}

// The weights of a group of two tiles with columns contiguous: tokens[32][2], zero from token `meant` on.
inline void load_tokens(global const uchar* tiles, size_t step, int g, int meant, float16* tokens) {
    float16 codes[2 * GROUP], scales[2 * (GROUP / SCALE_GROUP)], offsets[2 * (GROUP / SCALE_GROUP)];
    load_group(tiles, step, 2, g, codes, scales, offsets);
    #pragma unroll
    for (int i = 0; i < 2 * GROUP; i++) {
        const int s = i / 2 / SCALE_GROUP * 2 + i % 2;
        codes[i] = weight_of(codes[i], scales[s], offsets[s]);
    }
    #pragma unroll
    for (int part = 0; part < 4; part++) // 16 columns of 16 tokens each
        transpose(codes + part / 2 * 32 + part % 2, 2, tokens + part % 2 * 32 + part / 2, 2);
    // Whatever stands past the vocabulary must not be multiplied, not even by zero.
    for (int v = meant; v < 32; v++) tokens[2 * v] = tokens[2 * v + 1] = 0.0f;
}

// Adds a pair's share to the means of `count` rows, [groups][rows padded to 16][32]: weights, `active` rows only, hold both
// tiles' of a row side by side; shares: what the sums so far are worth. `meant` tokens count.
inline void add_means(global const uchar* tiles, size_t step, int groups, int meant, const float16* weights,
                      const float* shares, const int* active, int some, int padded_rows, global float* means) {
    for (int g = 0; g < groups && some > 0; g++) {
        float16 tokens[2 * 32];
        load_tokens(tiles, step, g, meant, tokens);
        add_soft((const float*)weights, shares, tokens, active, some, means + (size_t)g * padded_rows * GROUP);
    }
}
