// What becomes of a product before it is stored; the numbers are those of cl/include/finish.h.

#define FINISH_STORE 0     // y = result
#define FINISH_ADD 1       // y = other + result
#define FINISH_SILU 2      // y = silu(gate) * up, gate and up being the two tiles of a pair
#define FINISH_GELU 3      // y = gelu_tanh(gate) * up, likewise
#define FINISH_SILU_WITH 4 // y = silu(other) * result
#define FINISH_GELU_WITH 5 // y = gelu_tanh(other) * result

inline float silu(float x) { return x / (1.0f + EXP(-x)); }

inline float gelu_tanh(float x) { return x / (1.0f + EXP(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }

inline float gated(int finish, float gate, float up) { return (finish == FINISH_SILU ? silu(gate) : gelu_tanh(gate)) * up; }

inline void store_lanes(global float* to, float value) { intel_sub_group_block_write((global uint*)to, as_uint(value)); }

inline float load_lanes(global const float* from) { return as_float(intel_sub_group_block_read((global const uint*)from)); }

// Stores a pair of tiles of one row: 32 outputs, or 16 where the pair is gate and up. A lane has one output of each tile.
inline void finish_pair(int finish, float first, float second, int pair, global const float* other, global float* y) {
    if (finish == FINISH_SILU || finish == FINISH_GELU) {
        store_lanes(y + pair * LANES, gated(finish, first, second));
        return;
    }
    const int at = pair * 2 * LANES;
    if (finish != FINISH_STORE) {
        const float a = load_lanes(other + at), b = load_lanes(other + at + LANES);
        if (finish == FINISH_ADD) {
            first += a;
            second += b;
        } else {
            first *= finish == FINISH_SILU_WITH ? silu(a) : gelu_tanh(a);
            second *= finish == FINISH_SILU_WITH ? silu(b) : gelu_tanh(b);
        }
    }
    store_lanes(y + at, first);
    store_lanes(y + at + LANES, second);
}
