// Which experts a row goes to, by its router's logits.

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

// The experts of a row, i32 [top], by falling score, the lower index first among equals, and their weights: their scores times
// `scale`, by the flags. s: the router's logits. Experts are chosen from `groups_used` of `groups` groups only, if there are
// several. A NaN counts as the lowest score, so that indices are valid, and makes all the row's weights NaN. left: local f32
// [experts].
inline void choose_experts(global const float* s, global const float* per_expert, global const float* bias,
                           global int* mine, global float* w, int experts, int top, int flags, int groups,
                           int groups_used, float scale, local float* left) {
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
