// The end of a layer with experts beside a network for all rows.

// result = (residual + norm(norm(mlp; mlp_norm) + norm(mixed; moe_norm); join_norm)) * scalar, where mixed is the sum of the
// row's experts by weight, in the order of choice. All rows `stride` values apart, out [slots][out_stride]; zero from n
// on up to h_stride. Where `rounds`, the row gets next_norm and is rounded for what comes next, too (team.h). line, beside: local f32
// [h_stride]. Global size: rows x 256.
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void
combine(global const float* out, global const int* places, global const float* weights, global const float* mlp,
        global const float* residual, global const float* moe_norm, global const float* mlp_norm,
        global const float* join_norm, global float* result, global const float* next_norm, global ushort* h,
        global float* sums, float scalar, global float* factors, int top, int n, int out_stride, int stride,
        int h_stride, int sums_stride, int terms, ulong plane, int rounds, float epsilon, local float* line,
        local float* beside) {
    local float parts[TEAM];
    local int place[1];
    const int row = get_group_id(0), team = get_sub_group_id(), lane = get_sub_group_local_id();
    const int tiles = h_stride / LANES, used = (n + LANES - 1) / LANES;
    const size_t from = (size_t)row * stride;
    if (get_local_id(0) == 0) place[0] = row; // seen once numbers have been added up over the team
    float of_experts = 0.0f, of_mlp = 0.0f;
    TILES_OF_TEAM(t, tiles) {
        const int at = t * LANES;
        float mixed = 0.0f, m = 0.0f;
        if (t < used) {
            for (int k = 0; k < top; k++) {
                const size_t slot = (size_t)places[(size_t)row * top + k] * out_stride;
                mixed = fma(weights[(size_t)row * top + k], lanes_at(out + slot + at), mixed);
            }
            m = lanes_at(mlp + from + at);
        }
        line[at + lane] = mixed;
        beside[at + lane] = m;
        of_experts = fma(mixed, mixed, of_experts);
        of_mlp = fma(m, m, of_mlp);
    }
    const float moe_scale = 1.0f / sqrt(sum_of_team(of_experts, parts) / (float)n + epsilon);
    const float mlp_scale = 1.0f / sqrt(sum_of_team(of_mlp, parts) / (float)n + epsilon);
    float squares = 0.0f;
    TILES_OF_TEAM(t, tiles) {
        const int at = t * LANES;
        float v = 0.0f;
        if (t < used)
            v = beside[at + lane] * mlp_scale * lanes_at(mlp_norm + at) +
                line[at + lane] * moe_scale * lanes_at(moe_norm + at);
        line[at + lane] = v;
        squares = fma(v, v, squares);
    }
    const float join_scale = 1.0f / sqrt(sum_of_team(squares, parts) / (float)n + epsilon);
    squares = 0.0f;
    TILES_OF_TEAM(t, tiles) {
        const int at = t * LANES;
        float v = 0.0f;
        if (t < used) v = (lanes_at(residual + from + at) + line[at + lane] * join_scale * lanes_at(join_norm + at)) * scalar;
        intel_sub_group_block_write((global uint*)(result + from + at), as_uint(v));
        line[at + lane] = v;
        squares = fma(v, v, squares);
    }
    if (!rounds) return;
    const float scale = 1.0f / sqrt(sum_of_team(squares, parts) / (float)n + epsilon);
    const Rounded to = {h, sums, factors, h_stride, sums_stride, terms, plane};
    round_row(line, next_norm, scale, 1, to, place, 1, parts);
}
