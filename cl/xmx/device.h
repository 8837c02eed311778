// What every kernel of the `xmx` family builds on: one sub-group of 16 work-items does the work of a matrix engine's
// operand registers. A *lane* is a column of B and of the result; element r of a lane's vector is row r.
//
// The source is the same everywhere. Where the device has no matrix engine, or no loads of two-dimensional blocks, the
// built-ins that this file would call are made of plain sub-group code with the same layouts; on a CPU that is how the
// kernels are tested. XMX_PLAIN asks a device that has them to do without block loads and inline assembly.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
// Every multiply-add that is meant to be fused says fma().
#pragma OPENCL FP_CONTRACT OFF

#define LANES 16
#define SUB_GROUP __attribute__((intel_reqd_sub_group_size(16)))
#define GROUP 32 // columns of a weight row that share a scale in most formats

// SPECIALISED functions are compiled anew for each number they are called with, and their loops unrolled, where that makes
// registers of arrays. An emulation that is unrolled and copied takes a CPU's compiler minutes.
#ifdef cl_intel_subgroup_matrix_multiply_accumulate
#define HAS_MATRIX_ENGINE
#define UNROLL _Pragma("unroll")
#define SPECIALISED __attribute__((always_inline)) inline
#else
#define UNROLL _Pragma("unroll 1")
#define SPECIALISED __attribute__((noinline))
#endif
#if defined(HAS_MATRIX_ENGINE) && !defined(XMX_PLAIN)
#define HAS_ASSEMBLY
#endif
#if defined(cl_intel_subgroup_2d_block_io) && !defined(XMX_PLAIN)
#define HAS_BLOCK_LOADS
#endif

// c + a * b. a: lane k holds column k of 8 rows, f16; b: word j of a lane holds rows 2j and 2j + 1 of its column, f16.
#ifdef HAS_MATRIX_ENGINE
inline float8 multiply_add(ushort8 a, int8 b, float8 c) {
    return intel_sub_group_f16_f16_matrix_mad_k16(as_short8(a), b, c);
}
// The vendor's own functions are exact to f32's last bits on the GPU, and to 16 bits on CPUs.
#define EXP(x) native_exp(x)
#define LOG(x) native_log(x)
#else
inline float8 multiply_add(ushort8 a, int8 b, float8 c) {
    float rows[8], sums[8];
    int words[8];
    vstore8(convert_float8(as_half8(a)), 0, rows);
    vstore8(c, 0, sums);
    vstore8(b, 0, words);
    UNROLL for (int j = 0; j < 8; j++) {
        const float2 pair = convert_float2(as_half2(words[j]));
        UNROLL for (int r = 0; r < 8; r++) {
            sums[r] = fma(sub_group_broadcast(rows[r], 2 * j), pair.x, sums[r]);
            sums[r] = fma(sub_group_broadcast(rows[r], 2 * j + 1), pair.y, sums[r]);
        }
    }
    return vload8(0, sums);
}
#define EXP(x) exp(x)
#define LOG(x) log(x)
#endif

// A matrix of f16 in memory, for loads of blocks: `rows` rows of `columns`, `stride` values apart. What lies outside reads
// as zero. It must begin at a multiple of 64 bytes; columns and stride must be multiples of 32.
typedef struct {
    global const ushort* values;
    int columns, rows, stride;
} Surface;

// Loads R rows from `row` on, C blocks of 16 columns from `column` on: to[c * R + r].
#ifdef HAS_BLOCK_LOADS
#define LOAD_ROWS(R, C)                                                                                               \
    inline void load_##R##x##C(Surface s, int column, int row, private ushort* to) {                                  \
        intel_sub_group_2d_block_read_16b_##R##r16x##C##c((global void*)s.values, s.columns * 2, s.rows,              \
                                                          s.stride * 2, (int2)(column, row), to);                     \
    }
#else
#define LOAD_ROWS(R, C)                                                                                               \
    inline void load_##R##x##C(Surface s, int column, int row, private ushort* to) {                                  \
        for (int c = 0; c < C; c++)                                                                                   \
            for (int r = 0; r < R; r++) {                                                                             \
                const int at = column + c * LANES;                                                                    \
                to[c * R + r] = row + r < s.rows && at < s.columns                                                    \
                                    ? intel_sub_group_block_read_us(s.values + (size_t)(row + r) * s.stride + at)     \
                                    : (ushort)0;                                                                      \
            }                                                                                                         \
    }
#endif
LOAD_ROWS(8, 2)
LOAD_ROWS(16, 2)
LOAD_ROWS(32, 2)
