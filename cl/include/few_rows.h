// What the kernels for a few rows share, however they make their products.

// Row r's sums of x over the scale groups of group g, whose columns are a and b: row_sums [scale groups][rows].
inline void few_sums(float16 a, float16 b, local float* row_sums, int g, int r, int rows) {
#if SCALE_GROUP == 16
    row_sums[2 * g * rows + r] = sum_lanes(a);
    row_sums[(2 * g + 1) * rows + r] = sum_lanes(b);
#else
    row_sums[g * rows + r] = sum_lanes(a + b);
#endif
}

// How many groups weights are asked for ahead of their use, and for which caches: the matrix unit's registers are loaded
// through all that the nearest has room for.
#ifdef TILES_ON
#define AHEAD_GROUPS 32
#define AHEAD_CACHE 2
#else
#define AHEAD_GROUPS 4
#define AHEAD_CACHE 3
#endif
#define STREAM_BYTES (BLOCK_BYTES / BLOCK_GROUPS) // of a tile for each group
#define AHEAD (AHEAD_GROUPS * STREAM_BYTES)       // bytes of a tile that are asked for before they are needed
#define FIRST (4 * STREAM_BYTES)                  // of the first tiles, before anything else is done

// Asks for weights that come soon: arithmetic fills the processor's window before it would see them.
inline void fetch(global const uchar* from, int bytes) {
#ifdef HOST_PREFETCH
    #pragma unroll
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const void*)(size_t)(from + line), 0, AHEAD_CACHE);
#endif
}
