// Rows of f32 made ready for products: a branch is added, the norm is taken, and what comes of it is rounded to f16.
//
// Each row is first multiplied by the power of two that brings its largest number to 2^14 or a little above, so that none
// overflows and small ones keep their bits; the inverse power is the row's factor, which products are multiplied by in the
// end. Both are exact. A row is one term of f16, which loses what is behind eleven bits of each number, or two, whose sum has
// 22. Sums over each 32 columns are of the rounded numbers.

#define ADD_BRANCH 1
#define NORM 2
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

#define MOST_TOP 64    // experts of a row
#define SLOT_BLOCK 128 // the most slots of a block

inline int blocks_of(int count) { return (count + SLOT_BLOCK - 1) / SLOT_BLOCK; }

// Where the row of this work-group goes, whose experts are chosen[mine] and on of `slots` choices: cl/moe.cl says what slots and
// blocks are. All work-items count slots side by side; sums of whole numbers are the same in any order. The first row's
// work-group writes the table of blocks, whose sizes are whole multiples of 32 where an expert has several. counts: local
// i32 [experts].
inline void sort_slots(global const int* chosen, global int* places, global int4* blocks, int slots, int mine, int top,
                       int experts, int most_blocks, local int* counts, local int* place) {
    const int item = get_local_id(0), items = LANES * TEAM;
    for (int e = item; e < experts; e += items) counts[e] = 0;
    for (int k = item; k < top; k += items) place[k] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < slots; i += items) {
        const int e = clamp(chosen[i], 0, experts - 1);
        atomic_inc(counts + e);
        for (int k = 0; k < top; k++)
            if (i < mine + k && e == clamp(chosen[mine + k], 0, experts - 1)) atomic_inc(place + k);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = get_sub_group_id(); k < top; k += TEAM) {
        const int expert = clamp(chosen[mine + k], 0, experts - 1);
        int before = 0;
        for (int e = get_sub_group_local_id(); e < expert; e += LANES) before += counts[e];
        before = sub_group_reduce_add(before);
        if (get_sub_group_local_id() == 0) {
            place[k] += before;
            places[mine + k] = place[k];
        }
    }
    if (mine == 0) {
        for (int e = item; e < experts; e += items) {
            const int count = counts[e], parts = blocks_of(count);
            int slot = 0, block = 0;
            for (int i = 0; i < e; i++) {
                slot += counts[i];
                block += blocks_of(counts[i]);
            }
            const int each = min(SLOT_BLOCK, ((count + max(parts, 1) - 1) / max(parts, 1) + 31) / 32 * 32);
            for (int done = 0; done < count; done += each, block++)
                blocks[block] = (int4)(e, slot + done, min(each, count - done), 0);
        }
        int used = 0;
        for (int e = 0; e < experts; e++) used += blocks_of(counts[e]);
        for (int block = used + item; block < most_blocks; block += items) blocks[block] = (int4)(0);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// One row: x, branch and new_row are its first values. The row goes to its places at the `top` experts that are chosen for it,
// or, where that is 0, to its own. h: f16 [places][h_stride], `plane` values from
// term to term, sums: f32 [h_stride / 32][sums_stride], factors: f32 [places].
// line: local f32 [h_stride]. Global size: rows x 256.
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void
prepare(global const float* x, global const float* branch, global const float* branch_weight,
        global const float* norm_weight, global float* new_rows, global const int* chosen, global int* places,
        global int4* blocks, global ushort* h, global float* sums, global float* factors, int flags, int n, int x_at,
        int x_stride, int h_stride, int sums_stride, int top, int experts, int most_blocks, int terms, ulong plane,
        float epsilon, local float* line, local int* counts) {
    local float parts[TEAM];
    local int place[MOST_TOP];
    const int row = get_group_id(0), team = get_sub_group_id(), lane = get_sub_group_local_id();
    const int tiles = h_stride / LANES;
    if (top > 0)
        sort_slots(chosen, places, blocks, get_num_groups(0) * top, row * top, top, experts, most_blocks, counts, place);
    const size_t from = (size_t)row * x_stride + x_at;
    float squares = 0.0f;
    float scale = 0.0f;
    if (flags & ADD_BRANCH) {
        for (int t = 2 * team; t < tiles; t += t % 2 ? 2 * TEAM - 1 : 1) {
            const float b = lanes_at(branch + from + t * LANES);
            squares = fma(b, b, squares);
        }
        scale = 1.0f / sqrt(sum_of_team(squares, parts) / (float)n + epsilon);
    }
    squares = 0.0f;
    for (int t = 2 * team; t < tiles; t += t % 2 ? 2 * TEAM - 1 : 1) {
        const int at = t * LANES;
        float v = lanes_at(x + from + at);
        if (flags & ADD_BRANCH) {
            v += lanes_at(branch + from + at) * scale * lanes_at(branch_weight + at);
            intel_sub_group_block_write((global uint*)(new_rows + from + at), as_uint(v));
        }
        line[at + lane] = v;
        squares = fma(v, v, squares);
    }
    if (flags & NORM) scale = 1.0f / sqrt(sum_of_team(squares, parts) / (float)n + epsilon);
    float largest = 0.0f;
    for (int t = 2 * team; t < tiles; t += t % 2 ? 2 * TEAM - 1 : 1) {
        const int at = t * LANES;
        float v = line[at + lane];
        if (flags & NORM) v *= scale * lanes_at(norm_weight + at);
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
        if (terms > 1) kept += convert_float2(second);
        const float sum = sub_group_reduce_add(kept.x + kept.y);
        for (int k = 0; k < max(top, 1); k++) {
            const int at = top > 0 ? place[k] : row;
            global ushort* to = h + (size_t)at * h_stride + g * GROUP;
            intel_sub_group_block_write_us2(to, as_ushort2(first));
            if (terms > 1) intel_sub_group_block_write_us2(to + plane, as_ushort2(second));
            if (lane == 0) {
                sums[(size_t)g * sums_stride + at] = sum;
                if (g == 0) factors[at] = power_of_two(exponent - 14);
            }
        }
    }
}
