// A mixture of experts around its products (experts.cl): the choice of experts, the way of rows to them and back.
//
// Each row goes to `top` experts. A *slot* is one row at one of its experts; slots are sorted by expert, and inside an
// expert by row. A *block* is a run of at most SLOT_BLOCK slots of one expert: {expert, first slot, slots}; unused blocks
// have no slots. Packed activations of experts are those of pack_rows for each block by itself, one block after the other:
// the kernels' reads stay together however many rows a pass has.

#define SIGMOID 1       // a score is the sigmoid of a logit, not the softmax over all experts
#define RENORMALISE 2   // the weights of the chosen are divided by their sum
#define CHOICE_BIAS 4   // a bias is added to scores (sigmoids) for the choice, and for nothing else
#define EXPERT_SCALES 8 // an expert's weight is multiplied by its scale

#define MOST_GROUPS 64

// Bars (as NaN) all but the experts of the `used` best of `groups` groups, as many in each; the lower group first among
// equals. A group counts as its best expert, or (two) as its two best together.
inline void keep_groups(local float* left, int experts, int groups, int used, int two) {
    float value[MOST_GROUPS];
    const int size = experts / groups;
    for (int g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = fmax(second, fmin(first, left[e]));
            first = fmax(first, left[e]);
        }
        value[g] = two ? first + second : first;
    }
    ulong kept = 0;
    for (int u = 0; u < used; u++) {
        int best = -1;
        for (int g = 0; g < groups; g++)
            if (!(kept >> g & 1) && (best < 0 || value[g] > value[best])) best = g;
        kept |= (ulong)1 << best;
    }
    for (int e = 0; e < experts; e++)
        if (!(kept >> (e / size) & 1)) left[e] = NAN;
}

// The experts of each row and their weights. scores: f32 [rows][stride], the router's logits. chosen: i32 [rows][top], by
// falling score, the lower index first among equals; weights: their scores times `scale`, by the flags. Experts are chosen
// from `groups_used` of `groups` groups only, if there are several. A NaN counts as the lowest score, so that indices are
// valid, and makes all the row's weights NaN. One work-item a row. left: local f32 [experts].
KERNEL route(ITEM global const float* scores, global const float* per_expert, global const float* bias,
             global int* chosen, global float* weights, int experts, int top, int stride, int flags, int groups,
             int groups_used, float scale, local float* left) {
    const int row = AT(0);
    global const float* s = scores + (size_t)row * stride;
    global int* mine = chosen + (size_t)row * top;
    global float* w = weights + (size_t)row * top;
    float spoilt = 0.0f;
    for (int e = 0; e < experts; e++) {
        float by = s[e];
        if (flags & SIGMOID) by = 1.0f / (1.0f + exp(-by));
        if (flags & CHOICE_BIAS) by += bias[e];
        if (isnan(by)) spoilt = NAN; // the score, or its bias
        left[e] = isnan(by) ? -INFINITY : by;
    }
    if (groups > 1) keep_groups(left, experts, groups, groups_used, flags & SIGMOID);
    for (int k = 0; k < top; k++) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (!isnan(left[e]) && (best < 0 || left[e] > left[best])) best = e;
        mine[k] = best;
        left[best] = NAN; // taken
    }
    const float largest = s[mine[0]];
    float total = 0.0f, share = 0.0f;
    if (!(flags & SIGMOID))
        for (int e = 0; e < experts; e++) total += exp(s[e] - largest);
    for (int k = 0; k < top; k++) {
        if (flags & SIGMOID)
            w[k] = 1.0f / (1.0f + exp(-s[mine[k]])) + spoilt;
        else
            w[k] = exp(s[mine[k]] - largest) / total;
        share += w[k];
    }
    if (flags & SIGMOID) share += 1e-20f; // all may be zero
    for (int k = 0; k < top; k++) {
        if (flags & RENORMALISE) w[k] /= share;
        w[k] *= scale;
        if (flags & EXPERT_SCALES) w[k] *= per_expert[mine[k]];
    }
}

// Sorts the slots: a stable counting sort, and cuts each expert's run into blocks of nearly equal size, whole multiples of
// `unit` where there are several. places: the slot of each (row, choice); block_of: the block of each slot; blocks: int4
// [most_blocks]. One work-item: a few thousand steps. ends: local i32 [experts].
KERNEL sort_rows(ITEM global const int* chosen, global int* places, global int* block_of, global int4* blocks,
                 int slots, int experts, int most_blocks, int unit, local int* ends) {
    for (int e = 0; e < experts; e++) ends[e] = 0;
    for (int i = 0; i < slots; i++) ends[clamp(chosen[i], 0, experts - 1)]++;
    int slot = 0, block = 0;
    for (int e = 0; e < experts; e++) {
        const int count = ends[e], parts = (count + SLOT_BLOCK - 1) / SLOT_BLOCK;
        ends[e] = slot; // for now where the expert's next slot is
        if (parts == 0) continue;
        const int even = (count + parts - 1) / parts;
        const int each = min(SLOT_BLOCK, (even + unit - 1) / unit * unit);
        for (int left = count; left > 0; left -= each, block++) {
            const int size = min(each, left);
            blocks[block] = (int4)(e, slot, size, 0);
            for (int i = 0; i < size; i++) block_of[slot++] = block;
        }
    }
    for (; block < most_blocks; block++) blocks[block] = (int4)(0);
    for (int i = 0; i < slots; i++) places[i] = ends[clamp(chosen[i], 0, experts - 1)]++;
}

#define MOST_TOP 64 // experts of a row

// Prepares each row once and packs it into each of its slots; the rest as pack_rows. One work-item a row.
KERNEL pack_for_experts(ITEM global const float* x, global const float* branch, global const float* branch_weight,
                        global const float* norm_weight, global float* new_rows, global const int* places,
                        global const int* block_of, global const int4* blocks, global float* packed, global float* sums,
                        int top, int flags, int n, int groups, int stride, float epsilon, local float* h) {
    const int row = AT(0);
    const size_t at = (size_t)row * stride;
    prepare_row(x + at, branch + at, branch_weight, norm_weight, new_rows + at, 1, flags, n, groups * GROUP, epsilon, h);
    // Where the row goes, found once; then each group is made once for all of them.
    global float* out[MOST_TOP];
    global float* out_sums[MOST_TOP];
    int at_row[MOST_TOP], of_rows[MOST_TOP];
    for (int k = 0; k < top; k++) {
        const int slot = places[(size_t)row * top + k];
        const int4 block = blocks[block_of[slot]];
        out[k] = packed + (size_t)block.y * groups * GROUP_FLOATS;
        out_sums[k] = sums + (size_t)block.y * groups * 3;
        at_row[k] = slot - block.y;
        of_rows[k] = block.z;
    }
    for (int g = 0; g < groups; g++) {
        const float16 a = vload16(2 * g, h), b = vload16(2 * g + 1, h);
        for (int k = 0; k < top; k++) pack_group(a, b, out[k], out_sums[k], g, groups, at_row[k], of_rows[k]);
    }
}

// result = (residual + norm(norm(mlp; mlp_norm) + norm(mixed; moe_norm); join_norm)) * scalar, where mixed is the sum of
// the row's experts by weight, in the order of choice. All rows `stride` values apart, out [slots][out_stride]; zero from n
// on. One work-item a row. h, m: local f32 [padded], padded a multiple of 16.
KERNEL combine(ITEM global const float* out, global const int* places, global const float* weights,
               global const float* mlp, global const float* residual, global const float* moe_norm,
               global const float* mlp_norm, global const float* join_norm, global float* result, float scalar, int top,
               int n, int out_stride, int stride, int padded, float epsilon, local float* h, local float* m) {
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
