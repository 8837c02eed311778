// Packing and products of many rows by integers: takes the place of pack.h and tile_pair.h, same names.
//
// Codes are integers below 256 (those of a codebook stand for integers between -128 and 127), and so are rows made integers.
// In each group of 32 columns a value is taken as a multiple of 2^-22 times the power of two below the group's largest, so it
// is off by at most 2^-23 of that: as much as f32 itself, unless the largest meets weights of zero and the rest is tiny. The
// integers have 24 bits with their sign and are cut into three signed digits of 8 bits, so a group's share is three sums of
// products of bytes, which are exact in any order. So processors may make them with whatever instructions they have, one row
// by vectors (VNNI: four products of a lane at a time) and many by the matrix unit (AMX), and a row's bits are the same.
// Sums are rounded where the digits' are joined, and group by group from there as in the other kernels.
//
// Formats whose codes are numbers of their own (F32, F16, BF16), and Q3_K, are multiplied in f32 by the other kernels' lines:
// rows are packed in both forms.
//
// amx.h says what assembly compilers take.

#define DIGITS 3
// Of packed, that a row takes in each group: a block of rows is f32 [groups][rows][32], as in pack.h; digits [groups][DIGITS]
// [rows][32 bytes], the small ones first; f32 [groups][rows], what a digit's unit is worth.
#define GROUP_FLOATS (GROUP + DIGITS * 8 + 1)

// Bytes of two vectors by an index of 7 bits (VBMI).
inline float16 bytes_of_two(uint16 a, constant const uchar* index, uint16 b) {
    float16 bytes = as_float16(a);
    __asm__("vpermt2b %2, %1, %0" : "+X"(bytes) : "X"(vload16(0, (constant const float*)index)), "X"(as_float16(b)));
    return bytes;
}

// Byte k of each lane of two vectors, in the order of products: of eight columns the even ones and the odd ones, as they fall
// out of a word of nibbles.
#define EIGHT_IN_ORDER(at, k)                                                                                         \
    (at) + (k), (at) + 8 + (k), (at) + 16 + (k), (at) + 24 + (k), (at) + 4 + (k), (at) + 12 + (k), (at) + 20 + (k),    \
        (at) + 28 + (k)
#define IN_ORDER(k) EIGHT_IN_ORDER(0, k), EIGHT_IN_ORDER(32, k), EIGHT_IN_ORDER(64, k), EIGHT_IN_ORDER(96, k)
constant uchar LOWER_DIGITS[64] __attribute__((aligned(64))) = {IN_ORDER(0), IN_ORDER(1)};
constant uchar UPPER_DIGITS[64] __attribute__((aligned(64))) = {IN_ORDER(2), IN_ORDER(3)};

// The digits of a group's 32 values, `step` bytes from one digit to the next. Returns what the smallest one's unit is worth:
// no number where one of the values is none or infinite.
inline float pack_digits(float16 a, float16 b, global uchar* digits, size_t step) {
    // As integers, of which those of infinities and of what is no number are the largest.
    const int16 sizes = max(as_int16(fabs(a)), as_int16(fabs(b)));
    const int8 eight = max(sizes.lo, sizes.hi);
    const int4 four = max(eight.lo, eight.hi);
    const int2 two = max(four.lo, four.hi);
    const float largest = as_float(max(two.x, two.y));
    // So that the first digit is at most 127. Of no power below 2^-95, which flush_tiny makes zeros of.
    const uint exponent = max((as_uint(largest * 1.004f) >> 23) & 255, 32u);
    const float up = as_float((276 - exponent) << 23);
    // With half a unit of each digit added, bytes are digits plus 128.
    const uint16 u = as_uint16(convert_int16_rte(a * up) + 0x808080) ^ (uint16)0x808080;
    const uint16 v = as_uint16(convert_int16_rte(b * up) + 0x808080) ^ (uint16)0x808080;
    const float16 lower = bytes_of_two(u, LOWER_DIGITS, v);
    vstore8(lower.lo, 0, (global float*)digits);
    vstore8(lower.hi, 0, (global float*)(digits + step));
    vstore8(bytes_of_two(u, UPPER_DIGITS, v).lo, 0, (global float*)(digits + 2 * step));
    return exponent < 255 ? as_float((exponent - 22) << 23) : NAN;
}

// Columns 32 * g and on of row `row` of a block: a and b are the 32 values. With room for 15 rows more, for a tile reads 16
// rows whatever they are; sums as in pack.h, likewise.
inline void pack_group(float16 a, float16 b, global float* packed, global float* sums, int g, int groups, int row,
                       int rows) {
    const size_t block = (size_t)groups * rows;
    global float* out = packed + ((size_t)g * rows + row) * GROUP;
    vstore16(a, 0, out);
    vstore16(b, 1, out);
    global uchar* digits = (global uchar*)(packed + block * GROUP) + ((size_t)g * DIGITS * rows + row) * GROUP;
    packed[block * (GROUP_FLOATS - 1) + (size_t)g * rows + row] = pack_digits(a, b, digits, (size_t)rows * GROUP);
    sums[(size_t)g * rows + row] = sum_lanes(a + b);
    sums[(size_t)(groups + 2 * g) * rows + row] = sum_lanes(a);
    sums[(size_t)(groups + 2 * g + 1) * rows + row] = sum_lanes(b);
}

#if defined(FORMAT) && SLOT_BITS != 3 && (SLOT_BITS > 0 || defined(CODEBOOK))
#define INTEGER_CODES

#define HALVES (GROUP / SCALE_GROUP)
#define WORDS (SCALE_GROUP / 4) // vectors of codes in a scale group: four columns of 16 outputs

#if SLOT_BITS == 8 || SLOT_BITS == 2
#define LANE(i, a, b, c, d) 4 * (i) + (a), 4 * (i) + (b), 4 * (i) + (c), 4 * (i) + (d)
#define LANES_FROM(i, ...) LANE(i, __VA_ARGS__), LANE(i + 1, __VA_ARGS__), LANE(i + 2, __VA_ARGS__), LANE(i + 3, __VA_ARGS__)
#define ALL_LANES(...) \
    LANES_FROM(0, __VA_ARGS__), LANES_FROM(4, __VA_ARGS__), LANES_FROM(8, __VA_ARGS__), LANES_FROM(12, __VA_ARGS__)
#if SLOT_BITS == 8
// Of the four bytes that lanes of two vectors have each: the even ones of both, and the odd ones.
constant uchar EVEN_BYTES[64] __attribute__((aligned(64))) = {ALL_LANES(0, 2, 64, 66)};
constant uchar ODD_BYTES[64] __attribute__((aligned(64))) = {ALL_LANES(1, 3, 65, 67)};
#else
// The first two of both by turns, and the last two.
constant uchar FIRST_BYTES[64] __attribute__((aligned(64))) = {ALL_LANES(0, 64, 1, 65)};
constant uchar LAST_BYTES[64] __attribute__((aligned(64))) = {ALL_LANES(2, 66, 3, 67)};
#endif
#endif

#ifdef CODEBOOK
// What nibbles, one to a byte, stand for, as signed bytes.
inline uint16 numbers_of(uint16 nibbles) {
    const float4 book = as_float4((char16)(CODEBOOK));
    float16 numbers;
    __asm__("vpshufb %2, %1, %0"
            : "=X"(numbers)
            : "X"((float16)(book, book, book, book)), "X"(as_float16(nibbles)));
    return as_uint16(numbers);
}
#endif

// The codes of scale group s of a group as bytes, WORDS vectors: of eight columns the even ones of each output, then the odd.
inline void code_words(global const uchar* codes, int s, float16* words) {
    global const uint* from = (global const uint*)codes;
#if SLOT_BITS == 8
    #pragma unroll
    for (int j = 0; j < WORDS; j += 2) {
        const uint16 v = vload16(s * WORDS + j, from), w = vload16(s * WORDS + j + 1, from);
        words[j] = bytes_of_two(v, EVEN_BYTES, w);
        words[j + 1] = bytes_of_two(v, ODD_BYTES, w);
    }
#elif SLOT_BITS == 2
    #pragma unroll
    for (int j = 0; j < WORDS; j += 4) {
        uint16 v[4];
        #pragma unroll
        for (int m = 0; m < 4; m++)
            v[m] = (vload16(s * (WORDS / 4) + j / 4, from) >> (uint16)(2 * m)) & (uint16)0x03030303;
        words[j] = bytes_of_two(v[0], FIRST_BYTES, v[2]);
        words[j + 1] = bytes_of_two(v[1], FIRST_BYTES, v[3]);
        words[j + 2] = bytes_of_two(v[0], LAST_BYTES, v[2]);
        words[j + 3] = bytes_of_two(v[1], LAST_BYTES, v[3]);
    }
#else
    #pragma unroll
    for (int j = 0; j < WORDS / 2; j++) {
        const uint16 v = vload16(s * (WORDS / 2) + j, from);
        uint16 even = v & (uint16)0x0f0f0f0f, odd = (v >> (uint16)4) & (uint16)0x0f0f0f0f;
#ifdef HIGH_BITS
        const uint16 h = high_word(from, s * (WORDS / 2) + j);
        even |= h & (uint16)(HIGH_MASK * 0x10101010u);
        odd |= rotate(h, (uint16)28) & (uint16)(HIGH_MASK * 0x10101010u);
#elif defined(CODEBOOK)
        even = numbers_of(even);
        odd = numbers_of(odd);
#endif
        words[2 * j] = as_float16(even);
        words[2 * j + 1] = as_float16(odd);
    }
#endif
}

// A scale group's sum of code * x from its digits' sums of integers. unit: what the smallest digit's is worth.
inline float16 join_digits(float16 low, float16 middle, float16 high, float unit) {
    const float16 lower = fma(convert_float16(as_int16(middle)), (float16)256.0f, convert_float16(as_int16(low)));
    return fma(convert_float16(as_int16(high)), (float16)65536.0f, lower) * unit;
}

// c += a * b, of digits and codes: what codes of a codebook stand for has a sign, others have none.
#ifdef CODEBOOK
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#else
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#endif

// How the digits of `rows` rows, at most 16, lie in registers: one below the other, in as few registers as hold them. To store
// a register takes as long for one row as for 16.
#define PARTS(rows) ((DIGITS * (rows) + 15) / 16)
#define FIRST_ROWS(rows) ((DIGITS * (rows) + PARTS(rows) - 1) / PARTS(rows))

// Registers 0 and 1 for sums of the first part of `rows` rows' digits, by two tiles, and 2 for the digits; 3 to 5 for the
// second; 6 and 7 for codes of two tiles. A third part is like the first.
inline void tiles_on(int rows) {
    const uint first = FIRST_ROWS(rows), second = max(1u, min(first, DIGITS * rows - first));
    uint config[16] __attribute__((aligned(64))) = {1, 0, 0, 0};
    config[4] = 64 | 64 << 16;
    config[5] = SCALE_GROUP | 64 << 16;
    config[6] = 64 | SCALE_GROUP << 16;
    config[7] = 64 | 64 << 16;
    config[12] = first * 0x010101u | second << 24;
    config[13] = second * 0x0101u | WORDS << 16 | WORDS << 24;
    __asm__ volatile("ldtilecfg (%0)" ::"r"((ulong)config) : "memory");
}

#define MOST_SUMS (DIGITS * 16) // of a tile: vectors of 16 outputs

// Leaves a scale group's sums of integers in dots[2 tiles][MOST_SUMS]: of a tile [DIGITS][rows]. digits: of its first column,
// of the first row; the second and third part's are `part_step` bytes from those of the one before. words: [2 tiles][WORDS].
inline void dots_by_unit(global const uchar* digits, size_t part_step, int rows, const float16* words, float16* dots) {
    const int parts = PARTS(rows), first = FIRST_ROWS(rows);
    TILE_LOAD(6, words, 64);
    TILE_LOAD(7, words + WORDS, 64);
    TILE_ZERO(0); TILE_ZERO(1);
    TILE_LOAD(2, digits, GROUP);
    TILE_DOT(0, 2, 6); TILE_DOT(1, 2, 7);
    if (parts > 1) {
        TILE_ZERO(3); TILE_ZERO(4);
        TILE_LOAD(5, digits + part_step, GROUP);
        TILE_DOT(3, 5, 6); TILE_DOT(4, 5, 7);
    }
    TILE_STORE(0, dots, 64); TILE_STORE(1, dots + MOST_SUMS, 64);
    if (parts > 1) {
        TILE_STORE(3, dots + first, 64); TILE_STORE(4, dots + MOST_SUMS + first, 64);
    }
    if (parts > 2) {
        TILE_ZERO(0); TILE_ZERO(1);
        TILE_LOAD(2, digits + 2 * part_step, GROUP);
        TILE_DOT(0, 2, 6); TILE_DOT(1, 2, 7);
        TILE_STORE(0, dots + 2 * first, 64); TILE_STORE(1, dots + MOST_SUMS + 2 * first, 64);
    }
}

// Adds what dots_by_unit left of `rows` rows, of which `count` are wanted, to results[count][2]. scale: which scale group of
// the tiles it is.
inline void add_dots(const float16* dots, global const uchar* tiles, size_t step, int scale, global const float* units,
                     global const float* sums, int rows, int count, float16* results) {
    float16 factors[2], offsets[2];
    #pragma unroll
    for (int t = 0; t < 2; t++) {
        factors[t] = group_scale(tiles + t * step, scale);
        offsets[t] = group_offset(tiles + t * step, scale);
    }
    for (int r = 0; r < count; r++)
        #pragma unroll
        for (int t = 0; t < 2; t++) {
            const float16* d = dots + t * MOST_SUMS + r;
            const float16 dot = join_digits(d[0], d[rows], d[2 * rows], units[r]);
            results[2 * r + t] = add_group(results[2 * r + t], dot, sums[r], factors[t], offsets[t]);
        }
}

// What has just been stored is not yet where it is loaded from: codes are unpacked so many groups before their turn, and sums
// wait for so many.
#define EARLY 2
#define LATE 2
#define RING 4 // of buffers; more than either

// The codes of group g of two tiles: words[HALVES][2 tiles][WORDS].
inline void unpack_pair(global const uchar* tiles, size_t step, int g, float16 (*words)[2 * WORDS]) {
    #pragma unroll
    for (int s = 0; s < HALVES; s++)
        #pragma unroll
        for (int t = 0; t < 2; t++) code_words(group_codes(tiles + t * step, g), s, words[s] + t * WORDS);
}

// A block of `rows` rows through two tiles of weights, as in tile_pair.h; results of the rows that fill up 16 are scratch.
inline void rows_through_pair(global const uchar* tiles, int groups, int packed_groups, global const float* x,
                              global const float* sums, int rows, float16* results) {
    const size_t step = tile_bytes(groups), block = (size_t)packed_groups * rows;
    global const uchar* digits = (global const uchar*)(x + block * GROUP);
    global const float* units = x + block * (GROUP_FLOATS - 1);
    for (int r = 0; r < 2 * rows; r++) results[r] = 0.0f;
    float16 words[RING][HALVES][2 * WORDS] __attribute__((aligned(64)));
    float16 dots[RING][2 * MOST_SUMS] __attribute__((aligned(64)));
    // Passes are taken one after the other: all blocks of 16 rows by a scale group, then by the next one.
    const int blocks = (rows + 15) / 16, passes = groups * HALVES * blocks;
    for (int g = 0; g < min(EARLY, groups); g++) unpack_pair(tiles, step, g, words[g]);
    tiles_on(16);
    for (int pass = 0; pass < passes + LATE; pass++) {
        if (pass < passes) {
            const int scale = pass / blocks, block = pass % blocks, g = scale / HALVES, s = scale % HALVES;
            if (block == 0 && s == 0 && g + EARLY < groups)
                unpack_pair(tiles, step, g + EARLY, words[(g + EARLY) % RING]);
            global const uchar* from = digits + ((size_t)g * DIGITS * rows + block * 16) * GROUP + s * SCALE_GROUP;
            dots_by_unit(from, (size_t)rows * GROUP, 16, words[g % RING][s], dots[pass % RING]);
        }
        if (pass >= LATE) {
            const int old = pass - LATE, scale = old / blocks, r = old % blocks * 16, g = scale / HALVES;
            add_dots(dots[old % RING], tiles, step, scale, units + (size_t)g * rows + r,
                     group_sums(sums, packed_groups, rows, g) + scale % HALVES * rows + r, 16, min(16, rows - r),
                     results + 2 * r);
        }
    }
    TILES_OFF;
}
#endif
