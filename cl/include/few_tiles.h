// A few rows through tiles by the processor's matrix unit, as few_vectors.h does by vectors: the sums of tiles.h, in their
// order. Registers have as many rows as there are: no others are loaded or stored. A product takes as long for one row as
// for sixteen, and so does unpacking weights.

#define FEW_ROWS 16 // the most rows of `narrow`: of one register

#define ONE_IN_PLACE 0

#define FEW_ROWS_ON(rows) few_rows_on(rows)
#define FEW_ROWS_OFF(rows) TILES_OFF

// Registers 0 to 4 of `rows` rows, for sums and activations; 5 to 7 of 16, for weights.
inline void few_rows_on(int rows) {
    uint config[16] __attribute__((aligned(64))) = {1, 0, 0, 0, 0x00400040, 0x00400040, 0x00400040, 0x00400040, 0, 0, 0, 0};
    config[12] = (uint)rows * 0x01010101u;
    config[13] = (uint)rows | 0x10101000u;
    __asm__ volatile("ldtilecfg (%0)" ::"r"((ulong)config) : "memory");
}

// As in few_vectors.h, but of h [groups][low, middle, high term][rows][32] bf16.
inline void pack_few(local const float* line, local float* h, local float* row_sums, int groups, int r, int rows) {
    for (int g = 0; g < groups; g++) {
        const float16 a = vload16(2 * g, line), b = vload16(2 * g + 1, line);
        few_sums(a, b, row_sums, g, r, rows);
        pack_terms(a, b, AS_GLOBAL(h), g, r, rows);
    }
}

// Vectors of a group of two tiles, and of what lies between their weights of one half and one term.
#define UNPACKED (2 * HALVES * WEIGHT_TERMS * 16)
#define BETWEEN (HALVES * WEIGHT_TERMS * 16)
// Spans that are unpacked before their turn: what has just been stored is not yet where registers are loaded from.
#define EARLY 1

// Unpacks the span of groups from `from` on, and asks for codes that come later.
inline void unpack_span(global const uchar* tiles, global const uchar* next, int groups, int from, float16* unpacked) {
    const size_t step = tile_bytes(groups);
    for (int g = from; g < min(from + SPAN, groups); g++, unpacked += UNPACKED) {
        const size_t ahead = (size_t)g * STREAM_BYTES + AHEAD;
        global const uchar* soon = ahead < step ? tiles + ahead : next + (ahead - step);
        fetch(soon, STREAM_BYTES);
        fetch(soon + step, STREAM_BYTES);
        unpack_tiles(group_codes(tiles, g), unpacked);
        unpack_tiles(group_codes(tiles + step, g), unpacked + BETWEEN);
    }
}

// Adds what a span's products left in dots[rows][2].
inline void add_few(const float16* dots, const float16* scales, local const float* sums, int rows, float16* results) {
    for (int r = 0; r < rows; r++) {
        const float sum = SUM_OF_SPAN(sums, rows, r);
        results[2 * r] = add_dots(results[2 * r], dots[2 * r], sum, scales[0], scales[2]);
        results[2 * r + 1] = add_dots(results[2 * r + 1], dots[2 * r + 1], sum, scales[1], scales[3]);
    }
}

// results[rows][2] = what two tiles make of all rows. next: the tiles that come after these in memory, or these again.
inline void rows_of_pair(global const uchar* tiles, global const uchar* next, int groups, int rows, local const float* h,
                         local const float* row_sums, float16* results) {
    float16 unpacked[EARLY + 1][SPAN * UNPACKED] __attribute__((aligned(64)));
    // As in rows_through_pair, a pass's products wait while the unit works on the next one.
    float16 dots[2][32] __attribute__((aligned(64))), scales[2][4];
    const size_t step = tile_bytes(groups), term = (size_t)rows * 64;
    local const float* old_sums = row_sums;
    int flip = 0, turn = 0;
    for (int i = 0; i < 2 * rows; i++) results[i] = 0.0f;
    for (int e = 0; e < EARLY; e++) unpack_span(tiles, next, groups, e * SPAN, unpacked[e]);
    for (int from = 0; from < groups; from += SPAN) {
        const int span = min(SPAN, groups - from);
        const float16* now = unpacked[turn];
        unpack_span(tiles, next, groups, from + EARLY * SPAN, unpacked[turn == 0 ? EARLY : turn - 1]);
        turn = turn == EARLY ? 0 : turn + 1;
        for (int half_group = 0; half_group < HALVES; half_group++) {
            const int s = from * HALVES + half_group;
            const float16* weights = now + half_group * WEIGHT_TERMS * 16;
            TILE_ZERO(0);
            TILE_ZERO(1);
            // The order of rows_through_pair.
            #pragma unroll
            for (int part = 0; part < 3; part++)
                for (int k = 0; k < span; k++) {
                    TILE_LOAD(4, (local const uchar*)h + ((size_t)(from + k) * 3 + part) * term, 64);
                    #pragma unroll
                    for (int w = 0; w < WEIGHT_TERMS; w++) {
                        if (SPAN * WEIGHT_TERMS > 1 || part == 0) {
                            TILE_LOAD(6, weights + k * UNPACKED + w * 16, 64);
                            TILE_LOAD(7, weights + k * UNPACKED + BETWEEN + w * 16, 64);
                        }
                        TILE_DOT(0, 4, 6);
                        TILE_DOT(1, 4, 7);
                    }
                }
            if (s > 0) add_few(dots[flip], scales[flip], old_sums, rows, results);
            flip = 1 - flip;
            TILE_STORE(0, dots[flip], 128);
            TILE_STORE(1, dots[flip] + 1, 128);
            #pragma unroll
            for (int t = 0; t < 2; t++) {
                scales[flip][t] = group_scale(tiles + t * step, s);
                scales[flip][2 + t] = group_offset(tiles + t * step, s);
            }
            old_sums = row_sums + (size_t)s * rows;
        }
    }
    add_few(dots[flip], scales[flip], old_sums, rows, results);
}
