// What becomes of the heads of a row before attention: bias, norms and rotation. Queries go to where attention takes them from,
// each scaled by a power of two that brings its largest number to 2^14 or a little above, and cut into two terms; keys and values
// go into the cache. The rows stay as they are. A sub-group takes one query head of one row, or a key and its value.

#define HEAD_NORMS 1  // queries and keys are normed with their weights
#define VALUE_NORMS 2 // values are normed without one
#define BIAS 4        // bias is added to all heads first

#define PAIRS (HEAD / 2)       // pairs of neighbouring values of a head
#define EACH (KEY / 2 / LANES) // of them, or of the padding behind, those of a lane

inline float lanes_at(global const float* from) { return as_float(intel_sub_group_block_read((global const uint*)from)); }

// A head as it comes, and what is done to it before it turns.
typedef struct {
    global const float* values;
    global const float* bias;   // if flags say so
    global const float* weight; // likewise
    float scale;                // the inverse of its size
    int flags;
} Head;

// Values from `at` on, one a lane.
inline float plain_values(Head head, int at) {
    const float value = lanes_at(head.values + at);
    return head.flags & BIAS ? value + lanes_at(head.bias + at) : value;
}

inline float inverse_size(Head head, float epsilon) {
    float squares = 0.0f;
    for (int at = 0; at < HEAD; at += LANES) {
        const float value = plain_values(head, at);
        squares = fma(value, value, squares);
    }
    return 1.0f / sqrt(sub_group_reduce_add(squares) / (float)HEAD + epsilon);
}

// Puts a head into `line` for its turn, normed if flags say so.
inline void ready_to_turn(Head head, float epsilon, local float* line) {
    const int lane = get_sub_group_local_id();
    if (head.flags & HEAD_NORMS) head.scale = inverse_size(head, epsilon);
    for (int at = 0; at < HEAD; at += LANES) {
        float value = plain_values(head, at);
        if (head.flags & HEAD_NORMS) value = value * head.scale * lanes_at(head.weight + at);
        line[at + lane] = value;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Value i of the head in `line` after its turn. angles: [half_rotated][cos, sin] of the row; pairs are (i, i + gap), or
// neighbours where gap is 1.
inline float turned_value(local const float* line, int i, global const float* angles, int half_rotated, int gap) {
    const int second = gap == 1 ? i % 2 : i >= gap;
    const int pair = gap == 1 ? i / 2 : i - second * gap;
    const float value = line[i];
    if (pair >= half_rotated) return value;
    const float other = line[second ? i - gap : i + gap];
    const float2 turn = vload2(pair, angles);
    return second ? fma(other, turn.y, value * turn.x) : fma(value, turn.x, -(other * turn.y));
}

// As cl/attention.cl has it: what f16 cannot hold becomes its largest, and what is no number in f32 NaN.
#define LARGEST_HALF 65504.0f
inline float storable(float v) { return isfinite(v) ? clamp(v, -LARGEST_HALF, LARGEST_HALF) : NAN; }

inline void store_query(local const float* line, int lane, int kv, int look, int looks, int kv_heads, global const float* angles,
                        int half_rotated, int gap, global uint* queries) {
    const size_t tile = kv * query_tiles(looks) + look / LANES;
    float2 turned[EACH];
    float largest = 0.0f;
    UNROLL for (int t = 0; t < EACH; t++) {
        const int pair = t * LANES + lane;
        turned[t] = 0.0f;
        if (pair < PAIRS) {
            turned[t].x = turned_value(line, 2 * pair, angles, half_rotated, gap);
            turned[t].y = turned_value(line, 2 * pair + 1, angles, half_rotated, gap);
        }
        largest = fmax(largest, fmax(fabs(turned[t].x), fabs(turned[t].y)));
    }
    largest = sub_group_reduce_max(largest);
    const int exponent = clamp((int)(as_uint(largest) >> 23) - 127, -100, 127);
    const float up = as_float((14 - exponent + 127) << 23);
    UNROLL for (int t = 0; t < EACH; t++) {
        const int pair = t * LANES + lane;
        const float2 exact = turned[t] * up;
        const half2 first = convert_half2(exact);
        const half2 rest = convert_half2(exact - convert_float2(first));
        global uint* to = queries + tile * QUERY_TILE + pair / 8 * (QUERY_TERMS * 128) + pair % 8 * LANES + look % LANES;
        to[0] = as_uint(first);
        to[128] = as_uint(rest);
    }
    if (lane == 0)
        queries[query_factors(looks, kv_heads) + tile * LANES + look % LANES] = (uint)(exponent - 14 + 127) << 23;
}

inline void store_key_and_value(local const float* line, Head value, int lane, size_t kv, int slot, int capacity, global const float* angles,
                                int half_rotated, int gap, global uint* keys, global half* values) {
    int broken = 0;
    for (int at = 0; at < HEAD; at += LANES) {
        const float v = storable(plain_values(value, at) * value.scale);
        broken |= isnan(v);
        vstore_half(isnan(v) ? 0.0f : v, (kv * HEAD + at + lane) * capacity + slot, values);
    }
    broken = sub_group_reduce_max(broken);
    for (int pair = lane; pair < KEY / 2; pair += LANES) {
        float2 turned = 0.0f;
        if (broken) {
            turned = NAN;
        } else if (pair < PAIRS) {
            turned.x = storable(turned_value(line, 2 * pair, angles, half_rotated, gap));
            turned.y = storable(turned_value(line, 2 * pair + 1, angles, half_rotated, gap));
        }
        keys[(kv * capacity + slot) * (KEY / 2) + pair] = as_uint(convert_half2(turned));
    }
}

// qkv: f32 [rows][stride]: q heads, then k at k_at, v at v_at (k_at again: values are the raw keys). bias: f32 [stride], laid out
// as a row. angles: [positions][half_rotated][cos, sin]. Row r stands at position start + r. Global size: 16 x heads, those that
// keys and values have among them where they go into the cache x rows.
SUB_GROUP __attribute__((reqd_work_group_size(LANES, 1, 1))) kernel void
rotate_and_cache(global const float* qkv, global const float* angles, global const float* q_norm, global const float* k_norm,
                 global const float* bias, global uint* keys, global half* values, global uint* queries, int stride,
                 int q_heads, int k_at, int v_at, int start, int capacity, int group, int half_rotated, int gap, int norms,
                 float epsilon) {
    const int head = get_group_id(0), row = get_group_id(1), lane = get_sub_group_local_id();
    const int position = start + row, looks = (int)get_num_groups(1) * group;
    global const float* x = qkv + (size_t)row * stride;
    local float line[HEAD];
    angles += (size_t)position * 2 * half_rotated;
    if (head < q_heads) {
        const Head query = {x + head * HEAD, bias + head * HEAD, q_norm, 1.0f, norms};
        ready_to_turn(query, epsilon, line);
        store_query(line, lane, head / group, row * group + head % group, looks, q_heads / group, angles, half_rotated, gap,
                    queries);
        return;
    }
    const int kv = head - q_heads, key_at = k_at + kv * HEAD, value_at = v_at + kv * HEAD;
    const Head key = {x + key_at, bias + key_at, k_norm, 1.0f, norms};
    Head value = {x + value_at, bias + value_at, k_norm, 1.0f, norms};
    if (norms & VALUE_NORMS) value.scale = inverse_size(value, epsilon);
    ready_to_turn(key, epsilon, line);
    store_key_and_value(line, value, lane, kv, position % capacity, capacity, angles, half_rotated, gap, keys, values);
}
