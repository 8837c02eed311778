// A few rows through tiles by integers (integer.h): what `narrow` does with rows that it has prepared.

#ifdef INTEGER_CODES

#define FEW_ROWS 16
#define ONE_IN_PLACE 0

#define FEW_ROWS_ON(rows) if ((rows) > 1) tiles_on(rows)
#define FEW_ROWS_OFF(rows) if ((rows) > 1) TILES_OFF

// As in few_vectors.h, but of h [groups][DIGITS][rows][32 bytes], then f32 [groups][rows], what a digit's unit is worth.
inline void pack_few(local const float* line, local float* h, local float* row_sums, int groups, int r, int rows) {
    global uchar* digits = (global uchar*)AS_GLOBAL(h) + (size_t)r * GROUP;
    local float* units = h + (size_t)groups * rows * DIGITS * 8 + r;
    for (int g = 0; g < groups; g++) {
        const float16 a = vload16(2 * g, line), b = vload16(2 * g + 1, line);
        few_sums(a, b, row_sums, g, r, rows);
        units[g * rows] = pack_digits(a, b, digits + (size_t)g * DIGITS * rows * GROUP, (size_t)rows * GROUP);
    }
}

// A scale group's sums of integers of a single row by one tile: to each lane's the products of its four codes, unsigned, and
// four bytes of a digit, signed (VNNI). One statement, since what comes out of one is stored each time. digits: of its first
// column.
#define FOUR_COLUMNS(j)                                                                                               \
    "vpdpbusd 4*" #j "(%[digits])%{1to16%}, %[w" #j "], %[low]\n\t"                                                   \
    "vpdpbusd 32+4*" #j "(%[digits])%{1to16%}, %[w" #j "], %[middle]\n\t"                                             \
    "vpdpbusd 64+4*" #j "(%[digits])%{1to16%}, %[w" #j "], %[high]\n\t"
#define FROM_ZERO(x) "vpxord %[" #x "], %[" #x "], %[" #x "]\n\t"
#define WORD(j) [w##j] "X"(words[j])
#if HALVES == 2
#define ALL_COLUMNS FOUR_COLUMNS(0) FOUR_COLUMNS(1) FOUR_COLUMNS(2) FOUR_COLUMNS(3)
#define ALL_WORDS WORD(0), WORD(1), WORD(2), WORD(3)
#else
#define ALL_COLUMNS                                                                                                   \
    FOUR_COLUMNS(0) FOUR_COLUMNS(1) FOUR_COLUMNS(2) FOUR_COLUMNS(3)                                                   \
    FOUR_COLUMNS(4) FOUR_COLUMNS(5) FOUR_COLUMNS(6) FOUR_COLUMNS(7)
#define ALL_WORDS WORD(0), WORD(1), WORD(2), WORD(3), WORD(4), WORD(5), WORD(6), WORD(7)
#endif
inline void dots_of_row(const float16* words, global const uchar* digits, float16* dots) {
    __asm__ volatile(FROM_ZERO(low) FROM_ZERO(middle) FROM_ZERO(high) ALL_COLUMNS
                     : [low] "=&X"(dots[0]), [middle] "=&X"(dots[1]), [high] "=&X"(dots[2])
                     : ALL_WORDS, [digits] "r"((ulong)digits)
                     : "memory");
}

// A single row through a pair of tiles by vectors: a register of the matrix unit takes longer to store. next: the tiles that
// come after these in memory, or these again.
inline void rows_of_pair(global const uchar* tiles, global const uchar* next, int groups, int rows,
                         local const float* h, local const float* row_sums, float16* results) {
    const size_t step = tile_bytes(groups);
    global const uchar* digits = (global const uchar*)AS_GLOBAL(h);
    local const float* units = h + (size_t)groups * DIGITS * 8;
    results[0] = results[1] = 0.0f;
    for (int g = 0; g < groups; g++) {
        const size_t ahead = (size_t)g * STREAM_BYTES + AHEAD;
        global const uchar* soon = ahead < step ? tiles + ahead : next + (ahead - step);
        #pragma unroll
        for (int t = 0; t < 2; t++) fetch(soon + t * step, STREAM_BYTES);
        #pragma unroll
        for (int s = 0; s < HALVES; s++) {
            const int scale = g * HALVES + s;
            global const uchar* columns = digits + (size_t)g * DIGITS * GROUP + s * SCALE_GROUP;
#ifdef CODEBOOK
            // As unsigned numbers, 128 more than they are; and what that is too much.
            float16 more[WORDS], excess[DIGITS];
            #pragma unroll
            for (int j = 0; j < WORDS; j++) more[j] = as_float16((uint16)0x80808080);
            dots_of_row(more, columns, excess);
#endif
            #pragma unroll
            for (int t = 0; t < 2; t++) {
                float16 dots[DIGITS], words[WORDS];
                code_words(group_codes(tiles + t * step, g), s, words);
#ifdef CODEBOOK
                #pragma unroll
                for (int j = 0; j < WORDS; j++) words[j] = as_float16(as_uint16(words[j]) ^ (uint16)0x80808080);
#endif
                dots_of_row(words, columns, dots);
#ifdef CODEBOOK
                #pragma unroll
                for (int k = 0; k < DIGITS; k++) dots[k] = as_float16(as_int16(dots[k]) - as_int16(excess[k]));
#endif
                results[t] = add_group(results[t], join_digits(dots[0], dots[1], dots[2], units[g]), row_sums[scale],
                                       group_scale(tiles + t * step, scale), group_offset(tiles + t * step, scale));
            }
        }
    }
}

// The group of a pair of tiles that is next.
typedef struct {
    global const uchar* tiles;
    int g;
} Place;

inline void go_on(Place* place, int groups, size_t step) {
    if (++place->g == groups) {
        place->g = 0;
        place->tiles += 2 * step;
    }
}

// Several rows through the pairs of tiles from `pair` to `last` by the matrix unit, one after the other without a break, and
// what becomes of the results, as in matmul.cl.
#define PAIRS_AT_ONCE
inline void rows_of_pairs(global const uchar* weights, int pair, int last, int groups, int rows, local const float* h,
                          local const float* row_sums, int finish, global const float* other, global float* y, int y_at,
                          int y_stride) {
    float16 words[RING][HALVES][2 * WORDS] __attribute__((aligned(64)));
    float16 dots[RING][HALVES][2 * MOST_SUMS] __attribute__((aligned(64)));
    float16 results[2 * FEW_ROWS];
    const size_t step = tile_bytes(groups), part_step = (size_t)FIRST_ROWS(rows) * GROUP;
    global const uchar* digits = (global const uchar*)AS_GLOBAL(h);
    global const float *units = AS_GLOBAL(h) + (size_t)groups * rows * DIGITS * 8, *sums = AS_GLOBAL(row_sums);
    global const uchar* end = weights + (size_t)last * 2 * step;
    Place now = {weights + (size_t)pair * 2 * step, 0}, soon = now, old = now;
    const int turns = (last - pair) * groups;
    for (int i = 0; i < 2 * rows; i++) results[i] = 0.0f;
    for (int turn = -EARLY; turn < turns + LATE; turn++) {
        if (turn + EARLY < turns) {
            const size_t ahead = (size_t)soon.g * STREAM_BYTES + AHEAD;
            global const uchar* from = soon.tiles + (ahead < step ? ahead : ahead + step);
            if (from < end) {
                fetch(from, STREAM_BYTES);
                fetch(from + step, STREAM_BYTES);
            }
            unpack_pair(soon.tiles, step, soon.g, words[(turn + EARLY) % RING]);
            go_on(&soon, groups, step);
        }
        if (turn >= 0 && turn < turns) {
            #pragma unroll
            for (int s = 0; s < HALVES; s++)
                dots_by_unit(digits + (size_t)now.g * DIGITS * rows * GROUP + s * SCALE_GROUP, part_step, rows,
                             words[turn % RING][s], dots[turn % RING][s]);
            go_on(&now, groups, step);
        }
        if (turn >= LATE) {
            #pragma unroll
            for (int s = 0; s < HALVES; s++) {
                const int scale = old.g * HALVES + s;
                add_dots(dots[(turn - LATE) % RING][s], old.tiles, step, scale, units + (size_t)old.g * rows,
                         sums + (size_t)scale * rows, rows, rows, results);
            }
            if (old.g == groups - 1) {
                for (int r = 0; r < rows; r++) {
                    const size_t to = y_at + (size_t)r * y_stride;
                    finish_pair(finish, results[2 * r], results[2 * r + 1], pair, other + to, y + to);
                    results[2 * r] = results[2 * r + 1] = 0.0f;
                }
                pair++;
            }
            go_on(&old, groups, step);
        }
    }
}
#endif
