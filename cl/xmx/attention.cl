// Attention, for heads of HEAD_SIZE values (64, 128, 256 or 512).
//
// A *look* is one query head of one row; those of one key-value head lie together, `group` for each row, so that what they
// share is read once. Scores are made as keys times queries, and sums as values times weights, both turned on their side: a
// lane has a look from the query to the result, and a row's largest score, sums and factors need nothing of other lanes.
//     q       f16 pairs [key-value heads][looks / 16][HEAD_SIZE / 16][8][16], the second operand of a product   pack_queries
//     keys    f16 [key-value heads][capacity][HEAD_SIZE]                                                        store_keys
//     values  f16 [key-value heads][HEAD_SIZE][capacity], so that a row of them is an operand, too
// capacity is a multiple of 32; positions that hold nothing yet must hold numbers.
//
// A work-group takes 64 looks through BLOCK keys at a time, from multiples of BLOCK on, whatever the look: sub-group s scores
// keys 16 s to 16 s + 15 of them and owns values 32 s to 32 s + 31 of the results. A block in which a look sees nothing
// changes none of its numbers.

#define TEAM (HEAD_SIZE / 32) // sub-groups
#define BLOCK (16 * TEAM)     // keys

#ifdef cl_intel_subgroup_local_block_io
#define LOCAL_READ8(from) as_int8(intel_sub_group_block_read8(from))
#define LOCAL_WRITE8(to, value) intel_sub_group_block_write8(to, value)
#else
inline int8 local_read8(local const uint* from) {
    int words[8];
    for (int j = 0; j < 8; j++) words[j] = (int)from[j * LANES + get_sub_group_local_id()];
    return vload8(0, words);
}
inline void local_write8(local uint* to, uint8 value) {
    uint words[8];
    vstore8(value, 0, words);
    for (int j = 0; j < 8; j++) to[j * LANES + get_sub_group_local_id()] = words[j];
}
#define LOCAL_READ8(from) local_read8(from)
#define LOCAL_WRITE8(to, value) local_write8(to, value)
#endif

inline int pair_of_halves(float a, float b) { return as_int((half2)(convert_half(a), convert_half(b))); }

// f32 rows of `heads` heads, `stride` values apart, times `scale`. Looks past the last row are zero. Global size: looks rounded
// up to 64 x HEAD_SIZE / 2 x key-value heads.
SUB_GROUP kernel void pack_queries(global const float* x, global uint* q, int looks, int padded_looks, int group, int stride,
                         float scale) {
    const int look = get_global_id(0), k = get_global_id(1), kv = get_global_id(2);
    uint pair = 0;
    if (look < looks) {
        const size_t at = (size_t)(look / group) * stride + (kv * group + look % group) * HEAD_SIZE + 2 * k;
        pair = (uint)pair_of_halves(x[at] * scale, x[at + 1] * scale);
    }
    q[((((size_t)kv * (padded_looks / 16) + look / 16) * (HEAD_SIZE / 16) + k / 8) * 8 + k % 8) * 16 + look % 16] = pair;
}

// Keys and values of new rows, f32, to positions from `position` on. Global size: HEAD_SIZE x rows x key-value heads.
SUB_GROUP kernel void store_keys(global const float* new_keys, global const float* new_values, global half* keys, global half* values,
                       int position, int capacity, int keys_stride, int values_stride) {
    const int i = get_global_id(0), row = get_global_id(1), kv = get_global_id(2);
    vstore_half(new_keys[(size_t)row * keys_stride + kv * HEAD_SIZE + i],
                ((size_t)kv * capacity + position + row) * HEAD_SIZE + i, keys);
    vstore_half(new_values[(size_t)row * values_stride + kv * HEAD_SIZE + i],
                ((size_t)kv * HEAD_SIZE + i) * capacity + position + row, values);
}

// out: f32 [rows][stride]. Row r stands at position `position` + r. It sees `count` positions, of them only those up to itself
// where `causal`, and only the last `window`, itself among them, where that is not 0. Global size: [16 TEAM for each 64
// looks][key-value heads].
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void
attend(global const uint* q, global const ushort* keys, global const ushort* values, global float* out, int looks,
       int padded_looks, int group, int count, int capacity, int position, int window, int causal, int stride) {
    local float largest[TEAM * 64];
    local uint weights[BLOCK / 16 * 4 * 128];
    const int team = get_sub_group_id(), lane = get_sub_group_local_id();
    const int first_look = get_group_id(0) * 64, kv = get_group_id(1);
    q += ((size_t)kv * (padded_looks / 16) + first_look / 16) * (HEAD_SIZE * 8);
    const Surface k = {keys + (size_t)kv * capacity * HEAD_SIZE, HEAD_SIZE, count, HEAD_SIZE};
    const Surface v = {values + (size_t)kv * capacity * HEAD_SIZE, capacity, HEAD_SIZE, capacity};
    int from[4], to[4];
    UNROLL for (int n = 0; n < 4; n++) {
        const int at = position + min(first_look + n * LANES + lane, looks - 1) / group;
        from[n] = window > 0 ? max(0, at + 1 - window) : 0;
        to[n] = causal ? min(at + 1, count) : count;
    }
    const int lowest = position + first_look / group, highest = position + min(first_look + 63, looks - 1) / group;
    const int begin = (window > 0 ? max(0, lowest + 1 - window) : 0) / BLOCK * BLOCK;
    const int end = causal ? min(highest + 1, count) : count;
    float8 sums[16];
    float top[4], total[4];
    UNROLL for (int i = 0; i < 16; i++) sums[i] = 0.0f;
    UNROLL for (int n = 0; n < 4; n++) {
        top[n] = -INFINITY;
        total[n] = 0.0f;
    }
#pragma unroll 1
    for (int block = begin; block < end; block += BLOCK) {
        const int key = block + team * 16;
        float8 scores[8]; // [8 keys][16 looks]
        UNROLL for (int i = 0; i < 8; i++) scores[i] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < HEAD_SIZE; d += 32) {
            ushort a[32];
            load_16x2(k, d, key, a);
            UNROLL for (int t = 0; t < 2; t++)
                UNROLL for (int n = 0; n < 4; n++) {
                    const int8 b = as_int8(intel_sub_group_block_read8(q + (size_t)n * (HEAD_SIZE * 8) + (d / 16 + t) * 128));
                    UNROLL for (int m = 0; m < 2; m++)
                        scores[m * 4 + n] = multiply_add(vload8(t * 2 + m, a), b, scores[m * 4 + n]);
                }
        }
        UNROLL for (int n = 0; n < 4; n++) {
            float best = -INFINITY;
            UNROLL for (int m = 0; m < 2; m++) {
                float of[8];
                vstore8(scores[m * 4 + n], 0, of);
                UNROLL for (int r = 0; r < 8; r++) {
                    const int at = key + m * 8 + r;
                    if (at < from[n] || at >= to[n]) of[r] = -INFINITY;
                    best = fmax(best, of[r]);
                }
                scores[m * 4 + n] = vload8(0, of);
            }
            largest[team * 64 + n * LANES + lane] = best;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float share[4];
        UNROLL for (int n = 0; n < 4; n++) {
            float best = top[n];
#pragma unroll 4
            for (int i = 0; i < TEAM; i++) best = fmax(best, largest[i * 64 + n * LANES + lane]);
            const float base = best == -INFINITY ? 0.0f : best; // a look that has seen nothing yet
            share[n] = EXP(top[n] - base);
            top[n] = best;
            float sum = 0.0f;
            int pairs[8];
            UNROLL for (int m = 0; m < 2; m++) {
                float of[8];
                vstore8(scores[m * 4 + n], 0, of);
                UNROLL for (int r = 0; r < 8; r += 2) {
                    const float a = EXP(of[r] - base), b = EXP(of[r + 1] - base);
                    sum += a;
                    sum += b;
                    pairs[m * 4 + r / 2] = pair_of_halves(a, b);
                }
            }
            total[n] = fma(total[n], share[n], sum);
            LOCAL_WRITE8(weights + (team * 4 + n) * 128, as_uint8(vload8(0, pairs)));
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL for (int m = 0; m < 4; m++)
            UNROLL for (int n = 0; n < 4; n++) sums[m * 4 + n] *= share[n];
#pragma unroll 1
        for (int i = 0; i < BLOCK; i += 32) {
            ushort a[64];
            load_32x2(v, block + i, team * 32, a);
            UNROLL for (int t = 0; t < 2; t++)
                UNROLL for (int n = 0; n < 4; n++) {
                    const int8 b = LOCAL_READ8(weights + ((i / 16 + t) * 4 + n) * 128);
                    UNROLL for (int m = 0; m < 4; m++)
                        sums[m * 4 + n] = multiply_add(vload8(t * 4 + m, a), b, sums[m * 4 + n]);
                }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int n = 0; n < 4; n++) largest[team * 64 + n * LANES + lane] = total[n];
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int n = 0; n < 4; n++) {
        const int look = first_look + n * LANES + lane;
        float all = 0.0f;
#pragma unroll 4
        for (int i = 0; i < TEAM; i++) all += largest[i * 64 + n * LANES + lane];
        if (look < looks) {
            global float* y = out + (size_t)(look / group) * stride + (kv * group + look % group) * HEAD_SIZE + team * 32;
            UNROLL for (int m = 0; m < 4; m++) vstore8(sums[m * 4 + n] * (1.0f / all), m, y);
        }
    }
}
