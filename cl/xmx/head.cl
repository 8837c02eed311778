// The head: what is wanted of each row's distribution over the vocabulary, without ever holding a row of logits.
//
// A sub-group makes the logits of 32 tokens for 32 rows and turns them through local memory, 16 rows at a time, so that a lane
// has a row: all that is kept of a distribution is then kept lane by lane, in registers, over all the tokens that the sub-group
// sees. The vocabulary is cut into HEAD_SLICES, and a slice's pairs of tiles are dealt out to TEAM_PAIRS sub-groups. Neither
// number depends on the device or on the pass; merge_head puts the parts of a row together in their order.

#define TEAM_ROWS 4  // sub-groups of a work-group with rows of their own, 32 each
#define TEAM_PAIRS 8 // and with tokens of their own
#define TURN 33      // values from row to row in local memory, so that neither way two lanes meet in a bank

#define MOST_NOISE 23.0f   // no word makes more noise
#define LEAST_SHARE -42.0f // e^this of the largest weight is too little to change a sum, for any vocabulary
#define NO_SHARE -200.0f   // e^this is zero

// What is known of a row's distribution over some tokens; `Part` of cl/head.cl.
typedef struct {
    float peak;     // largest logit
    float total;    // sum of e^(logit - peak)
    float weighted; // sum of (logit - peak) e^(logit - peak)
    float best;     // largest logit that may be chosen, and its token
    int best_token;
    float drawn; // largest logit with noise, and its token
    int drawn_token;
    int bad; // 1 + the first token whose logit is not finite, or 0
} Part;

// cap * tanh(x / cap): exact enough, since what cancels near zero is small beside the temperature's unit.
inline float soft_cap(float x, float cap) { return cap > 0.0f ? cap - 2.0f * cap / (EXP(x * (2.0f / cap)) + 1.0f) : x; }

inline uint4 philox(uint4 c, uint2 key) {
    UNROLL for (int round = 0; round < 10; round++) {
        const uint high0 = mul_hi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        const uint high1 = mul_hi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = (uint4)(high1 ^ c.y ^ key.x, low1, high0 ^ c.w ^ key.y, low0);
        key += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

// Standard Gumbel noise of a word, as cl/include/philox.h defines it: -log(-log(1 - v)), v in (0, 1). The series keeps the
// bits of small v, of which the largest noise is made.
inline float gumbel(uint word) {
    const float v = fmin(((float)word + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
    const float small = v * fma(v, fma(v, fma(v, 0.25f, 1.0f / 3), 0.5f), 1.0f);
    return -LOG(v < 0x1p-6f ? small : -LOG(1.0f - v));
}

// A row's 32 products, from token `first` on, in local memory. Lanes have rows of their own, and nobody else's.
inline void take_logits(local float* logits, private Part* part, int first, int vocabulary, float factor, float cap,
                        float cooling, int row, int greedy, uint step, uint canvas, uint2 key, global const int* barred,
                        int barred_count) {
    float top = -INFINITY;
#pragma unroll 4
    for (int i = 0; i < 32; i++) {
        const float x = logits[i] * factor, y = soft_cap(x, cap) * cooling;
        const int meant = first + i < vocabulary;
        // The cap makes numbers of infinities: the product itself has to be finite, too.
        const int finite = isfinite(x) && isfinite(y);
        if (meant && !finite && part->bad == 0) part->bad = 1 + first + i;
        const float taken = meant && finite ? y : -INFINITY;
        logits[i] = taken;
        top = fmax(top, taken);
    }
    if (top > part->peak) {
        const float fall = fmax(part->peak - top, NO_SHARE), share = EXP(fall);
        part->weighted = share * fma(fall, part->total, part->weighted);
        part->total *= share;
        part->peak = top;
    }
#pragma unroll 4
    for (int i = 0; i < 32; i++) {
        const float fall = fmax(logits[i] - part->peak, NO_SHARE), weight = fall < LEAST_SHARE ? 0.0f : EXP(fall);
        part->total += weight;
        part->weighted = fma(fall, weight, part->weighted);
    }
    for (int b = 0; row == 0 && b < barred_count; b++) {
        const int at = barred[b] - first;
        if (at >= 0 && at < 32) logits[at] = -INFINITY;
    }
#pragma unroll 1
    for (int i = 0; i < 32; i += 4) {
        float four[4];
        UNROLL for (int j = 0; j < 4; j++) {
            four[j] = logits[i + j];
            if (four[j] > part->best) {
                part->best = four[j];
                part->best_token = first + i + j;
            }
        }
        // Noise is made only where it could win, which changes nothing.
        const float most = fmax(fmax(four[0], four[1]), fmax(four[2], four[3]));
        if (!greedy && most > -INFINITY && most + MOST_NOISE >= part->drawn) {
            const uint4 made = philox((uint4)((uint)(first + i) / 4, row, step, canvas), key);
            const uint words[4] = {made.x, made.y, made.z, made.w};
            UNROLL for (int j = 0; j < 4; j++) {
                const float noisy = four[j] + gumbel(words[j]);
                if (noisy > part->drawn) {
                    part->drawn = noisy;
                    part->drawn_token = first + i + j;
                }
            }
        }
    }
}

// parts: [HEAD_SLICES * TEAM_PAIRS][rows]. Global size: [32 sub-groups for each 128 rows][HEAD_SLICES].
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM_ROWS * TEAM_PAIRS, 1, 1))) kernel void
stream_head(float temperature, uint key0, uint key1, uint canvas, uint step, int greedy, int barred_count, int soft,
            global const uchar* table, global const ushort* x, global const float* sums, global const float* factors,
            global const int* barred, global Part* parts, float cap, int vocabulary, int spans, int tile_bytes, int rows,
            int x_stride, int sums_stride, int shared_scales, ulong plane) {
    local float turns[TEAM_ROWS * TEAM_PAIRS * LANES * TURN];
    const int team = get_sub_group_id(), lane = get_sub_group_local_id();
    const int row = (get_group_id(0) * TEAM_ROWS + team / TEAM_PAIRS) * 32, slice = get_group_id(1);
    const uint pairs = (vocabulary + 31) / 32;
    const uint from = pairs * slice / HEAD_SLICES, to = pairs * (slice + 1) / HEAD_SLICES;
    if (row >= rows) return;
    local float* turn = turns + team * (LANES * TURN);
    const Rows input = {{x, x_stride, rows, x_stride}, plane, sums, sums_stride};
    const float cooling = 1.0f / temperature;
    Part even = {-INFINITY, 0.0f, 0.0f, -INFINITY, 0, -INFINITY, 0, 0}, odd = even; // of rows 0 to 15, and 16 to 31
#pragma unroll 1
    for (uint pair = from + team % TEAM_PAIRS; pair < to; pair += TEAM_PAIRS) {
        float8 c0[4], c1[4];
        rows_through_pair(4, input, row, table + (size_t)pair * 2 * tile_bytes, tile_bytes, 0, spans, shared_scales, c0, c1);
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            UNROLL for (int m = 0; m < 2; m++) {
                float first[8], second[8];
                vstore8(c0[m], 0, first);
                vstore8(c1[m], 0, second);
                c0[m] = c0[2 + m];
                c1[m] = c1[2 + m];
                UNROLL for (int r = 0; r < 8; r++) {
                    turn[(m * 8 + r) * TURN + lane] = first[r];
                    turn[(m * 8 + r) * TURN + LANES + lane] = second[r];
                }
            }
            sub_group_barrier(CLK_LOCAL_MEM_FENCE);
            Part mine = h == 0 ? even : odd;
            const int at = row + h * LANES + lane;
            const float factor = as_float(intel_sub_group_block_read((global const uint*)(factors + row + h * LANES)));
            take_logits(turn + lane * TURN, &mine, pair * 32, vocabulary, factor, cap, cooling, at, greedy, step, canvas,
                        (uint2)(key0, key1), barred, barred_count);
            if (h == 0) even = mine;
            else odd = mine;
            sub_group_barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
    const size_t to_parts = (size_t)(slice * TEAM_PAIRS + team % TEAM_PAIRS) * rows + row + lane;
    if (row + lane < rows) parts[to_parts] = even;
    if (row + LANES + lane < rows) parts[to_parts + LANES] = odd;
}

// What the host gets to know of a row; HeadRow of ops/head.rs.
typedef struct {
    int argmax, sampled;
    float entropy, peak;
    int bad;
} Row;

// Puts the parts of a row together, in their order. One work-item a row.
SUB_GROUP __attribute__((reqd_work_group_size(LANES, 1, 1))) kernel void
merge_head(int greedy, int soft, global const Part* parts, global Row* results, int rows) {
    const int row = get_global_id(0);
    if (row >= rows) return;
    Part all = parts[row];
    for (int p = 1; p < HEAD_SLICES * TEAM_PAIRS; p++) {
        const Part part = parts[(size_t)p * rows + row];
        all.peak = fmax(all.peak, part.peak);
        // Tokens of one slice are dealt out, so that of equals a later part may have the earlier one.
        if (part.best > all.best || (part.best == all.best && part.best_token < all.best_token))
            all.best = part.best, all.best_token = part.best_token;
        if (part.drawn > all.drawn || (part.drawn == all.drawn && part.drawn_token < all.drawn_token))
            all.drawn = part.drawn, all.drawn_token = part.drawn_token;
        if (part.bad != 0 && (all.bad == 0 || part.bad < all.bad)) all.bad = part.bad;
    }
    all.total = all.weighted = 0.0f;
    for (int p = 0; p < HEAD_SLICES * TEAM_PAIRS; p++) {
        const Part part = parts[(size_t)p * rows + row];
        const float fall = part.peak == -INFINITY ? NO_SHARE : fmax(part.peak - all.peak, NO_SHARE), share = EXP(fall);
        all.total = fma(part.total, share, all.total);
        all.weighted = fma(fma(fall, part.total, part.weighted), share, all.weighted);
    }
    Row result;
    result.argmax = all.best_token;
    result.sampled = greedy ? all.best_token : all.drawn_token;
    result.entropy = fmax(log(all.total) - all.weighted / all.total, 0.0f);
    result.peak = all.peak;
    result.bad = all.bad;
    results[row] = result;
}
