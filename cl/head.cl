// The two ends of a diffusion model that share one table of weights: embedding rows, and the head.
//
// The head never keeps a row's logits. It goes through the vocabulary by pairs of tiles (32 tokens), for a block of
// rows at a time, and keeps for each row what is wanted of the distribution: its largest logit, sums for the softmax and
// the entropy, the best token with and without noise, and the mean of the table's rows under the distribution. The
// vocabulary is cut into HEAD_SLICES, which depend on its size alone; merge_head puts a row's slices together in their
// order. What a row gets depends on that row alone.

#define LEAST_SHARE -42.0f // e^this of the largest weight is too little to change a sum, for any vocabulary
#define NO_SHARE -200.0f   // e^this is zero

// Rows ids[i] of the table times `scale`: out f32 [rows][stride], zero past the table's padded columns. An id past
// the table reads its last row. One work-item a row.
KERNEL embed(ITEM global const uchar* table, global const int* ids, global float* out, int tokens, int groups,
             int stride, float scale) {
    const int row = AT(0);
    const int id = clamp(ids[row], 0, tokens - 1);
    const int lane = id % 16;
    global const uchar* tile = table + (size_t)(id / 16) * tile_bytes(groups);
    global float* y = out + (size_t)row * stride;
    for (int g = 0; g < groups; g++) {
        float16 codes[GROUP], scales[GROUP / SCALE_GROUP], offsets[GROUP / SCALE_GROUP];
        load_group(tile, 0, 1, g, codes, scales, offsets);
        #pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float weights[16];
            vstore16(weight_of(codes[i], scales[i / SCALE_GROUP], offsets[i / SCALE_GROUP]), 0, weights);
            y[g * GROUP + i] = weights[lane] * scale;
        }
    }
    for (int i = groups * GROUP; i < stride; i++) y[i] = 0.0f;
}

inline float16 soft_cap(float16 x, float cap) { return cap > 0.0f ? cap * tanh(x / cap) : x; }

// Caps logits [rows][stride] in place. Global size: vectors of 16 x rows.
KERNEL cap_logits(ITEM global float* logits, int stride, float cap) {
    global float* x = logits + (size_t)AT(1) * stride;
    vstore16(soft_cap(vload16(AT(0), x), cap), AT(0), x);
}

#define LANES ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))

// What is known of a row's distribution over some tokens; HeadPart of ops/head.rs.
typedef struct {
    float peak;     // largest logit
    float total;    // sum of e^(logit - peak)
    float weighted; // sum of (logit - peak) e^(logit - peak)
    float best;     // largest logit that may be chosen, and its token
    int best_token;
    float drawn; // largest logit with noise, and its token
    int drawn_token;
    int bad; // 1 + the first token whose logit is not a number or not finite, or 0
} Part;

// First token of 32 whose value is `top`.
inline int token_of(float16 first, float16 second, float top, int from) {
    float values[32];
    vstore16(first, 0, values);
    vstore16(second, 1, values);
    int i = 0;
    while (i < 31 && values[i] != top) i++;
    return from + i;
}

// A row's 32 logits from token `first` on. Leaves weights e^(logit - peak) in w[0], w[1] and in *share what sums so far
// are worth. Returns whether these tokens have any weight.
inline int take_logits(float16* w, float* share, Part* part, int first, int vocabulary, float cap, float temperature,
                       int row, int greedy, uint step, uint canvas, uint key0, uint key1, global const int* barred,
                       int barred_count) {
    const int16 meant0 = LANES + first < (int16)vocabulary, meant1 = LANES + (first + 16) < (int16)vocabulary;
    float16 a = soft_cap(w[0], cap) / temperature, b = soft_cap(w[1], cap) / temperature;
    // The cap makes numbers of infinities: the product itself has to be finite, too.
    const int16 finite0 = isfinite(w[0]) & isfinite(a), finite1 = isfinite(w[1]) & isfinite(b);
    if (any(meant0 & ~finite0) || any(meant1 & ~finite1)) {
        if (part->bad == 0) {
            float16 is0 = select((float16)0.0f, (float16)1.0f, meant0 & ~finite0);
            float16 is1 = select((float16)0.0f, (float16)1.0f, meant1 & ~finite1);
            part->bad = 1 + token_of(is0, is1, 1.0f, first);
        }
    }
    a = select((float16)(-INFINITY), a, meant0 & finite0);
    b = select((float16)(-INFINITY), b, meant1 & finite1);
    const float top = max_lanes(fmax(a, b));
    *share = 1.0f;
    if (top == -INFINITY) return 0;

    float16 c = a, d = b; // what may be chosen
    for (int i = 0; row == 0 && i < barred_count; i++) {
        c = select(c, (float16)(-INFINITY), LANES + first == (int16)barred[i]);
        d = select(d, (float16)(-INFINITY), LANES + (first + 16) == (int16)barred[i]);
    }
    const float best = max_lanes(fmax(c, d));
    if (best > part->best) {
        part->best = best;
        part->best_token = token_of(c, d, best, first);
    }
    if (!greedy && best + MOST_NOISE >= part->drawn && best > -INFINITY) {
        // Noise is made only where it could win, which changes nothing.
        uint16 words[2];
        words_32(first, row, step, canvas, key0, key1, words);
        if (best + most_noise(words) >= part->drawn) {
            c += gumbel(words[0]);
            d += gumbel(words[1]);
            const float drawn = max_lanes(fmax(c, d));
            if (drawn > part->drawn) {
                part->drawn = drawn;
                part->drawn_token = token_of(c, d, drawn, first);
            }
        }
    }

    const float peak = part->peak;
    if (top > peak) {
        const float fall = fmax(peak - top, NO_SHARE);
        *share = exp((float16)fall).s0;
        part->weighted = *share * fma(fall, part->total, part->weighted);
        part->total *= *share;
        part->peak = top;
    } else if (top - peak < LEAST_SHARE) {
        return 0;
    }
    a = fmax(a - part->peak, (float16)NO_SHARE);
    b = fmax(b - part->peak, (float16)NO_SHARE);
    w[0] = flush_tiny(exp(a)); // a denormal costs a hundred times as much to multiply, and says nothing
    w[1] = flush_tiny(exp(b));
    part->total += sum_lanes(w[0] + w[1]);
    part->weighted += sum_lanes(fma(a, w[0], b * w[1]));
    return 1;
}

// A block of rows against a slice of the vocabulary. x, sums: packed rows, as for matmul. parts: [HEAD_SLICES][rows].
// softs: f32 [HEAD_SLICES][rows][groups][32] in all, rows padded to 16; a row block's part of a slice lies as [groups][rows of
// the block][32].
// Global size: row blocks x HEAD_SLICES.
KERNEL stream_head(ITEM float temperature, uint key0, uint key1, uint canvas, uint step, int greedy, int barred_count,
                   int soft, global const uchar* table, global const float* x, global const float* sums,
                   global const int* barred, global Part* parts, global float* softs, float cap, int vocabulary,
                   int groups, int packed_groups, int rows) {
    const int start = AT(0) * ROW_BLOCK;
    const int count = min(ROW_BLOCK, rows - start);
    const int slice = AT(1);
    const int pairs = (vocabulary + 31) / 32;
    const int from = (int)((long)pairs * slice / HEAD_SLICES), to = (int)((long)pairs * (slice + 1) / HEAD_SLICES);
    const size_t step_bytes = tile_bytes(groups);
    const int padded_rows = (count + 15) / 16 * 16;
    global float* means = softs + ((size_t)slice * ((rows + 15) / 16 * 16) + start) * groups * GROUP;
    if (soft)
        for (int i = 0; i < 2 * groups * padded_rows; i++) vstore16((float16)0.0f, i, means);
    Part state[ROW_BLOCK];
    for (int r = 0; r < count; r++) {
        state[r].peak = state[r].best = state[r].drawn = -INFINITY;
        state[r].total = state[r].weighted = 0.0f;
        state[r].best_token = state[r].drawn_token = state[r].bad = 0;
    }
    float16 logits[2 * ROW_BLOCK];
#ifdef SOFT_BY_TILES
    float16 held_weights[SOFT_PAIRS * 2 * ROW_BLOCK];
    float held_shares[SOFT_PAIRS * ROW_BLOCK];
    int held = 0;
#endif
    for (int pair = from; pair < to; pair++) {
        global const uchar* tiles = table + (size_t)pair * 2 * step_bytes;
        rows_through_pair(tiles, groups, packed_groups, x + (size_t)start * packed_groups * GROUP_FLOATS,
                          sums + (size_t)start * packed_groups * 3, count, logits);
#ifdef SOFT_BY_TILES
        float16* weights = held_weights + held * 2 * ROW_BLOCK;
        for (int r = 0; r < padded_rows; r++) {
            float16 w[2] = {logits[2 * r], logits[2 * r + 1]};
            float* share = &held_shares[held * ROW_BLOCK + r];
            *share = 1.0f;
            const int some = r < count && take_logits(w, share, &state[r], pair * 32, vocabulary, cap, temperature, start + r,
                                                      greedy, step, canvas, key0, key1, barred, barred_count);
            weights[2 * r] = some ? w[0] : (float16)0.0f;
            weights[2 * r + 1] = some ? w[1] : (float16)0.0f;
        }
        if (!soft || (++held < SOFT_PAIRS && pair + 1 < to)) continue;
        add_means(table + (size_t)(pair + 1 - held) * 2 * step_bytes, step_bytes, groups, held,
                  min(32, vocabulary - pair * 32), held_weights, held_shares, padded_rows, means);
        held = 0;
    }
    for (int g = 0; soft && g < groups; g++) turn_means(means + (size_t)g * padded_rows * GROUP, padded_rows / 16);
#else
        // Rows for which these tokens have weight, moved together.
        int active[ROW_BLOCK], some = 0;
        float shares[ROW_BLOCK];
        for (int r = 0; r < count; r++) {
            float16 w[2] = {logits[2 * r], logits[2 * r + 1]};
            if (take_logits(w, &shares[some], &state[r], pair * 32, vocabulary, cap, temperature, start + r, greedy, step,
                            canvas, key0, key1, barred, barred_count)) {
                logits[2 * some] = w[0];
                logits[2 * some + 1] = w[1];
                active[some++] = r;
            }
        }
        if (soft)
            add_means(tiles, step_bytes, groups, min(32, vocabulary - pair * 32), logits, shares, active, some, padded_rows,
                      means);
    }
#endif
    for (int r = 0; r < count; r++) parts[(size_t)slice * rows + start + r] = state[r];
}

// What the host gets to know of a row; HeadRow of ops/head.rs.
typedef struct {
    int argmax, sampled;
    float entropy, peak;
    int bad;
} Row;

// Puts the slices of a row together, in their order. out: f32 [rows][stride] the mean of the table's rows times `scale`,
// zero past the table's columns. One work-item a row.
KERNEL merge_head(ITEM int greedy, int soft, global const Part* parts, global const float* softs, global Row* results,
                  global float* out, int groups, int rows, int stride, float scale) {
    const int row = AT(0);
    const int start = row / ROW_BLOCK * ROW_BLOCK;
    const int padded_rows = (min(ROW_BLOCK, rows - start) + 15) / 16 * 16;
    Part all = parts[row];
    for (int s = 1; s < HEAD_SLICES; s++) {
        global const Part* part = parts + (size_t)s * rows + row;
        all.peak = fmax(all.peak, part->peak);
        if (part->best > all.best) all.best = part->best, all.best_token = part->best_token;
        if (part->drawn > all.drawn) all.drawn = part->drawn, all.drawn_token = part->drawn_token;
        if (all.bad == 0) all.bad = part->bad;
    }
    float shares[HEAD_SLICES];
    all.total = all.weighted = 0.0f;
    for (int s = 0; s < HEAD_SLICES; s++) {
        global const Part* part = parts + (size_t)s * rows + row;
        const float fall = part->peak == -INFINITY ? NO_SHARE : fmax(part->peak - all.peak, NO_SHARE);
        shares[s] = exp((float16)fall).s0;
        all.total = fma(part->total, shares[s], all.total);
        all.weighted = fma(fma(fall, part->total, part->weighted), shares[s], all.weighted);
    }
    Row result;
    result.argmax = all.best_token;
    result.sampled = greedy ? all.best_token : all.drawn_token;
    result.entropy = fmax(log((float16)all.total).s0 - all.weighted / all.total, 0.0f);
    result.peak = all.peak;
    result.bad = all.bad;
    results[row] = result;
    if (!soft) return;

    const float factor = all.total > 0.0f ? scale / all.total : 0.0f;
    for (int s = 0; s < HEAD_SLICES; s++) shares[s] *= factor;
    global float* y = out + (size_t)row * stride;
    for (int g = 0; g < groups; g++) {
        float16 a = 0.0f, b = 0.0f;
        for (int s = 0; s < HEAD_SLICES; s++) {
            global const float* mean =
                softs + ((size_t)s * ((rows + 15) / 16 * 16) + start) * groups * GROUP +
                ((size_t)g * padded_rows + row - start) * GROUP;
            a = fma(vload16(0, mean), (float16)shares[s], a);
            b = fma(vload16(1, mean), (float16)shares[s], b);
        }
        vstore16(a, 2 * g, y);
        vstore16(b, 2 * g + 1, y);
    }
    for (int i = 2 * groups; i < stride / 16; i++) vstore16((float16)0.0f, i, y);
}

// The plain way, in two passes over whole logits.

// Logits [rows][stride] become their softmax over the vocabulary, in place, and zero up to a multiple of 16. One
// work-item a row.
KERNEL softmax_rows(ITEM global float* logits, int vocabulary, int stride) {
    global float* x = logits + (size_t)AT(0) * stride;
    const int vectors = (vocabulary + 15) / 16;
    float16 top = -INFINITY, total = 0.0f;
    for (int i = 0; i < vectors; i++)
        top = fmax(top, select((float16)(-INFINITY), vload16(i, x), LANES + i * 16 < (int16)vocabulary));
    const float peak = max_lanes(top);
    for (int i = 0; i < vectors; i++) {
        float16 e = select((float16)0.0f, exp(vload16(i, x) - peak), LANES + i * 16 < (int16)vocabulary);
        total += e;
        vstore16(e, i, x);
    }
    const float sum = sum_lanes(total);
    for (int i = 0; i < vectors; i++) vstore16(vload16(i, x) / sum, i, x);
}

// Means of the table's rows under probabilities [rows][from_stride], times `scale`: out f32 [rows][stride], zero past
// the table's columns. Global size: stride / 32 x blocks of MEAN_ROWS rows.
#define MEAN_ROWS 4
KERNEL mean_rows(ITEM global const uchar* table, global const float* probabilities, global float* out, int vocabulary,
                 int groups, int rows, int from_stride, int stride, float scale) {
    const int g = AT(0);
    const int start = AT(1) * MEAN_ROWS;
    const int count = min(MEAN_ROWS, rows - start);
    float16 sums[MEAN_ROWS][GROUP];
    for (int r = 0; r < MEAN_ROWS; r++)
        for (int i = 0; i < GROUP; i++) sums[r][i] = 0.0f;
    for (int t = 0; g < groups && t * 16 < vocabulary; t++) {
        float16 codes[GROUP], scales[GROUP / SCALE_GROUP], offsets[GROUP / SCALE_GROUP];
        load_group(table + (size_t)t * tile_bytes(groups), 0, 1, g, codes, scales, offsets);
        const int16 meant = LANES + t * 16 < (int16)vocabulary;
        for (int i = 0; i < GROUP; i++) {
            float16 w = weight_of(codes[i], scales[i / SCALE_GROUP], offsets[i / SCALE_GROUP]);
            codes[i] = select((float16)0.0f, w, meant);
        }
        for (int r = 0; r < count; r++) {
            float16 p = vload16(t, probabilities + (size_t)(start + r) * from_stride);
            for (int i = 0; i < GROUP; i++) sums[r][i] = fma(p, codes[i], sums[r][i]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < GROUP; i++)
            out[(size_t)(start + r) * stride + g * GROUP + i] = sum_lanes(sums[r][i]) * scale;
}
