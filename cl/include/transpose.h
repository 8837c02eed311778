// Squares of 16 x 16 values, transposed in registers.

// Parts of two vectors: __builtin_shufflevector is one instruction where OpenCL's own spelling may become many.
#define LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_QUADS(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_QUADS(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_PARTS(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_PARTS(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

// Transposes a 16 x 16 square: in[i * in_stride] lane j goes to out[j * out_stride] lane i.
inline void transpose(const float16* in, int in_stride, float16* out, int out_stride) {
    float16 a[16], b[16];
    #pragma unroll
    for (int i = 0; i < 16; i += 2) {
        a[i] = LOW_PAIRS(in[i * in_stride], in[(i + 1) * in_stride]);
        a[i + 1] = HIGH_PAIRS(in[i * in_stride], in[(i + 1) * in_stride]);
    }
    #pragma unroll
    for (int i = 0; i < 16; i += 4) { // b[i + c]: in parts of four lanes, columns c, 4 + c, 8 + c, 12 + c of rows i to i + 3
        b[i] = LOW_QUADS(a[i], a[i + 2]);
        b[i + 1] = HIGH_QUADS(a[i], a[i + 2]);
        b[i + 2] = LOW_QUADS(a[i + 1], a[i + 3]);
        b[i + 3] = HIGH_QUADS(a[i + 1], a[i + 3]);
    }
    #pragma unroll
    for (int c = 0; c < 4; c++) {
        float16 even0 = EVEN_PARTS(b[c], b[4 + c]), even1 = EVEN_PARTS(b[8 + c], b[12 + c]); // columns c, 8 + c
        float16 odd0 = ODD_PARTS(b[c], b[4 + c]), odd1 = ODD_PARTS(b[8 + c], b[12 + c]);     // columns 4 + c, 12 + c
        out[c * out_stride] = EVEN_PARTS(even0, even1);
        out[(8 + c) * out_stride] = ODD_PARTS(even0, even1);
        out[(4 + c) * out_stride] = EVEN_PARTS(odd0, odd1);
        out[(12 + c) * out_stride] = ODD_PARTS(odd0, odd1);
    }
}
