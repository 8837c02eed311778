// Repacked weights. A matrix of N rows (outputs) and K columns (inputs) is cut into tiles of 16 outputs; a tile is a
// run of blocks along K, each holding its scales first and then its codes, so that a tile is one sequential stream.
// Rows are padded to a multiple of 32 and columns to a multiple of the block with zero scales.
//
// Codes are unsigned; nibble i of a word belongs to column 8*word + i. A weight is
//     affine formats   scale * code + offset          (offset negative or zero for most)
//     centred formats  scale * (code - CENTRE), or scale * (code - zero) where each block has its own
//     codebooks        scale * CODEBOOK[code]
// so that a group's share of a dot product is  scale * (sum code*x - CENTRE * sum x)  or  scale * sum code*x + offset * sum x.
// The sums of x are made once per activation, not once per output.
//
// For one row, codes are left where they stand in the word and the activation carries the power of two instead
// (SLOT_BITS; 0 where it carries none): one mask, one conversion, one fma a column. Both factors are exact, hence so is their product's value,
// and the many-row kernel, which shifts codes down, makes the same bits.

#define FORMAT_F32 0
#define FORMAT_F16 1
#define FORMAT_BF16 2
#define FORMAT_Q4_0 3
#define FORMAT_Q4_1 4
#define FORMAT_Q5_0 5
#define FORMAT_Q5_1 6
#define FORMAT_Q8_0 7
#define FORMAT_Q4_K 8
#define FORMAT_Q5_K 9
#define FORMAT_Q6_K 10
#define FORMAT_W4 11
#define FORMAT_Q2_K 12
#define FORMAT_Q3_K 13
#define FORMAT_IQ4_NL 14
#define FORMAT_IQ4_XS 15
#define FORMAT_MXFP4 16
#define FORMAT_TQ2_0 17

// BLOCK_GROUPS: groups of 32 columns in a block. SCALE_BYTES: bytes before the codes. GROUP_BYTES: code bytes a group.
#if FORMAT == FORMAT_F32
#define BLOCK_GROUPS 1
#define SCALE_BYTES 0
#define GROUP_BYTES 2048
#define SLOT_BITS 0
#elif FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16
#define BLOCK_GROUPS 1
#define SCALE_BYTES 0
#define GROUP_BYTES 1024
#define SLOT_BITS 0
#elif FORMAT == FORMAT_Q4_0
#define BLOCK_GROUPS 2
#define SCALE_BYTES 64 // half scale[2][16]
#define GROUP_BYTES 256
#define SLOT_BITS 4
#define CENTRE 8.0f
#elif FORMAT == FORMAT_Q4_1
#define BLOCK_GROUPS 1
#define SCALE_BYTES 64 // half scale[16], offset[16]
#define GROUP_BYTES 256
#define SLOT_BITS 4
#elif FORMAT == FORMAT_Q5_0
#define BLOCK_GROUPS 2
#define SCALE_BYTES 64 // half scale[2][16]
#define GROUP_BYTES 320 // uint nibbles[4][16], high[16]
#define HIGH_BITS 1
#define SLOT_BITS 4
#define CENTRE 16.0f
#elif FORMAT == FORMAT_Q5_1
#define BLOCK_GROUPS 1
#define SCALE_BYTES 64 // half scale[16], offset[16]
#define GROUP_BYTES 320
#define HIGH_BITS 1
#define SLOT_BITS 4
#elif FORMAT == FORMAT_Q8_0
#define BLOCK_GROUPS 2
#define SCALE_BYTES 64 // half scale[2][16]
#define GROUP_BYTES 512 // uint bytes[8][16]
#define SLOT_BITS 8
#define CENTRE 128.0f
#elif FORMAT == FORMAT_Q4_K
#define BLOCK_GROUPS 8
#define SCALE_BYTES 320 // half scale[16], offset[16]; uchar scales[8][16], offsets[8][16]
#define GROUP_BYTES 256
#define SLOT_BITS 4
#elif FORMAT == FORMAT_Q5_K
#define BLOCK_GROUPS 8
#define SCALE_BYTES 320
#define GROUP_BYTES 320
#define HIGH_BITS 1
#define SLOT_BITS 4
#elif FORMAT == FORMAT_Q6_K
#define BLOCK_GROUPS 8
#define SCALE_BYTES 320 // half scale[16], 32 bytes unused; char scales[16][16]
#define GROUP_BYTES 384 // uint nibbles[4][16], high[2][16]
#define HIGH_BITS 2
#define SLOT_BITS 4
#define CENTRE 32.0f
#elif FORMAT == FORMAT_W4
#define BLOCK_GROUPS 2
#define SCALE_BYTES 64 // half scale[16], zero[16], for all 64 columns
#define GROUP_BYTES 256
#define SLOT_BITS 4
#define OFFSET_IS_ZERO // what group_offset gives is the code that stands for zero
#elif FORMAT == FORMAT_Q2_K
#define BLOCK_GROUPS 8
#define SCALE_BYTES 320 // half scale[16], offset[16]; uchar [16][16], a scale in the lower half and an offset in the upper
#define GROUP_BYTES 128 // uint pairs of bits[2][16]
#define SLOT_BITS 2
#elif FORMAT == FORMAT_Q3_K
#define BLOCK_GROUPS 8
#define SCALE_BYTES 320 // half scale[16], 32 bytes unused; char scales[16][16]
#define GROUP_BYTES 192 // uint [3][16]: ten codes of either half, five of both, and what is left of all for the last ones
#define SLOT_BITS 3
#define CENTRE 4.0f
#elif FORMAT == FORMAT_IQ4_NL
#define BLOCK_GROUPS 2
#define SCALE_BYTES 64 // half scale[2][16]
#define GROUP_BYTES 256
#define SLOT_BITS 0
#elif FORMAT == FORMAT_IQ4_XS
#define BLOCK_GROUPS 8
#define SCALE_BYTES 192 // half scale[16], 32 bytes unused; char scales[8][16]
#define GROUP_BYTES 256
#define SLOT_BITS 0
#elif FORMAT == FORMAT_MXFP4
#define BLOCK_GROUPS 4
#define SCALE_BYTES 64 // uchar exponents[4][16]
#define GROUP_BYTES 256
#define SLOT_BITS 0
#elif FORMAT == FORMAT_TQ2_0
#define BLOCK_GROUPS 8
#define SCALE_BYTES 64 // half scale[16], 32 bytes unused
#define GROUP_BYTES 128
#define SLOT_BITS 2
#define CENTRE 1.0f
#else
#error "FORMAT names no weight format"
#endif

// What the codes of formats with a codebook stand for.
#if FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS
#define CODEBOOK -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#elif FORMAT == FORMAT_MXFP4
#define CODEBOOK 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 // E2M1, doubled
#endif

#define BLOCK_BYTES (SCALE_BYTES + BLOCK_GROUPS * GROUP_BYTES)

#if FORMAT == FORMAT_Q6_K || FORMAT == FORMAT_Q3_K || FORMAT == FORMAT_Q2_K
#define SCALE_GROUP 16 // columns that share a scale
#else
#define SCALE_GROUP 32
#endif

inline size_t tile_bytes(int groups) { return (size_t)(groups / BLOCK_GROUPS) * BLOCK_BYTES; }

inline global const uchar* group_codes(global const uchar* tile, int group) {
    return tile + (size_t)(group / BLOCK_GROUPS) * BLOCK_BYTES + SCALE_BYTES + (group % BLOCK_GROUPS) * GROUP_BYTES;
}

#define TO_FLOAT(codes) convert_float16(as_int16(codes))
// The last of 16 codes of three bits: what is left of a word of ten and, above them, of a half word of five.
#define LAST_TRIPLE(v, h) ((v) >> (uint16)30 | (((h) >> (uint16)13) & (uint16)4))

#ifdef CODEBOOK
// What the codes in the lowest four bits of each lane stand for; bits above them may be anything.
inline float16 look_up(uint16 codes) {
#ifdef HOST_PERMUTE
    // One instruction, for which OpenCL C has a word, too, but shuffle() with a mask that is not constant becomes dozens. X
    // stands for a vector register, and only where the type is a vector of floats.
    float16 numbers;
    __asm__("vpermps %1, %2, %0" : "=X"(numbers) : "X"((float16)(CODEBOOK)), "X"(as_float16(codes)));
    return numbers;
#else
    // Four numbers to a word; the upper bits choose the word, the lower ones the byte.
    const uint4 words = as_uint4((char16)(CODEBOOK));
    const uint16 bit2 = codes << (uint16)29, bit3 = codes << (uint16)28;
    const uint16 word = select(select((uint16)words.s0, (uint16)words.s1, bit2),
                               select((uint16)words.s2, (uint16)words.s3, bit2), bit3);
    return convert_float16(as_int16(word << ((~codes & (uint16)3) << (uint16)3)) >> 24);
#endif
}
#endif

#ifdef HIGH_BITS
#define HIGH_MASK ((1u << HIGH_BITS) - 1u)

// High bits for nibble word j, nibble i at bit 4 * ((i + 1) % 8): just above the nibble it completes.
inline uint16 high_word(global const uint* words, int j) {
    return vload16(4 + j * HIGH_BITS / 4, words) >> (uint16)((j * HIGH_BITS) % 4);
}
#endif

// Code of nibble i < 7 of a word where it stands, shifted left by 4 * i; the last one is shifted down instead.
#ifdef HIGH_BITS
#define HIGH_WORD(codes, j) high_word((global const uint*)(codes), j)
#define NIBBLE_IN_PLACE(v, h, i) (((v) & (uint16)(15u << (4 * i))) | ((h) & (uint16)(HIGH_MASK << (4 * i + 4))))
#define HIGH_LAST(h) (((h) & (uint16)HIGH_MASK) << (uint16)4)
#else
#define HIGH_WORD(codes, j) ((uint16)0)
#define NIBBLE_IN_PLACE(v, h, i) ((v) & (uint16)(15u << (4 * i)))
#define HIGH_LAST(h) ((uint16)0)
#endif

// Powers of two by which the activations of 16 columns are scaled for the one-row kernel.
#if SLOT_BITS == 4
#define SLOT_SCALES ((float16)(1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f, \
                               1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f))
#elif SLOT_BITS == 8
#define SLOT_SCALES ((float16)(1.0f, 0x1p-8f, 0x1p-16f, 1.0f, 1.0f, 0x1p-8f, 0x1p-16f, 1.0f, \
                               1.0f, 0x1p-8f, 0x1p-16f, 1.0f, 1.0f, 0x1p-8f, 0x1p-16f, 1.0f))
#elif SLOT_BITS == 3
#define SLOT_SCALES ((float16)(1.0f, 0x1p-3f, 0x1p-6f, 0x1p-9f, 0x1p-12f, 0x1p-15f, 0x1p-18f, 0x1p-21f, \
                               0x1p-24f, 0x1p-27f, 1.0f, 0x1p-3f, 0x1p-6f, 0x1p-9f, 0x1p-12f, 1.0f))
#elif SLOT_BITS == 2
#define SLOT_SCALES ((float16)(1.0f, 0x1p-2f, 0x1p-4f, 0x1p-6f, 0x1p-8f, 0x1p-10f, 0x1p-12f, 0x1p-14f, \
                               0x1p-16f, 0x1p-18f, 0x1p-20f, 0x1p-22f, 0x1p-24f, 0x1p-26f, 0x1p-28f, 1.0f))
#else
#define SLOT_SCALES ((float16)1.0f)
#endif

// sums[t] = sum over the SCALE_GROUP columns from `first` of code * x for 16 outputs of each of T tiles, in column order.
// x carries SLOT_SCALES. One column of all tiles comes after the other, so that T sums are under way at a time: a single
// one would wait for itself.
#if FORMAT == FORMAT_F32
#define NUMBERS16(i, codes) vload16(i, (global const float*)(codes))
#elif FORMAT == FORMAT_F16
#define NUMBERS16(i, codes) vload_half16(i, (global const half*)(codes))
#elif FORMAT == FORMAT_BF16
#define NUMBERS16(i, codes) \
    as_float16(convert_uint16(vload16(i, (global const ushort*)(codes))) << (uint16)16)
#endif

#define ALL_TILES _Pragma("unroll") for (int t = 0; t < T; t++)
#ifdef NUMBERS16
#define DOT_COLUMNS                                                                                                   \
    _Pragma("unroll") for (int i = 0; i < SCALE_GROUP; i++)                                                           \
        ALL_TILES sums[t] = fma(NUMBERS16(first + i, codes[t]), (float16)x[i], sums[t]);
#elif defined(CODEBOOK)
#define DOT_COLUMNS                                                                                                   \
    _Pragma("unroll") for (int j = 0; j < SCALE_GROUP / 8; j++) {                                                     \
        uint16 v[T];                                                                                                  \
        ALL_TILES v[t] = vload16(first / 8 + j, (global const uint*)codes[t]);                                        \
        _Pragma("unroll") for (int i = 0; i < 8; i++)                                                                 \
            ALL_TILES sums[t] = fma(look_up(v[t] >> (uint16)(4 * i)), (float16)x[j * 8 + i], sums[t]);                \
    }
#elif SLOT_BITS == 2
#define DOT_COLUMNS                                                                                                   \
    _Pragma("unroll") for (int j = 0; j < SCALE_GROUP / 16; j++) {                                                    \
        uint16 v[T];                                                                                                  \
        ALL_TILES v[t] = vload16(first / 16 + j, (global const uint*)codes[t]);                                       \
        _Pragma("unroll") for (int i = 0; i < 15; i++)                                                                \
            ALL_TILES sums[t] = fma(TO_FLOAT(v[t] & (uint16)(3u << (2 * i))), (float16)x[j * 16 + i], sums[t]);       \
        ALL_TILES sums[t] = fma(TO_FLOAT(v[t] >> (uint16)30), (float16)x[j * 16 + 15], sums[t]);                      \
    }
#elif SLOT_BITS == 3
#define DOT_COLUMNS                                                                                                   \
    {                                                                                                                 \
        uint16 v[T], h[T];                                                                                            \
        ALL_TILES v[t] = vload16(first / 16, (global const uint*)codes[t]);                                           \
        ALL_TILES h[t] = vload16(2, (global const uint*)codes[t]) >> (uint16)first;                                   \
        _Pragma("unroll") for (int i = 0; i < 10; i++)                                                                \
            ALL_TILES sums[t] = fma(TO_FLOAT(v[t] & (uint16)(7u << (3 * i))), (float16)x[i], sums[t]);                \
        _Pragma("unroll") for (int i = 0; i < 5; i++)                                                                 \
            ALL_TILES sums[t] = fma(TO_FLOAT(h[t] & (uint16)(7u << (3 * i))), (float16)x[10 + i], sums[t]);           \
        ALL_TILES sums[t] = fma(TO_FLOAT(LAST_TRIPLE(v[t], h[t])), (float16)x[15], sums[t]);                          \
    }
#elif SLOT_BITS == 8
#define DOT_COLUMNS                                                                                                   \
    _Pragma("unroll") for (int j = 0; j < SCALE_GROUP / 4; j++) {                                                     \
        uint16 v[T];                                                                                                  \
        ALL_TILES v[t] = vload16(first / 4 + j, (global const uint*)codes[t]);                                        \
        _Pragma("unroll") for (int i = 0; i < 3; i++)                                                                 \
            ALL_TILES sums[t] = fma(TO_FLOAT(v[t] & (uint16)(255u << (8 * i))), (float16)x[j * 4 + i], sums[t]);      \
        ALL_TILES sums[t] = fma(TO_FLOAT(v[t] >> (uint16)24), (float16)x[j * 4 + 3], sums[t]);                        \
    }
#else
#define DOT_COLUMNS                                                                                                   \
    _Pragma("unroll") for (int j = 0; j < SCALE_GROUP / 8; j++) {                                                     \
        uint16 v[T], h[T];                                                                                            \
        ALL_TILES v[t] = vload16(first / 8 + j, (global const uint*)codes[t]);                                        \
        ALL_TILES h[t] = HIGH_WORD(codes[t], first / 8 + j);                                                          \
        _Pragma("unroll") for (int i = 0; i < 7; i++)                                                                 \
            ALL_TILES sums[t] = fma(TO_FLOAT(NIBBLE_IN_PLACE(v[t], h[t], i)), (float16)x[j * 8 + i], sums[t]);        \
        ALL_TILES sums[t] = fma(TO_FLOAT(v[t] >> (uint16)28 | HIGH_LAST(h[t])), (float16)x[j * 8 + 7], sums[t]);      \
    }
#endif

// The codes of one group as numbers, column-major: out[column][16 outputs], `stride` vectors apart.
inline void unpack_group(global const uchar* codes, float16* out, int stride) {
#if FORMAT == FORMAT_F32
    for (int i = 0; i < GROUP; i++) out[i * stride] = vload16(i, (global const float*)codes);
#elif FORMAT == FORMAT_F16
    for (int i = 0; i < GROUP; i++) out[i * stride] = vload_half16(i, (global const half*)codes);
#elif FORMAT == FORMAT_BF16
    for (int i = 0; i < GROUP; i++)
        out[i * stride] = as_float16(convert_uint16(vload16(i, (global const ushort*)codes)) << (uint16)16);
#elif FORMAT == FORMAT_Q8_0
    #pragma unroll
    for (int j = 0; j < 8; j++) {
        uint16 v = vload16(j, (global const uint*)codes);
        #pragma unroll
        for (int i = 0; i < 4; i++) out[(j * 4 + i) * stride] = TO_FLOAT((v >> (uint16)(8 * i)) & (uint16)255);
    }
#elif SLOT_BITS == 2
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        uint16 v = vload16(j, (global const uint*)codes);
        #pragma unroll
        for (int i = 0; i < 16; i++) out[(j * 16 + i) * stride] = TO_FLOAT((v >> (uint16)(2 * i)) & (uint16)3);
    }
#elif SLOT_BITS == 3
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        uint16 v = vload16(j, (global const uint*)codes);
        uint16 h = vload16(2, (global const uint*)codes) >> (uint16)(16 * j);
        #pragma unroll
        for (int i = 0; i < 10; i++) out[(j * 16 + i) * stride] = TO_FLOAT((v >> (uint16)(3 * i)) & (uint16)7);
        #pragma unroll
        for (int i = 0; i < 5; i++) out[(j * 16 + 10 + i) * stride] = TO_FLOAT((h >> (uint16)(3 * i)) & (uint16)7);
        out[(j * 16 + 15) * stride] = TO_FLOAT(LAST_TRIPLE(v, h));
    }
#elif defined(CODEBOOK)
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        uint16 v = vload16(j, (global const uint*)codes);
        #pragma unroll
        for (int i = 0; i < 8; i++) out[(j * 8 + i) * stride] = look_up(v >> (uint16)(4 * i));
    }
#else
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        uint16 v = vload16(j, (global const uint*)codes);
#ifdef HIGH_BITS
        uint16 h = high_word((global const uint*)codes, j);
#endif
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            uint16 code = (v >> (uint16)(4 * i)) & (uint16)15;
#ifdef HIGH_BITS
            code |= ((h >> (uint16)(4 * ((i + 1) & 7))) & (uint16)HIGH_MASK) << (uint16)4;
#endif
            out[(j * 8 + i) * stride] = TO_FLOAT(code);
        }
    }
#endif
}

// Scale of scale-group s of a tile (s counts SCALE_GROUP columns).
inline float16 group_scale(global const uchar* tile, int s) {
#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
    global const uchar* block = tile + (size_t)(s / 8) * BLOCK_BYTES;
    return vload_half16(0, (global const half*)block) * convert_float16(vload16(s % 8, block + 64));
#elif FORMAT == FORMAT_Q6_K || FORMAT == FORMAT_Q3_K
    global const uchar* block = tile + (size_t)(s / 16) * BLOCK_BYTES;
    return vload_half16(0, (global const half*)block) * convert_float16(vload16(s % 16, (global const char*)(block + 64)));
#elif FORMAT == FORMAT_IQ4_XS
    global const uchar* block = tile + (size_t)(s / 8) * BLOCK_BYTES;
    return vload_half16(0, (global const half*)block) * convert_float16(vload16(s % 8, (global const char*)(block + 64)));
#elif FORMAT == FORMAT_Q2_K
    global const uchar* block = tile + (size_t)(s / 16) * BLOCK_BYTES;
    const uint16 both = convert_uint16(vload16(s % 16, block + 64));
    return vload_half16(0, (global const half*)block) * TO_FLOAT(both & (uint16)15);
#elif FORMAT == FORMAT_MXFP4
    // 2^(exponent - 128): the numbers are doubled. Denormal for the two least exponents.
    const uint16 exponent = convert_uint16(vload16(s % 4, tile + (size_t)(s / 4) * BLOCK_BYTES));
    return as_float16(select((exponent - (uint16)1) << (uint16)23, (uint16)0x200000 << exponent, exponent < (uint16)2));
#elif FORMAT == FORMAT_W4 || FORMAT == FORMAT_TQ2_0
    return vload_half16(0, (global const half*)(tile + (size_t)(s / BLOCK_GROUPS) * BLOCK_BYTES));
#elif SCALE_BYTES > 0
    global const uchar* block = tile + (size_t)(s / BLOCK_GROUPS) * BLOCK_BYTES;
    return vload_half16(s % BLOCK_GROUPS, (global const half*)block);
#else
    return 1.0f;
#endif
}

// Offset of group s: the addend of an affine weight, or the code that stands for zero.
inline float16 group_offset(global const uchar* tile, int s) {
#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
    global const uchar* block = tile + (size_t)(s / 8) * BLOCK_BYTES;
    return -(vload_half16(1, (global const half*)block) * convert_float16(vload16(s % 8, block + 192)));
#elif FORMAT == FORMAT_Q2_K
    global const uchar* block = tile + (size_t)(s / 16) * BLOCK_BYTES;
    const uint16 both = convert_uint16(vload16(s % 16, block + 64));
    return -(vload_half16(1, (global const half*)block) * TO_FLOAT(both >> (uint16)4));
#elif FORMAT == FORMAT_Q4_1 || FORMAT == FORMAT_Q5_1
    global const uchar* block = tile + (size_t)s * BLOCK_BYTES;
    return vload_half16(1, (global const half*)block);
#elif FORMAT == FORMAT_W4
    return vload_half16(1, (global const half*)(tile + (size_t)(s / BLOCK_GROUPS) * BLOCK_BYTES));
#else
    return 0.0f;
#endif
}

// Adds a scale group's share to the running result: `dot` is its sum of code * x, `sum` its sum of x.
inline float16 add_group(float16 result, float16 dot, float sum, float16 scale, float16 offset) {
#ifdef CENTRE
    return fma(scale, fma((float16)(-CENTRE), (float16)sum, dot), result);
#elif defined(OFFSET_IS_ZERO)
    return fma(scale, fma(-offset, (float16)sum, dot), result);
#elif defined(CODEBOOK)
    return fma(scale, dot, result);
#elif SCALE_BYTES > 0
    return fma(offset, (float16)sum, fma(scale, dot, result));
#else
    return result + dot;
#endif
}

// A weight by itself.
inline float16 weight_of(float16 code, float16 scale, float16 offset) {
#ifdef CENTRE
    return scale * (code - CENTRE);
#elif defined(OFFSET_IS_ZERO)
    return scale * (code - offset);
#elif defined(CODEBOOK)
    return scale * code;
#elif SCALE_BYTES > 0
    return fma(scale, code, offset);
#else
    return code;
#endif
}
