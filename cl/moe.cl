// A mixture of experts around its products (experts.cl): the choice of experts, the way of rows to them and back.
//
// Each row goes to `top` experts. A *slot* is one row at one of its experts; slots are sorted by expert, and inside an
// expert by row. A *block* is a run of at most SLOT_BLOCK slots of one expert: {expert, first slot, slots}; unused blocks
// have no slots. Packed activations of experts are those of pack_rows for each block by itself, one block after the other:
// the kernels' reads stay together however many rows a pass has.

// The experts of each row and their weights (expert_choice.h). scores: f32 [rows][stride], the router's logits. chosen: i32
// [rows][top]. One work-item a row. left: local f32 [experts].
KERNEL route(ITEM global const float* scores, global const float* per_expert, global const float* bias,
             global int* chosen, global float* weights, int experts, int top, int stride, int flags, int groups,
             int groups_used, float scale, local float* left) {
    const int row = AT(0);
    choose_experts(scores + (size_t)row * stride, per_expert, bias, chosen + (size_t)row * top,
                   weights + (size_t)row * top, experts, top, flags, groups, groups_used, scale, left);
}

// How many of an expert's `count` slots a block takes: they are cut into as few blocks as there can be, of nearly equal
// size, whole multiples of `unit` where there are several.
inline int slots_each(int count, int unit) {
    const int parts = (count + SLOT_BLOCK - 1) / SLOT_BLOCK, even = (count + max(parts, 1) - 1) / max(parts, 1);
    return min(SLOT_BLOCK, (even + unit - 1) / unit * unit);
}

#define MOST_TOP 64 // experts of a row

// Prepares each row once and packs it into each of its slots; the rest as pack_rows. Slots are sorted by expert, inside an
// expert by row: each work-item counts for itself which come before its own, a few thousand steps, so that no launch has to
// sort them first. chosen: the experts of all rows. places: the slot of each (row, choice); blocks: int4 [most_blocks], by the
// first row's work-item. One work-item a row. counts, begins: local i32 [experts].
KERNEL pack_for_experts(ITEM global const float* x, global const float* branch, global const float* branch_weight,
                        global const float* norm_weight, global float* new_rows, global const int* chosen,
                        global int* places, global int4* blocks, global float* packed, global float* sums, int experts,
                        int top, int most_blocks, int unit, int flags, int n, int groups, int stride, float epsilon,
                        local float* h, local int* counts, local int* begins) {
    const int row = AT(0), mine = row * top, slots = OF(0) * top;
    int earlier[MOST_TOP]; // slots of the same expert
    for (int e = 0; e < experts; e++) counts[e] = 0;
    for (int i = 0; i < mine; i++) counts[clamp(chosen[i], 0, experts - 1)]++;
    for (int k = 0; k < top; k++) earlier[k] = counts[clamp(chosen[mine + k], 0, experts - 1)]++;
    for (int i = mine + top; i < slots; i++) counts[clamp(chosen[i], 0, experts - 1)]++;
    for (int e = 0, slot = 0; e < experts; slot += counts[e++]) begins[e] = slot;
    if (row == 0) {
        int block = 0;
        for (int e = 0; e < experts; e++) {
            const int each = slots_each(counts[e], unit);
            for (int done = 0; done < counts[e]; done += each)
                blocks[block++] = (int4)(e, begins[e] + done, min(each, counts[e] - done), 0);
        }
        for (; block < most_blocks; block++) blocks[block] = (int4)(0);
    }
    const size_t at = (size_t)row * stride;
    prepare_row(x + at, branch + at, branch_weight, norm_weight, new_rows + at, 1, flags, n, groups * GROUP, epsilon, h);
    // Where the row goes, found once; then each group is made once for all of them.
    global float* out[MOST_TOP];
    global float* out_sums[MOST_TOP];
    int at_row[MOST_TOP], of_rows[MOST_TOP];
    for (int k = 0; k < top; k++) {
        const int e = clamp(chosen[mine + k], 0, experts - 1), each = slots_each(counts[e], unit);
        const int first = earlier[k] / each * each; // of its block, in its expert's slots
        places[mine + k] = begins[e] + earlier[k];
        out[k] = packed + (size_t)(begins[e] + first) * groups * GROUP_FLOATS;
        out_sums[k] = sums + (size_t)(begins[e] + first) * groups * 3;
        at_row[k] = earlier[k] - first;
        of_rows[k] = min(each, counts[e] - first);
    }
    for (int g = 0; g < groups; g++) {
        const float16 a = vload16(2 * g, h), b = vload16(2 * g + 1, h);
        for (int k = 0; k < top; k++) pack_group(a, b, out[k], out_sums[k], g, groups, at_row[k], of_rows[k]);
    }
}

// result = (residual + norm(norm(mlp; mlp_norm) + norm(mixed; moe_norm); join_norm)) * scalar, where mixed is the sum of
// the row's experts by weight, in the order of choice. All rows `stride` values apart, out [slots][out_stride]; zero from n
// on up to `padded`. Where `packs`, the row is prepared and packed for what comes next, too (rows.cl). One work-item a row.
// h: local f32 [padded]; m: local f32 [n padded to 16].
KERNEL combine(ITEM global const float* out, global const int* places, global const float* weights,
               global const float* mlp, global const float* residual, global const float* moe_norm,
               global const float* mlp_norm, global const float* join_norm, global float* result,
               global const float* next_norm, global float* packed, global float* sums, float scalar, int top, int n,
               int out_stride, int stride, int padded, int packs, float epsilon, local float* h, local float* m) {
    const int row = AT(0);
    const size_t at = (size_t)row * stride;
    const int used = (n + 15) / 16 * 16;
    for (int i = 0; i < used; i += 16) {
        float16 sum = 0.0f;
        for (int k = 0; k < top; k++) {
            const size_t slot = (size_t)places[(size_t)row * top + k] * out_stride;
            sum = fma((float16)weights[(size_t)row * top + k], vload16(0, out + slot + i), sum);
        }
        vstore16(sum, 0, h + i);
        vstore16(vload16(0, mlp + at + i), 0, m + i);
    }
    const float16 moe_scale = inverse_rms(h, n, used, epsilon), mlp_scale = inverse_rms(m, n, used, epsilon);
    for (int i = 0; i < used; i += 16)
        vstore16(vload16(0, m + i) * mlp_scale * vload16(0, mlp_norm + i) +
                     vload16(0, h + i) * moe_scale * vload16(0, moe_norm + i), 0, h + i);
    const float16 join_scale = inverse_rms(h, n, used, epsilon);
    for (int i = 0; i < used; i += 16) {
        float16 branch = vload16(0, h + i) * join_scale * vload16(0, join_norm + i);
        vstore16((vload16(0, residual + at + i) + branch) * scalar, 0, result + at + i);
    }
    for (int i = used; i < padded; i += 16) vstore16((float16)0.0f, 0, result + at + i);
    if (!packs) return;
    global float* sum = result + at;
    prepare_row(sum, sum, next_norm, next_norm, sum, 0, NORM, n, padded, epsilon, h);
    pack_row(h, padded / GROUP, packed, sums, row, OF(0));
}

// stream += the row's experts by weight, in the order of choice. stream: f32 [rows][stride]; out [slots][out_stride]; n
// values of a row, rounded up to whole 16. Global size: rows x parts of n of 16 * COMBINED values.
#define COMBINED 16
KERNEL add_experts(ITEM global const float* out, global const int* places, global const float* weights,
                   global float* stream, int top, int n, int out_stride, int stride) {
    const int row = AT(0), first = AT(1) * 16 * COMBINED;
    global float* to = stream + (size_t)row * stride;
    const int end = min(n, first + 16 * COMBINED);
    for (int i = first; i < end; i += 16) {
        float16 sum = 0.0f;
        for (int k = 0; k < top; k++) {
            const size_t slot = (size_t)places[(size_t)row * top + k] * out_stride;
            sum = fma((float16)weights[(size_t)row * top + k], vload16(0, out + slot + i), sum);
        }
        vstore16(vload16(0, to + i) + sum, 0, to + i);
    }
}
