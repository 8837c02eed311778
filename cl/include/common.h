// Shared by every kernel. Bits must not depend on how many rows a pass has, so nothing here may be contracted or
// reassociated: every multiply-add that is meant to be fused says fma().
#pragma OPENCL FP_CONTRACT OFF

// One work-item does the work of a vector by hand; the Intel CPU compiler must not widen it again across work-items.
#ifdef cl_intel_vec_len_hint
#define EXPLICIT_VECTOR __attribute__((intel_vec_len_hint(1)))
#else
#define EXPLICIT_VECTOR
#endif

// How a kernel is declared. By itself, each of its work-items is a work-group. With PHASES it is a function that phases.cl
// calls for one work-item after the other:
// AT, OF  the work-item's place along a dimension, and how many there are
// AGAIN   this group has just done a work-item of the same launch, and local memory is as that one left it
#ifdef PHASES
#define KERNEL static __attribute__((noinline)) void
#define ITEM const int3 item_at, const int3 item_of, const int item_again,
#define AT(d) item_at.s##d
#define OF(d) item_of.s##d
#define AGAIN item_again
#else
#define KERNEL EXPLICIT_VECTOR kernel void
#define ITEM
#define AT(d) get_global_id(d)
#define OF(d) get_global_size(d)
#define AGAIN 0
#endif

#define GROUP 32 // columns of a weight row that share a scale in most formats; rows are padded to a multiple

// Rows that one work-item takes through a pair of tiles. Packed rows lie by such blocks, each a packed matrix of its own,
// so that what a work-item reads lies together.
#define ROW_BLOCK 64
// The most slots in a block of an expert's (moe.cl). More than a block of matmul's: experts are few rows each, and cutting
// them leaves less for a tile that has been unpacked.
#define SLOT_BLOCK 128

// Sum of 16 lanes in a fixed tree.
inline float sum_lanes(float16 v) {
    float8 a = v.lo + v.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}

// Largest of 16 lanes.
inline float max_lanes(float16 v) {
    float8 a = fmax(v.lo, v.hi);
    float4 b = fmax(a.lo, a.hi);
    float2 c = fmax(b.lo, b.hi);
    return fmax(c.x, c.y);
}

// Values this small become zero, so that scaling an activation by 2^-28 (see weights.h) is always exact.
inline float16 flush_tiny(float16 v) {
    return select(v, (float16)0.0f, fabs(v) < (float16)0x1p-90f);
}

