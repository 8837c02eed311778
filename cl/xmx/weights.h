// Weights as operands of the matrix engine. Tiles, blocks and scales lie as cl/include/weights.h says; codes inside a word
// stand in the order that the engine wants (src/ops/xmx/arrange.rs):
//     4 bits   bits 4j of a word hold column 2j of its eight, bits 16 + 4j column 2j + 1
//     8 bits   bytes 0, 2, 1, 3 hold the columns
//     16 bits  a word holds columns 2j and 2j + 1, f16
// so that a mask makes a pair of f16 out of a word: the code, plus a power of two that the exponent stands for. What is
// taken off that, the code that stands for zero included, is a whole number: the engine multiplies exact codes. Scales are
// applied in f32 to the sum over a *span*, the columns that share a scale, and so are offsets, to the span's sum of
// activations. Only activations are ever rounded.
//
// The host defines CODE_BITS (4, 8 or 16), BLOCK_GROUPS, SCALE_BYTES, GROUP_BYTES, BLOCK_BYTES; how scales lie, SCALES_NONE,
// SCALES_HALVES, SCALES_WHOLE or SCALES_GROUPS; and ZERO_POINT, OFFSET, or the code that stands for zero as CENTRE_BITS: the
// bits, in f16, of BIAS and that code, negated.

// SPAN_GROUPS, groups of 32 columns in a span, is the program's: 1, or 2 where a block of two has one scale.
#define STEPS (2 * SPAN_GROUPS)            // matrix instructions in a span, of 16 columns each
#define WORDS (SPAN_GROUPS * CODE_BITS)    // of codes of a lane in a span
#define STEP_WORDS (WORDS / STEPS)

#if CODE_BITS == 4
#define BIAS 16
#define BIAS_BITS 0x4C004C00u // 16 in both halves; the code's lowest bit stands for 1 at bit 6
#elif CODE_BITS == 8
#define BIAS 1024
#define BIAS_BITS 0x64006400u // 1024 likewise, from bit 0 on
#endif

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

inline int pair_of(ushort bits) { return (int)(bits | (uint)bits << 16); }

// B of one step from the step's words. base: bias and zero point, as a pair.
inline int8 operand(private const uint* words, int base) {
#if CODE_BITS == 16
    return as_int8(vload8(0, words));
#else
    int b[8];
#if CODE_BITS == 4
    UNROLL for (int w = 0; w < 2; w++) {
        const uint v = words[w];
        b[4 * w] = (int)(v << 6 & 0x03C003C0u | BIAS_BITS);
        b[4 * w + 1] = (int)(v << 2 & 0x03C003C0u | BIAS_BITS);
        b[4 * w + 2] = (int)(v >> 2 & 0x03C003C0u | BIAS_BITS);
        b[4 * w + 3] = (int)(v >> 6 & 0x03C003C0u | BIAS_BITS);
    }
#else
    UNROLL for (int w = 0; w < 4; w++) {
        b[2 * w] = (int)(words[w] & 0x00FF00FFu | BIAS_BITS);
        b[2 * w + 1] = (int)(words[w] >> 8 & 0x00FF00FFu | BIAS_BITS);
    }
#endif
#ifndef OFFSET // there, the bias goes with the offset
    UNROLL for (int j = 0; j < 8; j++) b[j] = take_off(b[j], base);
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
#if WORDS == 4
    vstore4(intel_sub_group_block_read4(from), 0, words);
#else
    UNROLL for (int w = 0; w < WORDS; w += 8) vstore8(intel_sub_group_block_read8(from + w * LANES), 0, words + w);
#endif
}

// Asks for the codes of a span that will be read soon.
inline void fetch_words(global const uchar* tile, uint offset) {
#ifdef cl_intel_subgroup_buffer_prefetch
    UNROLL for (int w = 0; w < WORDS; w += 4)
        intel_sub_group_block_prefetch_ui4((global const uint*)(tile + offset) + w * LANES);
#endif
}

// Scales as loaded; what comes of them. A block of eight groups is loaded at its first one.
typedef struct {
    float scale, offset;
    int base;
#ifdef SCALES_GROUPS
    float whole, whole_offset;
    ulong scales, offsets; // a byte a group, the next one lowest
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
#elif defined(SCALES_WHOLE)
    const ushort2 both = intel_sub_group_block_read_us2((global const ushort*)block);
    now.scale = convert_float(as_half(both.x));
    now.offset = fma(now.scale, -(float)BIAS, convert_float(as_half(both.y)));
#elif defined(SCALES_GROUPS)
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
#endif
#endif
    return now;
}

inline Scale no_scale(void) {
    Scale s;
    s.scale = 1.0f;
    s.offset = 0.0f;
    s.base = 0;
#ifdef SCALES_GROUPS
    s.whole = s.whole_offset = 0.0f;
    s.scales = s.offsets = 0;
#endif
    return s;
}
