// Weights as operands of the matrix engine. Tiles, blocks and scales lie as cl/include/weights.h says; the words of a group's
// codes hold the bits in the order that the engine wants (src/ops/xmx/arrange.rs), in up to two planes:
//     nibbles  a word for each 8 columns: bits 4j hold column 2j of its eight, bits 16 + 4j column 2j + 1
//     pairs    a word for each 16: bits 2j hold column 2j, bits 16 + 2j column 2j + 1
//     ones     a word for all 32: bits j hold columns 2j, bits 16 + j columns 2j + 1
// Codes of 4 bits are nibbles; those of 5 and 6 have their upper bits in ones and in pairs; those of 2 are pairs; those of 3 have
// their upper bit in ones. Of 8 bits, bytes 0, 2, 1, 3 of a word hold columns; of 16, a word holds columns 2j and 2j + 1, f16.
//
// So masks make a pair of f16 out of words: the code, plus a power of two that the exponent stands for. What is taken off
// that, the code that stands for zero included, is a whole number: the engine multiplies exact codes. Scales are
// applied in f32 to the sum over a *span*, the columns that share a scale, and so are offsets, to the span's sum of
// activations. Only activations are ever rounded.
//
// The host defines CODE_BITS, BLOCK_GROUPS, SCALE_BYTES, GROUP_BYTES, BLOCK_BYTES; how scales lie, SCALES_NONE, SCALES_HALVES,
// SCALES_WHOLE, SCALES_BYTES, SCALES_SIGNED, SCALES_STEPS or SCALES_EXPONENTS; and ZERO_POINT, OFFSET, E2M1, or the code that stands
// for zero as CENTRE_BITS: the bits, in f16, of BIAS and that code, negated; and CURVE_4 to CURVE_0, bits of f16, where the
// numbers that codes stand for are on a curve.

// SPAN_GROUPS, groups of 32 columns in a span, is the program's: 1, or 2 where a block of two has one scale. With SCALES_STEPS, 16
// columns share a scale, and those of a span are applied step by step.
#define STEPS (2 * SPAN_GROUPS)            // matrix instructions in a span, of 16 columns each
#define WORDS (SPAN_GROUPS * CODE_BITS)    // of codes of a lane in a span

// BIAS: a power of two whose f16 has room for the code in its upper bits, where the lowest one stands for 1.
#if CODE_BITS == 2
#define BIAS 4
#define BIAS_BITS 0x44004400u
#elif CODE_BITS == 3
#define BIAS 8
#define BIAS_BITS 0x48004800u
#elif CODE_BITS == 4
#define BIAS 16
#define BIAS_BITS 0x4C004C00u
#elif CODE_BITS == 5
#define BIAS 32
#define BIAS_BITS 0x50005000u
#elif CODE_BITS == 6
#define BIAS 64
#define BIAS_BITS 0x54005400u
#elif CODE_BITS == 8
#define BIAS 1024
#define BIAS_BITS 0x64006400u // 1024 likewise, from bit 0 on
#endif
#define LOWEST (10 - CODE_BITS) // the bit of a half where the code begins

// Pairs of f16 less a pair, or less CENTRE_BITS. The compiler makes ten instructions of what is one.
#ifdef HAS_ASSEMBLY
#define PAIRS_OF(name, operand) ".decl " name " v_type=G type=HF num_elts=32 alias=<" operand ",0>\n"
#define TEXT_OF(x) TEXT(x)
#define TEXT(x) #x
#endif
inline int take_off(int pair, int base) {
#if defined(CENTRE_BITS) && defined(HAS_ASSEMBLY)
    int left;
    __asm__("{\n" PAIRS_OF("A", "%1") PAIRS_OF("D", "%0")
            "add (M1_NM, 32) D(0,0)<1> A(0,0)<1;1,0> " TEXT_OF(CENTRE_BITS) ":hf\n}" : "=rw"(left) : "rw"(pair));
    return left;
#elif defined(CENTRE_BITS)
    return as_int(as_half2(pair) + (half2)as_half((ushort)CENTRE_BITS));
#elif defined(HAS_ASSEMBLY)
    int left;
    __asm__("{\n" PAIRS_OF("A", "%1") PAIRS_OF("B", "%2") PAIRS_OF("D", "%0")
            "add (M1_NM, 32) D(0,0)<1> A(0,0)<1;1,0> (-)B(0,0)<1;1,0>\n}" : "=rw"(left) : "rw"(pair), "rw"(base));
    return left;
#else
    return as_int(as_half2(pair) - as_half2(base));
#endif
}

#ifdef E2M1
// Pairs of f16 times 2^15: numbers of E2M1, doubled.
inline int doubled_numbers(int pair) {
#ifdef HAS_ASSEMBLY
    int times;
    __asm__("{\n" PAIRS_OF("A", "%1") PAIRS_OF("D", "%0")
            "mul (M1_NM, 32) D(0,0)<1> A(0,0)<1;1,0> 0x7800:hf\n}" : "=rw"(times) : "rw"(pair));
    return times;
#else
    return as_int(as_half2(pair) * (half2)32768.0h);
#endif
}
#endif

#ifdef CURVE_4
// Pairs of f16, codes of IQ4 less 8, become the numbers that they stand for: these lie within 0.44 of a curve of the fourth degree,
// and 1536 has no room for less than 1.
inline int numbers_of(int pair) {
#ifdef HAS_ASSEMBLY
    int numbers;
    __asm__("{\n" PAIRS_OF("A", "%1") PAIRS_OF("D", "%0") ".decl T v_type=G type=HF num_elts=32\n"
            "mad (M1_NM, 32) T(0,0)<1> A(0,0)<1;1,0> " TEXT_OF(CURVE_4) ":hf " TEXT_OF(CURVE_3) ":hf\n"
            "mad (M1_NM, 32) T(0,0)<1> A(0,0)<1;1,0> T(0,0)<1;1,0> " TEXT_OF(CURVE_2) ":hf\n"
            "mad (M1_NM, 32) T(0,0)<1> A(0,0)<1;1,0> T(0,0)<1;1,0> " TEXT_OF(CURVE_1) ":hf\n"
            "mad (M1_NM, 32) T(0,0)<1> A(0,0)<1;1,0> T(0,0)<1;1,0> " TEXT_OF(CURVE_0) ":hf\n"
            "add (M1_NM, 32) T(0,0)<1> T(0,0)<1;1,0> 0x6600:hf\n"
            "add (M1_NM, 32) D(0,0)<1> T(0,0)<1;1,0> 0xE600:hf\n}" : "=rw"(numbers) : "rw"(pair));
    return numbers;
#else
    const float2 x = convert_float2(as_half2(pair));
    const ushort bits[5] = {CURVE_4, CURVE_3, CURVE_2, CURVE_1, CURVE_0};
    float2 y = 0.0f;
    for (int i = 0; i < 5; i++) y = fma(y, x, (float2)convert_float(as_half(bits[i])));
    return as_int(convert_half2(rint(y)));
#endif
}
#endif

inline int pair_of(ushort bits) { return (int)(bits | (uint)bits << 16); }

inline uint shifted(uint word, int left) { return left >= 0 ? word << left : word >> -left; }

// The part of a plane that pair `k` has, in both halves: `bits` bits, brought to bit `to`.
#define PART(word, k, bits, to) (shifted(word, (to) - (bits) * (k)) & ((1u << (bits)) - 1u) * (0x00010001u << (to)))

// B of step `j` of a group from the group's words. base: bias and zero point, as a pair.
inline int8 operand(private const uint* words, int j, int base) {
#if CODE_BITS == 16
    return as_int8(vload8(j, words));
#else
    int b[8];
#if CODE_BITS == 8
    UNROLL for (int w = 0; w < 4; w++) {
        const uint word = words[4 * j + w];
        b[2 * w] = (int)(word & 0x00FF00FFu | BIAS_BITS);
        b[2 * w + 1] = (int)(word >> 8 & 0x00FF00FFu | BIAS_BITS);
    }
#else
    UNROLL for (int k = 0; k < 8; k++) {
#ifdef E2M1
        // Sign, exponent and fraction as f16 has them, whose numbers are then 2^-14 of what they stand for.
        const uint word = words[2 * j + k / 4];
        b[k] = (int)(shifted(word, 9 - 4 * (k % 4)) & 0x0E000E00u | shifted(word, 12 - 4 * (k % 4)) & 0x80008000u);
#else
        uint pair = BIAS_BITS;
#if CODE_BITS >= 4
        pair |= PART(words[2 * j + k / 4], k % 4, 4, LOWEST);
#else
        pair |= PART(words[j], k, 2, LOWEST);
#endif
#if CODE_BITS == 6
        pair |= PART(words[4 + j], k, 2, 8);
#elif CODE_BITS == 5 || CODE_BITS == 3
        pair |= PART(words[CODE_BITS - 1], 8 * j + k, 1, 9);
#endif
        b[k] = (int)pair;
#endif
    }
#endif
#ifdef E2M1
    UNROLL for (int k = 0; k < 8; k++) b[k] = doubled_numbers(b[k]);
#elif !defined(OFFSET) // there, the bias goes with the offset
    UNROLL for (int k = 0; k < 8; k++) b[k] = take_off(b[k], base);
#endif
#ifdef CURVE_4
    UNROLL for (int k = 0; k < 8; k++) b[k] = numbers_of(b[k]);
#endif
    return vload8(0, b);
#endif
}

// Where the block of a group begins in a tile, and where the codes of span `s`.
inline uint block_offset(uint g) { return g / BLOCK_GROUPS * BLOCK_BYTES; }

inline uint codes_offset(uint s) {
    const uint g = s * SPAN_GROUPS;
    return block_offset(g) + SCALE_BYTES + g % BLOCK_GROUPS * GROUP_BYTES;
}

inline void load_words(global const uchar* tile, uint offset, private uint* words) {
    global const uint* from = (global const uint*)(tile + offset);
#if WORDS >= 8
    UNROLL for (int w = 0; w < WORDS; w += 8) vstore8(intel_sub_group_block_read8(from + w * LANES), 0, words + w);
#else
#if WORDS >= 4
    vstore4(intel_sub_group_block_read4(from), 0, words);
#endif
#if WORDS % 4 >= 2
    vstore2(intel_sub_group_block_read2(from + WORDS / 4 * 4 * LANES), 0, words + WORDS / 4 * 4);
#endif
#if WORDS % 2 == 1
    words[WORDS - 1] = intel_sub_group_block_read(from + (WORDS - 1) * LANES);
#endif
#endif
}

// Asks for the codes of a span that will be read soon.
inline void fetch_words(global const uchar* tile, uint offset) {
#ifdef cl_intel_subgroup_buffer_prefetch
    UNROLL for (int w = 0; w < WORDS; w += 4)
        intel_sub_group_block_prefetch_ui4((global const uint*)(tile + offset) + w * LANES);
#endif
}

// Scales as loaded; what comes of them. A block of eight groups whose scales are bytes is loaded at its first one.
typedef struct {
    float scale, offset;
    int base;
#ifdef SCALES_BYTES
    float whole, whole_offset;
    ulong scales, offsets; // a byte a group, the next one lowest
#endif
#ifdef SCALES_STEPS
    float second; // `scale` is of the first 16 columns, and this of the others
    int offsets[2]; // what is to be taken off, in units of `offset`: pairs of f16
#endif
} Scale;

inline float half_at(global const uchar* from) { return convert_float(as_half(intel_sub_group_block_read_us((global const ushort*)from))); }

// Scale and offset of span s of a tile. `previous`: what it said of the span before, in which `first` is not set.
inline Scale scale_of(global const uchar* tile, uint s, int first, Scale previous) {
    Scale now = previous;
#if !defined(SCALES_NONE)
    const uint g = s * SPAN_GROUPS;
    global const uchar* block = tile + block_offset(g);
#if defined(ZERO_POINT)
    const ushort2 both = intel_sub_group_block_read_us2((global const ushort*)block);
    now.scale = convert_float(as_half(both.x));
    now.base = pair_of(as_ushort(as_half(both.y) + (half)BIAS));
#elif defined(SCALES_HALVES)
    now.scale = half_at(block + (g % BLOCK_GROUPS) * 32);
#elif defined(SCALES_WHOLE) && defined(OFFSET)
    const ushort2 both = intel_sub_group_block_read_us2((global const ushort*)block);
    now.scale = convert_float(as_half(both.x));
    now.offset = fma(now.scale, -(float)BIAS, convert_float(as_half(both.y)));
#elif defined(SCALES_WHOLE)
    now.scale = half_at(block);
#elif defined(SCALES_BYTES)
    if (first || g % BLOCK_GROUPS == 0) {
        const ushort2 both = intel_sub_group_block_read_us2((global const ushort*)block);
        now.whole = convert_float(as_half(both.x));
        now.whole_offset = -convert_float(as_half(both.y));
        const uint skip = 8 * (g % BLOCK_GROUPS);
        now.scales = as_ulong(intel_sub_group_block_read_uc8(block + 64)) >> skip;
        now.offsets = as_ulong(intel_sub_group_block_read_uc8(block + 64 + 8 * LANES)) >> skip;
    }
    now.scale = now.whole * (float)((uint)now.scales & 255u);
    now.offset = fma(now.scale, -(float)BIAS, now.whole_offset * (float)((uint)now.offsets & 255u));
    now.scales >>= 8;
    now.offsets >>= 8;
#elif defined(SCALES_STEPS)
    const uchar2 both = intel_sub_group_block_read_uc2(block + 64 + g % BLOCK_GROUPS * 2 * LANES);
#ifdef STEP_OFFSETS // four bits each
    const ushort2 wholes = intel_sub_group_block_read_us2((global const ushort*)block);
    const float whole = convert_float(as_half(wholes.x));
    now.scale = whole * (float)(both.x & 15);
    now.second = whole * (float)(both.y & 15);
    now.offset = -convert_float(as_half(wholes.y));
    now.offsets[0] = pair_of(as_ushort(convert_half(both.x >> 4)));
    now.offsets[1] = pair_of(as_ushort(convert_half(both.y >> 4)));
#else
    const float whole = half_at(block);
    now.scale = whole * (float)as_char(both.x);
    now.second = whole * (float)as_char(both.y);
#endif
#elif defined(SCALES_SIGNED)
    const char scale = as_char(intel_sub_group_block_read_uc(block + 64 + g % BLOCK_GROUPS * LANES));
    now.scale = half_at(block) * (float)scale;
#elif defined(SCALES_EXPONENTS)
    // 2^(exponent - 128) of the file, stored less 128, in two factors: the smallest are no numbers that as_float makes.
    const int exponent = as_char(intel_sub_group_block_read_uc(block + g % BLOCK_GROUPS * LANES));
    now.scale = as_float(max(exponent + 127, 1) << 23) * (exponent < -126 ? (exponent < -127 ? 0.25f : 0.5f) : 1.0f);
#endif
#endif
    return now;
}

inline Scale no_scale(void) {
    Scale s;
    s.scale = 1.0f;
    s.offset = 0.0f;
    s.base = 0;
#ifdef SCALES_BYTES
    s.whole = s.whole_offset = 0.0f;
    s.scales = s.offsets = 0;
#endif
#ifdef SCALES_STEPS
    s.second = 0.0f;
    s.offsets[0] = s.offsets[1] = 0;
#endif
    return s;
}
