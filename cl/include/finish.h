// What becomes of a matrix multiplication's result before it is stored.

#define FINISH_STORE 0     // y = result
#define FINISH_ADD 1       // y = other + result
#define FINISH_SILU 2      // y = silu(gate) * up, gate and up being the two tiles of a pair
#define FINISH_GELU 3      // y = gelu_tanh(gate) * up, likewise
#define FINISH_SILU_WITH 4 // y = silu(other) * result
#define FINISH_GELU_WITH 5 // y = gelu_tanh(other) * result

inline float16 silu(float16 x) { return x / (1.0f + exp(-x)); }

// The tanh form of GELU: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). Said as x / (1 + e^(-2u)), which is the
// same and cancels nothing where tanh comes near -1.
inline float16 gelu_tanh(float16 x) {
    return x / (1.0f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

// activation(gate) * up, by FINISH_SILU or FINISH_GELU.
inline float16 gated(int finish, float16 gate, float16 up) {
    return (finish == FINISH_SILU ? silu(gate) : gelu_tanh(gate)) * up;
}

// Stores a pair of tiles (32 outputs, or 16 where the pair is gate and up) of one row.
inline void finish_pair(int finish, float16 first, float16 second, int pair, global const float* other, global float* y) {
    switch (finish) {
    case FINISH_ADD:
        first += vload16(2 * pair, other);
        second += vload16(2 * pair + 1, other);
        break;
    case FINISH_SILU:
    case FINISH_GELU: vstore16(gated(finish, first, second), pair, y); return;
    case FINISH_SILU_WITH:
        first *= silu(vload16(2 * pair, other));
        second *= silu(vload16(2 * pair + 1, other));
        break;
    case FINISH_GELU_WITH:
        first *= gelu_tanh(vload16(2 * pair, other));
        second *= gelu_tanh(vload16(2 * pair + 1, other));
        break;
    }
    vstore16(first, 2 * pair, y);
    vstore16(second, 2 * pair + 1, y);
}
