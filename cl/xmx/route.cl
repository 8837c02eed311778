// Which experts rows go to, a row a sub-group: what cl/include/expert_choice.h says, whose flags these are.

#define SIGMOID 1
#define RENORMALISE 2
#define CHOICE_BIAS 4
#define EXPERT_SCALES 8

#define MOST_GROUPS 64

// Bars (as NaN) all but the experts of the `used` best of `groups` groups, as many in each; the lower group first among
// equals. A group counts as its best expert, or (two) as its two best together.
inline void keep_groups(local float* left, local float* value, int experts, int groups, int used, int two) {
    const int lane = get_sub_group_local_id(), size = experts / groups;
    for (int g = lane; g < groups; g += LANES) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = fmax(second, fmin(first, left[e]));
            first = fmax(first, left[e]);
        }
        value[g] = two ? first + second : first;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    ulong kept = 0;
    for (int u = 0; u < used; u++) {
        int best = -1;
        for (int g = 0; g < groups; g++)
            if (!(kept >> g & 1) && (best < 0 || value[g] > value[best])) best = g;
        kept |= (ulong)1 << best;
    }
    for (int e = lane; e < experts; e += LANES)
        if (!(kept >> (e / size) & 1)) left[e] = NAN;
    barrier(CLK_LOCAL_MEM_FENCE);
}

// scores: f32 [rows][stride]; chosen, weights: [rows][top]. left: local f32 [experts]. Global size: rows x 16.
SUB_GROUP __attribute__((reqd_work_group_size(LANES, 1, 1))) kernel void
route(global const float* scores, global const float* per_expert, global const float* bias, global int* chosen,
      global float* weights, int experts, int top, int stride, int flags, int groups, int groups_used, float scale,
      local float* left) {
    local float value[MOST_GROUPS];
    const int row = get_group_id(0), lane = get_sub_group_local_id();
    global const float* s = scores + (size_t)row * stride;
    global int* mine = chosen + (size_t)row * top;
    global float* w = weights + (size_t)row * top;
    int spoilt = 0;
    for (int e = lane; e < experts; e += LANES) {
        float by = s[e];
        if (flags & SIGMOID) by = 1.0f / (1.0f + EXP(-by));
        if (flags & CHOICE_BIAS) by += bias[e];
        spoilt |= isnan(by); // the score, or its bias
        left[e] = isnan(by) ? -INFINITY : by;
    }
    spoilt = sub_group_reduce_max(spoilt);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (groups > 1) keep_groups(left, value, experts, groups, groups_used, flags & SIGMOID);
    float largest = 0.0f;
    for (int k = 0; k < top; k++) {
        int best = INT_MAX;
        float most = -INFINITY;
        for (int e = lane; e < experts; e += LANES) // the lower one first among equals
            if (!isnan(left[e]) && (best == INT_MAX || left[e] > most)) {
                best = e;
                most = left[e];
            }
        const float of_all = sub_group_reduce_max(most);
        best = sub_group_reduce_min(most == of_all ? best : INT_MAX);
        if (best % LANES == lane) left[best] = NAN; // taken
        if (lane == 0) mine[k] = best;
        if (k == 0) largest = s[best];
        // Each lane keeps what it makes of its choices.
        if (k % LANES == lane)
            w[k] = flags & SIGMOID ? 1.0f / (1.0f + EXP(-s[best])) : EXP(s[best] - largest);
    }
    float total = 1.0f;
    if (!(flags & SIGMOID)) {
        total = 0.0f;
        for (int e = lane; e < experts; e += LANES) total += EXP(s[e] - largest);
        total = sub_group_reduce_add(total);
    }
    float share = 0.0f;
    for (int k = lane; k < top; k += LANES) {
        w[k] = spoilt ? NAN : w[k] / total;
        share += w[k];
    }
    share = sub_group_reduce_add(share);
    if (flags & SIGMOID) share += 1e-20f; // all may be zero
    for (int k = lane; k < top; k += LANES) {
        float weight = w[k];
        if (flags & RENORMALISE) weight /= share;
        weight *= scale;
        if (flags & EXPERT_SCALES) weight *= per_expert[mine[k]];
        w[k] = weight;
    }
}
