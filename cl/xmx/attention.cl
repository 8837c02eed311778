// Attention over a cache. Scores are made as keys times queries, and sums as values times weights, both turned on their side: a
// lane has a look from the query to the result, and a row's largest score, sums and factors need nothing of other lanes. Where
// everything lies, heads.h says.
//
// A work-group takes 16 N looks through BLOCK positions at a time: sub-group s scores positions 16 s to 16 s + 15 of them and
// owns values OWN s to OWN s + OWN - 1 of the results. A block in which a look sees nothing changes none of its numbers, and
// what is done to a look's lane is the same whatever N is.

#define WEIGHT_SCALE 16384.0f // of weights, of which the largest is 1: those that are small keep their bits in f16

#ifdef cl_intel_subgroup_local_block_io
#define LOCAL_READ8(from) as_int8(intel_sub_group_block_read8(from))
#define LOCAL_WRITE4(to, value) intel_sub_group_block_write4(to, value)
#else
inline int8 local_read8(local const uint* from) {
    int words[8];
    for (int j = 0; j < 8; j++) words[j] = (int)from[j * LANES + get_sub_group_local_id()];
    return vload8(0, words);
}
inline void local_write4(local uint* to, uint4 value) {
    uint words[4];
    vstore4(value, 0, words);
    for (int j = 0; j < 4; j++) to[j * LANES + get_sub_group_local_id()] = words[j];
}
#define LOCAL_READ8(from) local_read8(from)
#define LOCAL_WRITE4(to, value) local_write4(to, value)
#endif

#ifdef CAPPED
// tanh, as exact as f32 is: the exponential's 1 cancels where x is small, so that a polynomial stands there.
inline float hyperbolic_tangent(float x) {
    const float size = fabs(x), square = x * x;
    float near = fma(square, -0.0066102277f, 0.021309389f);
    near = fma(square, near, -0.053909428f);
    near = fma(square, near, 0.13333113f);
    near = fma(square, near, -0.33333331f);
    return size < 0.55f ? fma(x * square, near, x) : copysign(1.0f - 2.0f / (EXP(2.0f * size) + 1.0f), x);
}
#endif

#if HEAD == 16
#define LOAD_VALUES load_8x2
#elif HEAD == 32
#define LOAD_VALUES load_16x2
#else
#define LOAD_VALUES load_32x2
#endif

// q, keys, values: see heads.h. out: f32 [rows][stride]. Row r stands at position start + r and sees positions from that less
// window - 1 on; with a canvas, every row sees from start - window + 1 to the last row. Scores are multiplied by `scale`; with
// CAPPED, they become softcap * tanh(score / softcap). largest: local f32 [TEAM][16 N]; weights: local f16 pairs
// [TEAM][N][2][128].
SPECIALISED void attend(const int N, global const uint* q, global const ushort* keys, global const ushort* values,
                        global float* out, int looks, int group, int stride, int start, int window, int capacity, int canvas,
                        float scale, float softcap, local float* largest, local uint* weights) {
    const int team = get_sub_group_id(), lane = get_sub_group_local_id();
    const int kv = get_group_id(1), tiles = query_tiles(looks), first_tile = get_group_id(0) * N;
    const int first_look = first_tile * LANES, last_look = min(first_look + N * LANES, looks) - 1;
    const int last_row = start + looks / group - 1;
    global const float* factors = (global const float*)(q + query_factors(looks, get_num_groups(1)));
    const Surface k = {keys + (size_t)kv * capacity * KEY, KEY, capacity, KEY};
    const Surface v = {values + (size_t)kv * capacity * HEAD, capacity, HEAD, capacity};
    uint tile[4]; // sixteens of looks; those past the last look as the last, and are not stored
    int at[4]; // the position that a look sees up to
    float top[4], total[4];
    float8 sums[16]; // [OWN / 8][N]
    UNROLL for (int n = 0; n < N; n++) {
        tile[n] = kv * tiles + min(first_tile + n, tiles - 1);
        at[n] = start + min(first_look + n * LANES + lane, looks - 1) / group;
        top[n] = -INFINITY;
        total[n] = 0.0f;
    }
    UNROLL for (int i = 0; i < OWN / 8 * N; i++) sums[i] = 0.0f;
    const int begin = max(0, start + (canvas ? 0 : first_look / group) - window + 1) / BLOCK * BLOCK;
    const int end = canvas ? last_row : start + last_look / group;
    int slot = begin % capacity;
#ifdef CAPPED
    const float inverse_cap = 1.0f / softcap;
#endif
#pragma unroll 1
    for (int block = begin; block <= end; block += BLOCK) {
        float8 scores[8]; // [2 of 8 positions][N of 16 looks]
        UNROLL for (int i = 0; i < 2 * N; i++) scores[i] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < KEY; d += 32) {
            ushort a[32];
            load_16x2(k, d, slot + team * 16, a);
            UNROLL for (int t = 0; t < 2; t++)
                UNROLL for (int n = 0; n < N; n++)
                    UNROLL for (int term = QUERY_TERMS - 1; term >= 0; term--) {
                        const int8 b = as_int8(intel_sub_group_block_read8(
                            q + tile[n] * QUERY_TILE + ((d / 16 + t) * QUERY_TERMS + term) * 128));
                        UNROLL for (int m = 0; m < 2; m++)
                            scores[m * N + n] = multiply_add(vload8(t * 2 + m, a), b, scores[m * N + n]);
                    }
        }
        UNROLL for (int n = 0; n < N; n++) {
            const float factor =
                as_float(intel_sub_group_block_read((global const uint*)factors + tile[n] * LANES)) * scale;
            const int until = canvas ? last_row : at[n], since = (canvas ? start : at[n]) - window + 1;
            float best = -INFINITY;
            UNROLL for (int m = 0; m < 2; m++) {
                float of[8];
                vstore8(scores[m * N + n], 0, of);
                UNROLL for (int r = 0; r < 8; r++) {
                    const int position = block + team * 16 + m * 8 + r;
                    of[r] *= factor;
#ifdef CAPPED
                    of[r] = softcap * hyperbolic_tangent(of[r] * inverse_cap);
#endif
                    if (position < since || position > until) of[r] = -INFINITY;
                    best = fmax(best, of[r]);
                }
                scores[m * N + n] = vload8(0, of);
            }
            largest[(team * N + n) * LANES + lane] = best;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float share[4];
        UNROLL for (int n = 0; n < N; n++) {
            float best = top[n];
#pragma unroll 4
            for (int i = 0; i < TEAM; i++) best = fmax(best, largest[(i * N + n) * LANES + lane]);
            const float base = best == -INFINITY ? 0.0f : best; // a look that has seen nothing yet
            share[n] = EXP(top[n] - base);
            top[n] = best;
            float sum = 0.0f;
            UNROLL for (int m = 0; m < 2; m++) {
                float of[8];
                uint first[4], rest[4];
                vstore8(scores[m * N + n], 0, of);
                UNROLL for (int r = 0; r < 8; r += 2) {
                    const float2 exact = (float2)(EXP(of[r] - base), EXP(of[r + 1] - base)) * WEIGHT_SCALE;
                    sum += exact.x;
                    sum += exact.y;
                    const half2 rounded = convert_half2(exact);
                    first[r / 2] = as_uint(rounded);
                    rest[r / 2] = as_uint(convert_half2(exact - convert_float2(rounded)));
                }
                local uint* to = weights + (team * N + n) * 256 + m * 64;
                LOCAL_WRITE4(to, vload4(0, first));
                LOCAL_WRITE4(to + 128, vload4(0, rest));
            }
            total[n] = fma(total[n], share[n], sum);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL for (int m = 0; m < OWN / 8; m++)
            UNROLL for (int n = 0; n < N; n++) sums[m * N + n] *= share[n];
#pragma unroll 1
        for (int i = 0; i < BLOCK; i += 32) {
            ushort a[64];
            LOAD_VALUES(v, slot + i, team * OWN, a);
            UNROLL for (int t = 0; t < 2; t++)
                UNROLL for (int n = 0; n < N; n++)
                    UNROLL for (int term = QUERY_TERMS - 1; term >= 0; term--) {
                        const int8 b = LOCAL_READ8(weights + ((i / 16 + t) * N + n) * 256 + term * 128);
                        UNROLL for (int m = 0; m < OWN / 8; m++)
                            sums[m * N + n] = multiply_add(vload8(t * (OWN / 8) + m, a), b, sums[m * N + n]);
                    }
        }
        slot += BLOCK;
        if (slot == capacity) slot = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int n = 0; n < N; n++) largest[(team * N + n) * LANES + lane] = total[n];
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int n = 0; n < N; n++) {
        const int look = first_look + n * LANES + lane;
        float all = 0.0f;
#pragma unroll 4
        for (int i = 0; i < TEAM; i++) all += largest[(i * N + n) * LANES + lane];
        if (look < looks) {
            global float* y = out + (size_t)(look / group) * stride + (kv * group + look % group) * HEAD + team * OWN;
            // A sum may be a zero of either sign, by blocks that the look sees nothing of.
            UNROLL for (int m = 0; m < OWN / 8; m++) vstore8(sums[m * N + n] * (1.0f / all) + 0.0f, m, y);
        }
    }
}

// Global size: [16 TEAM for each 16 N looks][key-value heads].
#define ATTEND(N)                                                                                                     \
    SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void attend_##N(                       \
        global const uint* q, global const ushort* keys, global const ushort* values, global float* out, int looks,   \
        int group, int stride, int start, int window, int capacity, int canvas, float scale, float softcap) {         \
        local float largest[TEAM * N * LANES];                                                                        \
        local uint weights[TEAM * N * 256];                                                                           \
        attend(N, q, keys, values, out, looks, group, stride, start, window, capacity, canvas, scale, softcap,        \
               largest, weights);                                                                                     \
    }
ATTEND(1)
ATTEND(2)
#if MOST_TILES > 2
ATTEND(4)
#endif
