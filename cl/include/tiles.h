// Packing and products of many rows for a processor with AMX: takes the place of pack.h and tile_pair.h, same names.
//
// An AMX tile is a register of 16 rows of 64 bytes. One instruction adds a product of two of them to a third: 16 rows of 32
// activations in bf16, times 32 x 16 weights in bf16 that lie in VNNI pairs (two columns' weights of an output side by side),
// to 16 x 16 sums in f32. Such tiles are registers; tiles of weights (weights.h) are 16 outputs.
//
// Results are as exact as in f32. An activation is cut into three bf16 terms, 8 bits each, whose sum it is exactly; a code is
// an integer below 256, which bf16 holds, as it does a bf16 weight; f16 and f32 weights are cut likewise, into two and three
// terms. A product of two terms has 16 bits and is exact, so only sums are rounded, as in the other kernels. Tiles take
// denormal operands for zero and leave none (DAZ, FTZ): flush_tiny keeps activations above 2^-90 and their terms, down to
// 2^-113, normal. A row's result depends on that row and the weights alone: products do not mix rows, and the order of their
// sums is fixed.
//
// amx.h says what assembly compilers take.

#define GROUP_FLOATS 48 // of packed, that a row takes in each group

// Eight tiles of 16 rows of 64 bytes.
constant uchar TILE_CONFIG[64] __attribute__((aligned(64))) = {
    1, 0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,
    0, 0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16, 0,  0, 0,  0, 0,  0, 0,  0};

#define TILES_ON __asm__ volatile("ldtilecfg (%0)" ::"r"((ulong)TILE_CONFIG) : "memory")
// c += a * b
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

// The nearest bf16, as an f32.
inline float16 near_bf16(float16 x) {
    uint16 u = as_uint16(x);
    return as_float16((u + (uint16)0x7fff + ((u >> (uint16)16) & (uint16)1)) & (uint16)0xffff0000);
}

// A tile takes columns by pairs: of eight, the first and the fifth, and so on, since these nibbles of a word of codes are
// 16 bits apart.
inline ushort16 paired_bf16(float16 v) {
    return convert_ushort16(as_uint16(v) >> (uint16)16).s041526378c9daebf;
}

// Columns 32 * g and on of row `row` of a block of `rows`: a and b are the 32 values. packed: bf16 [groups][low, middle, high
// term][rows][32].
inline void pack_terms(float16 a, float16 b, global float* packed, int g, int row, int rows) {
    global ushort* out = (global ushort*)packed + ((size_t)g * 3 * rows + row) * GROUP;
    const size_t term = (size_t)rows * GROUP;
    const float16 a_hi = near_bf16(a), a_rest = a - a_hi, a_mid = near_bf16(a_rest);
    const float16 b_hi = near_bf16(b), b_rest = b - b_hi, b_mid = near_bf16(b_rest);
    vstore16(paired_bf16(a_rest - a_mid), 0, out);
    vstore16(paired_bf16(b_rest - b_mid), 1, out);
    vstore16(paired_bf16(a_mid), 0, out + term);
    vstore16(paired_bf16(b_mid), 1, out + term);
    vstore16(paired_bf16(a_hi), 0, out + 2 * term);
    vstore16(paired_bf16(b_hi), 1, out + 2 * term);
}

// Packs them, with room for 15 rows more, for a tile reads 16 rows whatever they are; sums as in pack.h, likewise.
inline void pack_group(float16 a, float16 b, global float* packed, global float* sums, int g, int groups, int row,
                       int rows) {
    pack_terms(a, b, packed, g, row, rows);
    sums[(size_t)g * rows + row] = sum_lanes(a + b);
    sums[(size_t)(groups + 2 * g) * rows + row] = sum_lanes(a);
    sums[(size_t)(groups + 2 * g + 1) * rows + row] = sum_lanes(b);
}

#ifdef FORMAT

// WEIGHT_TERMS: of bf16 that a weight or code is cut into. SPAN: groups whose products a tile adds up from zero before they
// join the results: sums of a few groups are small, and so is what rounding them loses. HALVES: scale groups in a group.
#if FORMAT == FORMAT_F32
#define WEIGHT_TERMS 3
#define SPAN 4
#elif FORMAT == FORMAT_F16
#define WEIGHT_TERMS 2
#define SPAN 4
#elif FORMAT == FORMAT_BF16
#define WEIGHT_TERMS 1
#define SPAN 4
#elif FORMAT == FORMAT_W4
#define WEIGHT_TERMS 1
#define SPAN 2 // one scale for both
#else
#define WEIGHT_TERMS 1
#define SPAN 1
#endif
#define HALVES (GROUP / SCALE_GROUP)

#if SLOT_BITS == 4 && !defined(HIGH_BITS)
// The integers 0 to 15 in bf16, twice: the index is 5 bits, of which a nibble is the lower 4.
constant ushort NIBBLES[32] __attribute__((aligned(64))) = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
#endif

// One group of codes as tiles [HALVES][WEIGHT_TERMS][16 VNNI pairs of columns][16 outputs][2] bf16, the small terms first. Of
// a half, the other half's columns are zero.
inline void unpack_tiles(global const uchar* codes, float16* tiles) {
#if SLOT_BITS == 4 && !defined(HIGH_BITS)
    const float16 nibbles = vload16(0, (constant const float*)NIBBLES);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint16 v = vload16(j, (global const uint*)codes);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            // X stands for a vector register, and only where the type is a vector of floats. Into a variable it would be
            // stored twice.
            __asm__("vpermw %1, %2, %0"
                    : "=X"(tiles[j * 4 + i])
                    : "X"(nibbles), "X"(as_float16(v >> (uint16)(4 * i))));
        }
    }
#elif FORMAT == FORMAT_BF16
    #pragma unroll
    for (int j = 0; j < 4; j++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint16 even = convert_uint16(vload16(8 * j + i, (global const ushort*)codes));
            const uint16 odd = convert_uint16(vload16(8 * j + i + 4, (global const ushort*)codes));
            tiles[j * 4 + i] = as_float16(even | odd << (uint16)16);
        }
#elif FORMAT == FORMAT_Q8_0
    // Less their centre, which leaves add_pass nothing to take off.
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint16 v = vload16(2 * j, (global const uint*)codes) ^ (uint16)0x80808080;
        const uint16 w = vload16(2 * j + 1, (global const uint*)codes) ^ (uint16)0x80808080;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float16 even = convert_float16(as_int16(v << (uint16)(24 - 8 * i)) >> (int16)24);
            const float16 odd = convert_float16(as_int16(w << (uint16)(24 - 8 * i)) >> (int16)24);
            tiles[j * 4 + i] = as_float16(as_uint16(even) >> (uint16)16 | as_uint16(odd));
        }
    }
#else
    float16 numbers[GROUP];
    unpack_group(codes, numbers, 1);
    #pragma unroll
    for (int w = WEIGHT_TERMS - 1; w >= 0; w--)
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float16* even = numbers + 8 * j + i;
                float16* odd = even + 4;
                // Codes are bf16 as they are.
                const float16 e = WEIGHT_TERMS > 1 ? near_bf16(*even) : *even;
                const float16 o = WEIGHT_TERMS > 1 ? near_bf16(*odd) : *odd;
                *even -= e;
                *odd -= o;
                const float16 pairs = as_float16(as_uint16(e) >> (uint16)16 | as_uint16(o));
#if HALVES == 2
                tiles[j * 4 + i] = j < 2 ? pairs : (float16)0.0f;
                tiles[16 + j * 4 + i] = j < 2 ? (float16)0.0f : pairs;
#else
                tiles[w * 16 + j * 4 + i] = pairs;
#endif
            }
#endif
}

// Sum of row r's values over the columns that share a scale. sums: of its scale groups, sum_stride from one to the next.
#if FORMAT == FORMAT_W4
#define SUM_OF_SPAN(sums, sum_stride, r) ((sums)[r] + (sums)[(sum_stride) + (r)])
#else
#define SUM_OF_SPAN(sums, sum_stride, r) ((sums)[r])
#endif

// A result with a span's products added. sum: SUM_OF_SPAN.
inline float16 add_dots(float16 result, float16 dot, float sum, float16 scale, float16 offset) {
#if FORMAT == FORMAT_Q8_0
    return fma(scale, dot, result); // unpacked less its centre
#else
    return add_group(result, dot, sum, scale, offset);
#endif
}

// Scales what a pass of 16 or 32 rows left in dots[2 * rows] and adds it to the results. Where there are fewer rows, sums
// that lie beyond are read for them.
inline void add_pass(const float16* dots, const float16* scales, global const float* sums, int sum_stride, int rows,
                     float16* results) {
    for (int block = 0; block < rows; block += 16)
        #pragma unroll
        for (int r = block; r < block + 16; r++) {
            const float sum = SUM_OF_SPAN(sums, sum_stride, r);
            results[2 * r] = add_dots(results[2 * r], dots[2 * r], sum, scales[0], scales[2]);
            results[2 * r + 1] = add_dots(results[2 * r + 1], dots[2 * r + 1], sum, scales[1], scales[3]);
        }
}

// A block of `rows` rows through two tiles of weights, as in tile_pair.h; results of the rows that fill up 16 are scratch.
inline void rows_through_pair(global const uchar* first, int groups, int packed_groups, global const float* x,
                              global const float* sums, int rows, float16* results) {
    float16 tiles[SPAN * 2 * HALVES * WEIGHT_TERMS * 16] __attribute__((aligned(64)));
    const size_t term = (size_t)rows * 64;
    // A pass's products wait here while tiles work on the next one: to add them at once would be to wait for the tiles.
    float16 dots[2][64] __attribute__((aligned(64))), scales[2][4];
    int flip = 0, old_rows = 0, which = 0;
    global const float* old_sums = sums;
    float16* old_results = results;
    for (int r = 0; r < (rows + 15) / 16 * 32; r++) results[r] = 0.0f;
    TILES_ON;
    for (int from = 0; from < groups; from += SPAN) {
        const int span = min(SPAN, groups - from);
        for (int k = 0; k < span; k++)
            #pragma unroll
            for (int t = 0; t < 2; t++) {
                global const uchar* codes = group_codes(first + t * tile_bytes(groups), from + k);
#ifdef HOST_PREFETCH
                #pragma unroll
                for (int line = 0; line < GROUP_BYTES; line += 64)
                    __builtin_prefetch((const void*)(size_t)(codes + SPAN * GROUP_BYTES + SCALE_BYTES + line), 0, 3);
#endif
                unpack_tiles(codes, tiles + (k * 2 + t) * HALVES * WEIGHT_TERMS * 16);
            }
        for (int half_group = 0; half_group < HALVES; half_group++) {
            which = 1 - which;
            for (int t = 0; t < 2; t++) {
                const int s = from * HALVES + half_group;
                scales[which][t] = group_scale(first + t * tile_bytes(groups), s);
                scales[which][2 + t] = group_offset(first + t * tile_bytes(groups), s);
            }
            for (int r = 0; r < rows; r += 32) {
                const bool two = r + 16 < rows;
                TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
                // Small terms first: while their sums are small, little is lost.
                #pragma unroll
                for (int part = 0; part < 3; part++)
                    for (int k = 0; k < span; k++) {
                        global const uchar* a = (global const uchar*)x + ((size_t)(from + k) * 3 + part) * term + r * 64;
                        const float16* b = tiles + (k * 2 * HALVES + half_group) * WEIGHT_TERMS * 16;
                        TILE_LOAD(4, a, 64);
                        if (two) TILE_LOAD(5, a + 1024, 64);
#ifdef HOST_PREFETCH
                        // The same rows of the groups that come next: a tile's lines are as far apart as nothing guesses.
                        #pragma unroll
                        for (int line = 0; line < 2048; line += 64)
                            __builtin_prefetch((const void*)(size_t)(a + SPAN * 3 * term + line), 0, 3);
#endif
                        #pragma unroll
                        for (int w = 0; w < WEIGHT_TERMS; w++) {
                            if (SPAN * WEIGHT_TERMS > 1 || part == 0) {
                                TILE_LOAD(6, b + w * 16, 64);
                                TILE_LOAD(7, b + (HALVES * WEIGHT_TERMS + w) * 16, 64);
                            }
                            TILE_DOT(0, 4, 6); TILE_DOT(1, 4, 7);
                            if (two) { TILE_DOT(2, 5, 6); TILE_DOT(3, 5, 7); }
                        }
                    }
                float16* to = dots[flip];
                TILE_STORE(0, to, 128); TILE_STORE(1, to + 1, 128);
                if (two) { TILE_STORE(2, to + 32, 128); TILE_STORE(3, to + 33, 128); }
                if (old_rows > 0)
                    add_pass(dots[1 - flip], scales[r == 0 ? 1 - which : which], old_sums, rows, old_rows, old_results);
                flip = 1 - flip;
                old_rows = two ? 32 : 16;
                old_sums = group_sums(sums, packed_groups, rows, from) + half_group * rows + r;
                old_results = results + 2 * r;
            }
        }
    }
    add_pass(dots[1 - flip], scales[which], old_sums, rows, old_rows, old_results);
    TILES_OFF;
}
#endif
