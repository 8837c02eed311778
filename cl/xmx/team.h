// Whole rows of f32, a work-group each, and how they are rounded to f16 for products.
//
// Each row is first multiplied by the power of two that brings its largest number to 2^14 or a little above, so that none
// overflows and small ones keep their bits; the inverse power is the row's factor, which products are multiplied by in the
// end. Both are exact. A row is one term of f16, which loses what is behind eleven bits of each number, or two, whose sum has
// 22. Sums over each 32 columns are of the rounded numbers.

// A sub-group has whole groups of 32 columns: those from 32 * its number on, then every TEAM-th.

#define TEAM 16 // sub-groups of a work-group, which takes one row

// The sum of all work-items' numbers, in a fixed order.
inline float sum_of_team(float mine, local float* parts) {
    const float part = sub_group_reduce_add(mine);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_sub_group_local_id() == 0) parts[get_sub_group_id()] = part;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int i = 0; i < TEAM; i++) sum += parts[i];
    return sum;
}

inline float largest_of_team(float mine, local float* parts) {
    const float part = sub_group_reduce_max(mine);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_sub_group_local_id() == 0) parts[get_sub_group_id()] = part;
    barrier(CLK_LOCAL_MEM_FENCE);
    float largest = 0.0f;
    for (int i = 0; i < TEAM; i++) largest = fmax(largest, parts[i]);
    return largest;
}

inline float lanes_at(global const float* from) { return as_float(intel_sub_group_block_read((global const uint*)from)); }

inline float power_of_two(int exponent) { return as_float((exponent + 127) << 23); }

// The tiles of 16 columns that a sub-group has, of `tiles`.
#define TILES_OF_TEAM(t, tiles) for (int t = 2 * team; t < (tiles); t += t % 2 ? 2 * TEAM - 1 : 1)

// Where a rounded row goes. h: f16 [places][h_stride], `plane` values from term to term; sums: f32 [h_stride / 32][sums_stride];
// factors: f32 [places].
typedef struct {
    global ushort* h;
    global float* sums;
    global float* factors;
    int h_stride, sums_stride, terms;
    ulong plane;
} Rounded;

// Rounds line, h_stride values, times `scale` and norm_weight where `normed`, to place[0 .. places - 1].
inline void round_row(local float* line, global const float* norm_weight, float scale, int normed, Rounded to,
                      local const int* place, int places, local float* parts) {
    const int team = get_sub_group_id(), lane = get_sub_group_local_id(), tiles = to.h_stride / LANES;
    float largest = 0.0f;
    TILES_OF_TEAM(t, tiles) {
        const int at = t * LANES;
        float v = line[at + lane];
        if (normed) v *= scale * lanes_at(norm_weight + at);
        line[at + lane] = v;
        largest = fmax(largest, fabs(v));
    }
    largest = largest_of_team(largest, parts);
    const int exponent = clamp((int)(as_uint(largest) >> 23) - 127, -100, 127);
    const float up = power_of_two(14 - exponent);
    for (int g = team; g < tiles / 2; g += TEAM) {
        // Two terms, the second what the first leaves; with one, the second is not stored.
        const float2 exact = (float2)(line[g * GROUP + lane], line[g * GROUP + LANES + lane]) * up;
        const half2 first = convert_half2(exact);
        const half2 second = convert_half2(exact - convert_float2(first));
        float2 kept = convert_float2(first);
        if (to.terms > 1) kept += convert_float2(second);
        const float sum = sub_group_reduce_add(kept.x + kept.y);
        for (int k = 0; k < places; k++) {
            const int at = place[k];
            global ushort* row = to.h + (size_t)at * to.h_stride + g * GROUP;
            intel_sub_group_block_write_us2(row, as_ushort2(first));
            if (to.terms > 1) intel_sub_group_block_write_us2(row + to.plane, as_ushort2(second));
            if (lane == 0) {
                to.sums[(size_t)g * to.sums_stride + at] = sum;
                if (g == 0) to.factors[at] = power_of_two(exponent - 14);
            }
        }
    }
}
