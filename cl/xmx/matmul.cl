// Matrix times activations, for one weight format: `narrow_N` for up to 8 N rows, `wide` for many.
//
// A matrix's columns are cut into `slices` runs of spans. A row's sum over each slice starts from zero; sums of slices are
// added in order. The number of slices is the matrix's own, so `narrow`, where each slice is another sub-group's, and `wide`,
// where one sub-group goes through them all, make the same bits.

#define TEAM 8 // sub-groups of a work-group of `narrow`: `slices` of them share a pair of tiles

inline uint slice_begin(uint slice, uint slices, uint spans) { return slice * spans / slices; }

// Global size: [work-groups of 16 * TEAM over TEAM / slices pairs each][blocks of 8 N rows].
#define NARROW(N)                                                                                                     \
    SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void narrow_##N(                       \
        global const uchar* weights, global const ushort* x, global const float* sums, global const float* factors,   \
        global const float* other, global float* y, int finish, int y_at, int spans, int tile_bytes, int pairs,       \
        int rows, int x_stride, int sums_stride, int stride, int slices, int shared_scales, ulong plane) {                         \
        local float parts[TEAM * N * 8 * 32];                                                                         \
        const int team = get_sub_group_id(), lane = get_sub_group_local_id();                                         \
        const int slice = team % slices, pair = get_group_id(0) * (TEAM / slices) + team / slices;                    \
        const int row = get_group_id(1) * (8 * N);                                                                    \
        const Rows input = {{x, x_stride, rows, x_stride}, plane, sums, sums_stride};                                        \
        local float* mine = parts + team * (N * 8 * 32) + lane;                                                       \
        if (pair < pairs) {                                                                                           \
            float8 c0[N], c1[N];                                                                                      \
            rows_through_pair(N, input, row, weights + (size_t)pair * 2 * tile_bytes, tile_bytes,                     \
                              slice_begin(slice, slices, spans), slice_begin(slice + 1, slices, spans),               \
                              shared_scales, c0, c1);                                                                 \
            UNROLL for (int m = 0; m < N; m++) {                                                                      \
                float first[8], second[8];                                                                            \
                vstore8(c0[m], 0, first);                                                                             \
                vstore8(c1[m], 0, second);                                                                            \
                UNROLL for (int r = 0; r < 8; r++) {                                                                  \
                    mine[(m * 8 + r) * 32] = first[r];                                                                \
                    mine[(m * 8 + r) * 32 + LANES] = second[r];                                                       \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                 \
        if (pair >= pairs) return;                                                                                    \
        local const float* all = parts + (team - slice) * (N * 8 * 32) + lane;                                        \
        const int count = min(8 * N, rows - row);                                                                     \
        for (int r = slice; r < count; r += slices) {                                                                 \
            float first = 0.0f, second = 0.0f;                                                                        \
            for (int i = 0; i < slices; i++) {                                                                        \
                first += all[(i * N * 8 + r) * 32];                                                                   \
                second += all[(i * N * 8 + r) * 32 + LANES];                                                          \
            }                                                                                                         \
            const float factor = factors[row + r];                                                                    \
            const size_t to = (size_t)(row + r) * stride + y_at;                                                      \
            finish_pair(finish, first * factor, second * factor, pair, other + to, y + to);                           \
        }                                                                                                             \
    }
NARROW(1)
NARROW(2)
NARROW(4)

// A work-group of 16 sub-groups makes 128 rows of 128 outputs, so that what one of them reads is in the cache for others.
#define TEAM_ROWS 4
#define TEAM_PAIRS 4

// Global size: [16 * 16 * row teams][pair teams].
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM_ROWS * TEAM_PAIRS, 1, 1))) kernel void
wide(global const uchar* weights, global const ushort* x, global const float* sums, global const float* factors,
     global const float* other, global float* y, int finish, int y_at, int spans, int tile_bytes, int pairs, int rows,
     int x_stride, int sums_stride, int stride, int slices, int shared_scales, ulong plane) {
    const int team = get_sub_group_id();
    const int pair = get_group_id(1) * TEAM_PAIRS + team % TEAM_PAIRS;
    const int row = (get_group_id(0) * TEAM_ROWS + team / TEAM_PAIRS) * 32;
    if (pair >= pairs || row >= rows) return;
    const Rows input = {{x, x_stride, rows, x_stride}, plane, sums, sums_stride};
    float8 total0[4], total1[4];
    UNROLL for (int m = 0; m < 4; m++) total0[m] = total1[m] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice++) {
        float8 c0[4], c1[4];
        rows_through_pair(4, input, row, weights + (size_t)pair * 2 * tile_bytes, tile_bytes,
                          slice_begin(slice, slices, spans), slice_begin(slice + 1, slices, spans), shared_scales, c0, c1);
        UNROLL for (int m = 0; m < 4; m++) {
            total0[m] += c0[m];
            total1[m] += c1[m];
        }
    }
    UNROLL for (int m = 0; m < 4; m++) {
        float first[8], second[8];
        vstore8(total0[m], 0, first);
        vstore8(total1[m], 0, second);
        UNROLL for (int r = 0; r < 8; r++) {
            const int at = row + m * 8 + r;
            if (at < rows) {
                const float factor = factors[at];
                const size_t to = (size_t)at * stride + y_at;
                finish_pair(finish, first[r] * factor, second[r] * factor, pair, other + to, y + to);
            }
        }
    }
}
