// Rotary embedding, the key-value cache and attention. HEAD is the size of a query or key head, VALUE that of a value
// head, multiples of 16.
//
// Cache of one layer, f16 or (CACHE_F32) f32: keys [kv head][slot / 16][HEAD][16], so that 16 scores are one vector and
// need no reduction across lanes; values [kv head][slot][VALUE], or (VALUES_IN_KEYS) the first VALUE values of each
// key. Position p lies in slot p % capacity: where a layer sees a window only, positions that nobody will look at again
// are written over. Capacity is a multiple of TILE.

#define TILE 64 // positions per step of the running softmax; tiles start at multiples of it whatever the row

inline float inverse_rms_head(global const float* x, int n, float epsilon) {
    float16 squares = 0.0f;
    for (int i = 0; i < n; i += 16) squares = fma(vload16(0, x + i), vload16(0, x + i), squares);
    return 1.0f / sqrt(sum_lanes(squares) / (float)n + epsilon);
}

inline void norm_head(global float* x, int n, global const float* weight, float epsilon) {
    float16 r = inverse_rms_head(x, n, epsilon);
    for (int i = 0; i < n; i += 16) vstore16(vload16(0, x + i) * r * vload16(0, weight + i), 0, x + i);
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

inline void add_bias(global float* x, int n, global const float* bias) {
    for (int i = 0; i < n; i += 16) vstore16(vload16(0, x + i) + vload16(0, bias + i), 0, x + i);
}

inline void put_key(global const float* k, global cached* keys, int slot) {
    global cached* key = keys + (size_t)(slot / 16) * HEAD * 16 + slot % 16;
    for (int i = 0; i < HEAD; i++) PUT_CACHED(k[i], i * 16, key);
}

#ifndef VALUES_IN_KEYS
// For each row: norms and rotates its query and key heads, leaves queries in place, writes keys and values into the
// cache at position start + row. qkv: f32 [rows][stride]: q heads, then k at k_at, v at v_at (k_at again: values are
// the raw keys). bias: f32 [stride], laid out as a row. angles: [positions][half_rotated][cos, sin]; gap: see
// rotate_head. One work-item a row. With no key-value heads, the cache stays as it is.
KERNEL rotate_and_cache(ITEM global float* qkv, global const float* angles, global const float* q_norm,
                        global const float* k_norm, global const float* bias, global cached* keys,
                        global cached* values, int stride, int q_heads, int kv_heads, int k_at, int v_at, int start,
                        int capacity, int half_rotated, int gap, int norms, float epsilon) {
    const int row = AT(0);
    const int position = start + row, slot = position % capacity;
    global float* x = qkv + (size_t)row * stride;
    global const float* at = angles + (size_t)position * 2 * half_rotated;
    for (int h = 0; h < q_heads; h++) {
        if (norms & BIAS) add_bias(x + h * HEAD, HEAD, bias + h * HEAD);
        if (norms & HEAD_NORMS) norm_head(x + h * HEAD, HEAD, q_norm, epsilon);
        rotate_head(x + h * HEAD, at, half_rotated, gap);
    }
    for (int h = 0; h < kv_heads; h++) {
        if (norms & BIAS) {
            add_bias(x + k_at + h * HEAD, HEAD, bias + k_at + h * HEAD);
            if (v_at != k_at) add_bias(x + v_at + h * VALUE, VALUE, bias + v_at + h * VALUE);
        }
        global const float* v = x + v_at + h * VALUE;
        float16 scale = 1.0f;
        if (norms & VALUE_NORMS) scale = inverse_rms_head(v, VALUE, epsilon);
        global cached* value = values + ((size_t)h * capacity + slot) * VALUE;
        for (int i = 0; i < VALUE; i += 16) PUT_CACHED16(vload16(0, v + i) * scale, 0, value + i);
        // After the values, which may be the same numbers.
        global float* k = x + k_at + h * HEAD;
        if (norms & HEAD_NORMS) norm_head(k, HEAD, k_norm, epsilon);
        rotate_head(k, at, half_rotated, gap);
        put_key(k, keys + (size_t)h * capacity * HEAD, slot);
    }
}

#else
// The same for heads over one latent (multi-head latent attention): a key is VALUE values of a latent, which are the
// value, and HEAD - VALUE values that turn. rows: f32 [rows][stride]: q heads of HEAD values, of which the latent part
// is there, then the key at k_at. turning: f32 [rows][turning_stride], whose heads, turning_step apart, hold the values
// of the q heads that turn from turning_at on. Rotates those into the q heads; norms the key's latent, rotates the rest
// and caches it.
KERNEL rotate_and_cache_latent(ITEM global float* rows, global const float* turning, global const float* angles,
                               global const float* k_norm, global cached* keys, int stride, int turning_stride,
                               int turning_step, int turning_at, int q_heads, int k_at, int start, int capacity,
                               int gap, float epsilon) {
    const int row = AT(0);
    const int position = start + row;
    global float* x = rows + (size_t)row * stride;
    global const float* from = turning + (size_t)row * turning_stride + turning_at;
    global const float* at = angles + (size_t)position * (HEAD - VALUE);
    for (int h = 0; h < q_heads; h++) {
        global float* q = x + h * HEAD + VALUE;
        for (int i = 0; i < HEAD - VALUE; i += 16) vstore16(vload16(0, from + h * turning_step + i), 0, q + i);
        rotate_head(q, at, (HEAD - VALUE) / 2, gap);
    }
    global float* k = x + k_at;
    norm_head(k, VALUE, k_norm, epsilon);
    rotate_head(k + VALUE, at, (HEAD - VALUE) / 2, gap);
    put_key(k, keys, position % capacity);
}
#endif

#define SEEN (tile + p >= since[r] && tile + p <= until[r])

// Adds positions begin to end of the tile to the sums of the looks for which SEES holds.
#define ADD_VALUES(R, N, begin, end, SEES)                                                                             \
    for (int p = begin; p < end; p++) {                                                                                \
        float16 value[N];                                                                                              \
        _Pragma("unroll") for (int c = 0; c < N; c++) value[c] = VALUE_AT(c, p);                                       \
        _Pragma("unroll") for (int r = 0; r < R; r++)                                                                  \
            if (SEES)                                                                                                  \
                _Pragma("unroll") for (int c = 0; c < N; c++)                                                          \
                    part[r][c] = fma(value[c], (float16)weight[r][p], part[r][c]);                                     \
    }

// Asks for the values of a tile and the keys of the next one, a share of both with each column of keys that is multiplied:
// they come from far away, and are too short for a processor to see them coming. part, each: which share, and its vectors.
#if defined(HOST_PREFETCH) && !defined(VALUES_IN_KEYS)
#define FETCH_FROM                                                                                                     \
    global const cached* soon_values = values + (size_t)(tile % capacity) * VALUE;                                     \
    global const cached* soon_keys = keys + (size_t)((tile + (tile + TILE <= last ? TILE : 0)) % capacity) * HEAD;
#define FETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 3)
#define FETCH_SHARE(part, each)                                                                                        \
    _Pragma("unroll") for (int line = 0; line < (each); line++) {                                                      \
        const int at = ((part) * (each) + line) * 32;                                                                  \
        FETCH(soon_values + at * VALUE / HEAD);                                                                        \
        FETCH(soon_keys + at);                                                                                         \
    }
#else
#define FETCH_FROM
#define FETCH_SHARE(part, each)
#endif

// R looks at the cache of one key-value head; a look is one query head of one row: look l is head l % heads of row l /
// heads. Row r, at position p, sees positions from p - window + 1 to p; with a canvas of that many rows at `anchor`,
// every row sees from anchor - window + 1 to the canvas's end. A look past the last is computed as the last and not
// stored. Tiles and order of addition are the same for every R. A position that a row does not see leaves its sums as
// they are, whatever lies there: rows behind a wrong guess may leave values that are no numbers, and those times a
// weight of zero would be none either. So what all looks see is added without asking, and the rest to those that see
// it. What differs is what stays in registers: BLOCKS times 16 positions are scored at once, even and odd values of a
// head in PASSES passes, and up to WIDE times 16 values of the result made at once.
#define ATTEND(R, BLOCKS, PASSES, WIDE)                                                                                \
    inline void attend_##R(global const float* q, int stride, global const cached* keys, global const cached* values,  \
                           global float* out, int out_stride, int count, int heads, int start, int window,             \
                           int capacity, int anchor, int canvas, float scale, float softcap) {                         \
        enum { COLUMNS = VALUE / 16, AT_ONCE = DIVISOR(COLUMNS, WIDE) };                                               \
        float16 acc[R][COLUMNS];                                                                                       \
        float best[R], total[R], share[R];                                                                             \
        float weight[R][TILE];                                                                                         \
        global const float* query[R];                                                                                  \
        int since[R], until[R]; /* the positions it sees */                                                            \
        for (int r = 0; r < R; r++) {                                                                                  \
            const int look = min(r, count - 1);                                                                        \
            query[r] = q + (size_t)(look / heads) * stride + look % heads * HEAD;                                      \
            until[r] = canvas ? anchor + canvas - 1 : start + look / heads;                                            \
            since[r] = (canvas ? anchor : until[r]) - window + 1;                                                      \
            best[r] = -INFINITY;                                                                                       \
            total[r] = 0.0f;                                                                                           \
            for (int i = 0; i < COLUMNS; i++) acc[r][i] = 0.0f;                                                        \
        }                                                                                                              \
        const int last = until[R - 1];                                                                                 \
        const int from = max(0, since[0]) / TILE * TILE;                                                               \
        for (int tile = from; tile <= last; tile += TILE) {                                                            \
            FETCH_FROM                                                                                                 \
            for (int block = 0; block < TILE / 16; block += BLOCKS) {                                                  \
                global const cached* k = keys + (size_t)(tile % capacity / 16 + block) * HEAD * 16;                    \
                float16 dots[2][R][BLOCKS];                                                                            \
                _Pragma("unroll") for (int pass = 0; pass < PASSES; pass++) {                                          \
                    float16 sums[2 / PASSES][R][BLOCKS];                                                               \
                    _Pragma("unroll") for (int odd = 0; odd < 2 / PASSES; odd++)                                       \
                        _Pragma("unroll") for (int r = 0; r < R; r++)                                                  \
                            _Pragma("unroll") for (int b = 0; b < BLOCKS; b++) sums[odd][r][b] = 0.0f;                 \
                    for (int i = pass; i < HEAD; i += 2) {                                                             \
                        FETCH_SHARE((block / BLOCKS * PASSES + pass) * (HEAD / 2) + i / 2, BLOCKS / PASSES)            \
                        _Pragma("unroll") for (int odd = 0; odd < 2 / PASSES; odd++) {                                 \
                            float16 key[BLOCKS];                                                                       \
                            _Pragma("unroll") for (int b = 0; b < BLOCKS; b++)                                         \
                                key[b] = CACHED16(b * HEAD + i + odd, k);                                              \
                            _Pragma("unroll") for (int r = 0; r < R; r++) {                                            \
                                float16 v = query[r][i + odd];                                                         \
                                _Pragma("unroll") for (int b = 0; b < BLOCKS; b++)                                     \
                                    sums[odd][r][b] = fma(key[b], v, sums[odd][r][b]);                                 \
                            }                                                                                          \
                        }                                                                                              \
                    }                                                                                                  \
                    _Pragma("unroll") for (int odd = 0; odd < 2 / PASSES; odd++)                                       \
                        _Pragma("unroll") for (int r = 0; r < R; r++)                                                  \
                            _Pragma("unroll") for (int b = 0; b < BLOCKS; b++)                                         \
                                dots[pass + odd][r][b] = sums[odd][r][b];                                              \
                }                                                                                                      \
                for (int b = 0; b < BLOCKS; b++) {                                                                     \
                    int16 position = tile + (block + b) * 16 +                                                         \
                                     (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                    \
                    for (int r = 0; r < R; r++) {                                                                      \
                        int16 seen = position >= (int16)since[r] & position <= (int16)until[r];                        \
                        float16 score = (dots[0][r][b] + dots[1][r][b]) * scale;                                       \
                        if (softcap > 0.0f) score = softcap * tanh(score / softcap);                                   \
                        vstore16(select((float16)(-INFINITY), score, seen), block + b, weight[r]);                     \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            for (int r = 0; r < R; r++) {                                                                              \
                float16 top = vload16(0, weight[r]);                                                                   \
                for (int b = 1; b < TILE / 16; b++) top = fmax(top, vload16(b, weight[r]));                            \
                const float m = fmax(best[r], max_lanes(top));                                                         \
                if (m == -INFINITY) { /* nothing seen yet */                                                           \
                    share[r] = 1.0f;                                                                                   \
                    for (int b = 0; b < TILE / 16; b++) vstore16((float16)0.0f, b, weight[r]);                         \
                    continue;                                                                                          \
                }                                                                                                      \
                share[r] = exp((float16)(best[r] - m)).s0;                                                             \
                best[r] = m;                                                                                           \
                float16 sum = 0.0f;                                                                                    \
                for (int b = 0; b < TILE / 16; b++) {                                                                  \
                    /* Weights too small to count are zero: denormals cost a hundred times as much. */                 \
                    float16 e = flush_tiny(exp(vload16(b, weight[r]) - m));                                            \
                    sum += e;                                                                                          \
                    vstore16(e, b, weight[r]);                                                                         \
                }                                                                                                      \
                total[r] = fma(total[r], share[r], sum_lanes(sum));                                                    \
            }                                                                                                          \
            const int begin = max(0, since[0] - tile), end = min(TILE, last + 1 - tile);                               \
            /* From `all` to `some`, all looks see everything. */                                                      \
            const int all = clamp(since[R - 1] - tile, begin, end), some = clamp(until[0] + 1 - tile, all, end);       \
            for (int i = 0; i < COLUMNS; i += AT_ONCE) {                                                               \
                VALUES_OF_TILE(AT_ONCE)                                                                                \
                float16 part[R][AT_ONCE];                                                                              \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                          \
                    _Pragma("unroll") for (int c = 0; c < AT_ONCE; c++) part[r][c] = acc[r][i + c] * share[r];         \
                ADD_VALUES(R, AT_ONCE, begin, all, SEEN)                                                               \
                ADD_VALUES(R, AT_ONCE, all, some, true)                                                                \
                ADD_VALUES(R, AT_ONCE, some, end, SEEN)                                                                \
                _Pragma("unroll") for (int r = 0; r < R; r++)                                                          \
                    _Pragma("unroll") for (int c = 0; c < AT_ONCE; c++) acc[r][i + c] = part[r][c];                    \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < count; r++)                                                                                \
            for (int i = 0; i < COLUMNS; i++)                                                                          \
                vstore16(acc[r][i] / total[r] + 0.0f, i, out + (size_t)(r / heads) * out_stride + r % heads * VALUE);  \
    }

// The largest of 8, 4, 2 and 1 that is no more than most and divides n; n itself where that is small enough.
#define DIVISOR(n, most)                                                                                               \
    ((n) <= (most)                         ? (n)                                                                       \
     : (n) % 8 == 0 && (most) >= 8         ? 8                                                                         \
     : (n) % 4 == 0 && (most) >= 4         ? 4                                                                         \
     : (n) % 2 == 0 && (most) >= 2         ? 2                                                                         \
                                           : 1)

#ifdef VALUES_IN_KEYS // the first VALUE values of each key: turned back from columns of 16 positions to rows
#define VALUES_OF_TILE(N)                                                                                              \
    float16 turned[N][TILE];                                                                                           \
    for (int c = 0; c < N; c++)                                                                                        \
        for (int b = 0; b < TILE / 16; b++) {                                                                          \
            global const cached* from = keys + ((size_t)(tile % capacity / 16 + b) * HEAD + (i + c) * 16) * 16;        \
            float16 square[16];                                                                                        \
            for (int j = 0; j < 16; j++) square[j] = CACHED16(j, from);                                                \
            transpose(square, 1, &turned[c][b * 16], 1);                                                               \
        }
#define VALUE_AT(c, p) turned[c][p]
#else
#define VALUES_OF_TILE(N) global const cached* v = values + (size_t)(tile % capacity) * VALUE + i * 16;
#define VALUE_AT(c, p) CACHED16(c, v + p * VALUE)
#endif

ATTEND(1, 4, 1, 8)
ATTEND(2, 4, 1, 4)
ATTEND(3, 4, 2, 4)
ATTEND(4, 4, 2, 4)
ATTEND(6, 2, 2, 2)
ATTEND(8, 2, 2, 2)

// q: f32 [rows][stride] with q heads first; out: f32 [rows][out_stride]. window: positions a row sees, itself included.
// group: query heads of a key-value head. canvas: 0, or rows of the canvas, all of which see each other. softcap:
// scores become softcap * tanh(score / softcap); 0 leaves them. A work-item takes up to `heads` heads of a group and
// `rows_each` rows, no more than 8 looks; global size: key-value heads times parts of a group x parts of the rows. packed,
// sums: where results are packed as well, as pack_rows would (rows.cl); packed_groups: groups of such a row, 0 for nowhere.
KERNEL attention(ITEM global const float* q, global const cached* keys, global const cached* values, global float* out,
                 int stride, int out_stride, int rows, int start, int window, int capacity, int group, int canvas,
                 float scale, float softcap, int heads, int rows_each, global float* packed, global float* sums,
                 int packed_groups) {
    const int parts = (group + heads - 1) / heads, kv_head = AT(0) / parts;
    const int in_group = AT(0) % parts * heads, row = AT(1) * rows_each;
    const int head = kv_head * group + in_group;
    const int head_count = min(heads, group - in_group), count = head_count * min(rows_each, rows - row);
    global const cached* k = keys + (size_t)kv_head * capacity * HEAD;
    global const cached* v = values + (size_t)kv_head * capacity * VALUE;
    global const float* query = q + (size_t)row * stride + head * HEAD;
    global float* result = out + (size_t)row * out_stride + head * VALUE;
#define LOOKS(R)                                                                                                       \
    attend_##R(query, stride, k, v, result, out_stride, count, head_count, start + row, window, capacity, start,       \
               canvas, scale, softcap)
    switch (count) {
    case 1: LOOKS(1); break;
    case 2: LOOKS(2); break;
    case 3: LOOKS(3); break;
    case 4: LOOKS(4); break;
    case 5:
    case 6: LOOKS(6); break;
    default: LOOKS(8);
    }
#if VALUE % GROUP == 0
    if (packed_groups == 0) return;
    for (int r = 0; r < count; r++) {
        const int at = row + r / head_count, start = at / ROW_BLOCK * ROW_BLOCK;
        global const float* made = result + (size_t)(r / head_count) * out_stride + r % head_count * VALUE;
        for (int g = 0; g < VALUE / GROUP; g++)
            pack_group(flush_tiny(vload16(2 * g, made)), flush_tiny(vload16(2 * g + 1, made)),
                       packed + (size_t)start * packed_groups * GROUP_FLOATS, sums + (size_t)start * packed_groups * 3,
                       (head + r % head_count) * (VALUE / GROUP) + g, packed_groups, at - start,
                       min(ROW_BLOCK, rows - start));
    }
#endif
}
