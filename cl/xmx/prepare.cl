// Rows of f32 made ready for products: a branch is added, the norm is taken, and what comes of it is rounded to f16 (team.h).

#define ADD_BRANCH 1
#define NORM 2

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
// or, where that is 0, to its own. line: local f32 [h_stride]. Global size: rows x 256.
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
    if (top == 0 && get_local_id(0) == 0) place[0] = row; // seen once numbers have been added up over the team
    if (top > 0)
        sort_slots(chosen, places, blocks, get_num_groups(0) * top, row * top, top, experts, most_blocks, counts, place);
    const size_t from = (size_t)row * x_stride + x_at;
    float squares = 0.0f;
    float scale = 0.0f;
    if (flags & ADD_BRANCH) {
        TILES_OF_TEAM(t, tiles) {
            const float b = lanes_at(branch + from + t * LANES);
            squares = fma(b, b, squares);
        }
        scale = 1.0f / sqrt(sum_of_team(squares, parts) / (float)n + epsilon);
    }
    squares = 0.0f;
    TILES_OF_TEAM(t, tiles) {
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
    const Rounded to = {h, sums, factors, h_stride, sums_stride, terms, plane};
    round_row(line, norm_weight, scale, flags & NORM, to, place, max(top, 1), parts);
}
