// Rotary embedding, the key-value cache and attention. HEAD is the head size, a multiple of 16.
//
// Cache of one layer, f16 or (CACHE_F32) f32: keys [kv head][slot / 16][HEAD][16], so that 16 scores are one vector and
// need no reduction across lanes; values [kv head][slot][HEAD]. Position p lies in slot p % capacity: where a layer sees a
// window only, positions that nobody will look at again are written over. Capacity is a multiple of TILE.

#define TILE 64 // positions per step of the running softmax; tiles start at multiples of it whatever the row

inline float inverse_rms_head(global const float* x, float epsilon) {
    float16 squares = 0.0f;
    for (int i = 0; i < HEAD; i += 16) squares = fma(vload16(0, x + i), vload16(0, x + i), squares);
    return 1.0f / sqrt(sum_lanes(squares) / (float)HEAD + epsilon);
}

inline void norm_head(global float* x, global const float* weight, float epsilon) {
    float16 r = inverse_rms_head(x, epsilon);
    for (int i = 0; i < HEAD; i += 16) vstore16(vload16(0, x + i) * r * vload16(0, weight + i), 0, x + i);
}

// Rotates pairs (i * step, i * step + gap): step 1, gap half the values that pair up for NeoX order; step 2, gap 1 for
// interleaved.
inline void rotate_head(global float* x, global const float* angles, int half_rotated, int gap) {
    const int step = gap == 1 ? 2 : 1;
    for (int i = 0; i < half_rotated; i++) {
        const float c = angles[2 * i], s = angles[2 * i + 1];
        const float a = x[i * step], b = x[i * step + gap];
        x[i * step] = fma(a, c, -(b * s));
        x[i * step + gap] = fma(a, s, b * c);
    }
}

#ifdef CACHE_F32
typedef float cached;
#define CACHED16(i, p) vload16(i, p)
#define PUT_CACHED16(v, i, p) vstore16(v, i, p)
#define PUT_CACHED(v, i, p) (p)[i] = v
#else
typedef half cached;
// Numbers that f16 cannot hold become its largest: an infinity times a weight of zero would spread as NaN. What is no
// number in f32, infinities included, becomes NaN: a clamp alone would make numbers of damage, and text of those.
#define LARGEST_HALF 65504.0f
inline float storable(float v) { return isfinite(v) ? clamp(v, -LARGEST_HALF, LARGEST_HALF) : NAN; }
inline float16 storable16(float16 v) {
    return select((float16)(NAN), clamp(v, -LARGEST_HALF, LARGEST_HALF), isfinite(v));
}
#define CACHED16(i, p) vload_half16(i, p)
#define PUT_CACHED16(v, i, p) vstore_half16(storable16(v), i, p)
#define PUT_CACHED(v, i, p) vstore_half(storable(v), i, p)
#endif

#define HEAD_NORMS 1  // queries and keys are normed with their weights
#define VALUE_NORMS 2 // values are normed without one
#define BIAS 4        // bias is added to all heads first

inline void add_bias(global float* x, global const float* bias) {
    for (int i = 0; i < HEAD; i += 16) vstore16(vload16(0, x + i) + vload16(0, bias + i), 0, x + i);
}

// For each row: norms and rotates its query and key heads, leaves queries in place, writes keys and values into the cache
// at position start + row. qkv: f32 [rows][stride]: q heads, then k at k_at, v at v_at (k_at again: values are the raw
// keys). bias: f32 [stride], laid out as a row. angles: [positions][half_rotated][cos, sin]; gap: see rotate_head. One
// work-item a row. With no key-value heads, the cache stays as it is.
EXPLICIT_VECTOR kernel void rotate_and_cache(global float* qkv, global const float* angles, global const float* q_norm,
                                             global const float* k_norm, global const float* bias,
                                             global cached* keys, global cached* values, int stride, int q_heads,
                                             int kv_heads, int k_at, int v_at, int start, int capacity,
                                             int half_rotated, int gap, int norms, float epsilon) {
    const int row = get_global_id(0);
    const int position = start + row, slot = position % capacity;
    global float* x = qkv + (size_t)row * stride;
    global const float* at = angles + (size_t)position * 2 * half_rotated;
    for (int h = 0; h < q_heads; h++) {
        if (norms & BIAS) add_bias(x + h * HEAD, bias + h * HEAD);
        if (norms & HEAD_NORMS) norm_head(x + h * HEAD, q_norm, epsilon);
        rotate_head(x + h * HEAD, at, half_rotated, gap);
    }
    for (int h = 0; h < kv_heads; h++) {
        if (norms & BIAS) {
            add_bias(x + k_at + h * HEAD, bias + k_at + h * HEAD);
            if (v_at != k_at) add_bias(x + v_at + h * HEAD, bias + v_at + h * HEAD);
        }
        global const float* v = x + v_at + h * HEAD;
        float16 scale = 1.0f;
        if (norms & VALUE_NORMS) scale = inverse_rms_head(v, epsilon);
        global cached* value = values + ((size_t)h * capacity + slot) * HEAD;
        for (int i = 0; i < HEAD; i += 16) PUT_CACHED16(vload16(0, v + i) * scale, 0, value + i);
        // After the values, which may be the same numbers.
        global float* k = x + k_at + h * HEAD;
        if (norms & HEAD_NORMS) norm_head(k, k_norm, epsilon);
        rotate_head(k, at, half_rotated, gap);
        global cached* key = keys + (size_t)h * capacity * HEAD + (size_t)(slot / 16) * HEAD * 16 + slot % 16;
        for (int i = 0; i < HEAD; i++) PUT_CACHED(k[i], i * 16, key);
    }
}

// R query rows of one head against the cache. Row r, at position p, sees positions from p - window + 1 to p; with a canvas
// of that many rows at `anchor`, every row sees from anchor - window + 1 to the canvas's end. A row past the last is
// computed as the last and not stored. Tiles and order of addition are the same for every R;
// a tile that a row does not see leaves its sums as they are, bit for bit.
#define ATTEND(R, BLOCKS)                                                                                             \
    inline void attend_##R(global const float* q, int stride, global const cached* keys, global const cached* values,      \
                           global float* out, int out_stride, int count, int start, int window, int capacity,         \
                                   int anchor, int canvas, float scale, float softcap) {                              \
        float16 acc[R][HEAD / 16];                                                                                    \
        float best[R], total[R], share[R];                                                                            \
        float weight[R][TILE];                                                                                        \
        for (int r = 0; r < R; r++) {                                                                                 \
            best[r] = -INFINITY;                                                                                      \
            total[r] = 0.0f;                                                                                          \
            for (int i = 0; i < HEAD / 16; i++) acc[r][i] = 0.0f;                                                     \
        }                                                                                                             \
        const int last = canvas ? anchor + canvas - 1 : start + count - 1;                                            \
        const int from = max(0, (canvas ? anchor : start) - window + 1) / TILE * TILE;                                \
        for (int tile = from; tile <= last; tile += TILE) {                                                           \
            for (int block = 0; block < TILE / 16; block += BLOCKS) {                                                 \
                float16 dots[R][BLOCKS], odd[R][BLOCKS];                                                              \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                         \
                    _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) dots[r][b] = odd[r][b] = 0.0f;                 \
                global const cached* k = keys + (size_t)(tile % capacity / 16 + block) * HEAD * 16;                   \
                for (int i = 0; i < HEAD; i += 2) {                                                                   \
                    float16 key[2][BLOCKS];                                                                           \
                    _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) {                                              \
                        key[0][b] = CACHED16(b * HEAD + i, k);                                                        \
                        key[1][b] = CACHED16(b * HEAD + i + 1, k);                                                    \
                    }                                                                                                 \
                    _Pragma("unroll") for (int r = 0; r < R; r++) {                                                   \
                        global const float* at = q + (size_t)min(r, count - 1) * stride + i;                          \
                        float16 v = at[0], w = at[1];                                                                 \
                        _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) {                                          \
                            dots[r][b] = fma(key[0][b], v, dots[r][b]);                                               \
                            odd[r][b] = fma(key[1][b], w, odd[r][b]);                                                 \
                        }                                                                                             \
                    }                                                                                                 \
                }                                                                                                     \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                         \
                    _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) dots[r][b] += odd[r][b];                       \
                _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) {                                                  \
                    int16 position = tile + (block + b) * 16 +                                                        \
                                     (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                   \
                    for (int r = 0; r < R; r++) {                                                                     \
                        const int p = start + min(r, count - 1);                                                      \
                        int16 seen = position <= (int16)(canvas ? last : p) &                                         \
                                     position > (int16)((canvas ? anchor : p) - window);                              \
                        float16 score = dots[r][b] * scale;                                                           \
                        if (softcap > 0.0f) score = softcap * tanh(score / softcap);                                  \
                        vstore16(select((float16)(-INFINITY), score, seen), block + b, weight[r]);                    \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
            for (int r = 0; r < R; r++) {                                                                             \
                float16 top = vload16(0, weight[r]);                                                                  \
                for (int b = 1; b < TILE / 16; b++) top = fmax(top, vload16(b, weight[r]));                           \
                const float m = fmax(best[r], max_lanes(top));                                                        \
                if (m == -INFINITY) { /* nothing seen yet */                                                          \
                    share[r] = 1.0f;                                                                                  \
                    for (int b = 0; b < TILE / 16; b++) vstore16((float16)0.0f, b, weight[r]);                        \
                    continue;                                                                                         \
                }                                                                                                     \
                share[r] = exp((float16)(best[r] - m)).s0;                                                            \
                best[r] = m;                                                                                          \
                float16 sum = 0.0f;                                                                                   \
                for (int b = 0; b < TILE / 16; b++) {                                                                 \
                    float16 e = exp(vload16(b, weight[r]) - m);                                                       \
                    sum += e;                                                                                         \
                    vstore16(e, b, weight[r]);                                                                        \
                }                                                                                                     \
                total[r] = fma(total[r], share[r], sum_lanes(sum));                                                   \
            }                                                                                                         \
            const int seen = min(TILE, last + 1 - tile);                                                              \
            _Pragma("unroll") for (int i = 0; i < HEAD / 16; i += WIDE) {                                             \
                float16 part[R][WIDE];                                                                                \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                         \
                    _Pragma("unroll") for (int c = 0; c < WIDE; c++) part[r][c] = acc[r][i + c] * share[r];           \
                global const cached* v = values + (size_t)(tile % capacity) * HEAD + i * 16;                          \
                for (int p = 0; p < seen; p++) {                                                                      \
                    float16 value[WIDE];                                                                              \
                    _Pragma("unroll") for (int c = 0; c < WIDE; c++) value[c] = CACHED16(c, v + p * HEAD);        \
                    _Pragma("unroll") for (int r = 0; r < R; r++)                                                     \
                        _Pragma("unroll") for (int c = 0; c < WIDE; c++)                                              \
                            part[r][c] = fma(value[c], (float16)weight[r][p], part[r][c]);                            \
                }                                                                                                     \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                         \
                    _Pragma("unroll") for (int c = 0; c < WIDE; c++) acc[r][i + c] = part[r][c];                      \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < count; r++)                                                                               \
            for (int i = 0; i < HEAD / 16; i++) vstore16(acc[r][i] / total[r], i, out + (size_t)r * out_stride);      \
    }

#define WIDE ((HEAD / 16) % 2 == 0 ? 2 : 1) // 16-value columns of the result made at once
ATTEND(8, 1)
ATTEND(1, 4)

// q: f32 [rows][stride] with q heads first; out: f32 [rows][out_stride]. window: positions a row sees, itself included.
// canvas: 0, or rows of the canvas, all of which see each other. softcap: scores become softcap * tanh(score / softcap); 0
// leaves them.
// Global size: q heads x row blocks of 8, or x 1 for one row.
EXPLICIT_VECTOR kernel void attention(global const float* q, global const cached* keys, global const cached* values,
                                      global float* out, int stride, int out_stride, int rows, int start, int window,
                                      int capacity, int group, int canvas, float scale, float softcap) {
    const int head = get_global_id(0);
    const int row = get_global_id(1) * 8;
    const size_t cache = (size_t)(head / group) * capacity * HEAD;
    global const float* query = q + (size_t)row * stride + head * HEAD;
    global float* result = out + (size_t)row * out_stride + head * HEAD;
    if (rows == 1)
        attend_1(query, stride, keys + cache, values + cache, result, out_stride, 1, start, window,
                 capacity, start, canvas, scale, softcap);
    else
        attend_8(query, stride, keys + cache, values + cache, result, out_stride, min(8, rows - row), start + row, window,
                 capacity, start, canvas, scale, softcap);
}
