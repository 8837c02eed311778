// The products of all experts in one launch each, for one weight format. Slots and blocks: cl/moe.cl says what they are. Rows of
// a slot are f16, one after the other, so a block's rows lie together; rows of the next expert that a load brings along are
// multiplied for nothing and not stored.
//
// Matrices of the experts lie one below the other, `pairs` pairs of tiles each. A sub-group takes one pair through all rows of
// a block, 32 at a time, and no more blocks of 8 than there are: most experts have few rows. Global size: [pairs in teams][the
// most blocks there can be]; unused blocks have no slots.

#define TEAM 8          // sub-groups of a work-group: neighbouring pairs, so that they share the rows in the cache
#define INNER_SHIFT 4   // inner rows are stored divided by 2^4: f16 holds them up to a million

#ifdef HAS_MATRIX_ENGINE
#define SWITCH_BLOCKS(count, CALL)                                                                                    \
    switch ((count + 7) / 8) {                                                                                        \
    case 1: CALL(1) break;                                                                                            \
    case 2: CALL(2) break;                                                                                            \
    case 3: CALL(3) break;                                                                                            \
    default: CALL(4)                                                                                                  \
    }
#else // one copy of the code is enough where none is unrolled
#define SWITCH_BLOCKS(count, CALL)                                                                                    \
    {                                                                                                                 \
        const int blocks = (count + 7) / 8;                                                                           \
        CALL(blocks)                                                                                                  \
    }
#endif

// Blocks of 8 rows of one expert through a pair of gate and up.
SPECIALISED void gate_up_rows(const int BLOCKS, int count, Rows x, int row, global const uchar* tiles, uint tile_bytes,
                              uint spans, uint shared_scales, int finish, global const float* factors,
                              global ushort* inner, int inner_stride, int alone, ulong inner_plane) {
    float8 gate[4], up[4];
    rows_through_pair(BLOCKS, x, row, tiles, tile_bytes, 0, spans, shared_scales, gate, up);
    UNROLL for (int m = 0; m < BLOCKS; m++) {
        float g[8], u[8];
        vstore8(gate[m], 0, g);
        vstore8(up[m], 0, u);
        UNROLL for (int r = 0; r < 8; r++) {
            const int at = m * 8 + r;
            if (at < count) {
                const float factor = factors[row + at];
                float left = gated(finish, g[r] * factor, u[r] * factor) * (1.0f / (1 << INNER_SHIFT));
                global ushort* to = inner + (size_t)(row + at) * inner_stride;
                UNROLL for (int t = 0; t < TERMS; t++) {
                    const half value = convert_half(left);
                    intel_sub_group_block_write_us(to + t * inner_plane, as_ushort(value));
                    if (alone) intel_sub_group_block_write_us(to + t * inner_plane + LANES, (ushort)0);
                    left -= convert_float(value);
                }
            }
        }
    }
}

// Blocks of 8 rows of one expert through a pair of tiles of the second product.
SPECIALISED void down_rows(const int BLOCKS, int count, Rows x, int row, global const uchar* tiles, uint tile_bytes,
                           uint spans, uint shared_scales, global float* y, int stride) {
    float8 first[4], second[4];
    rows_through_pair(BLOCKS, x, row, tiles, tile_bytes, 0, spans, shared_scales, first, second);
    UNROLL for (int m = 0; m < BLOCKS; m++) {
        float a[8], b[8];
        vstore8(first[m] * (float)(1 << INNER_SHIFT), 0, a);
        vstore8(second[m] * (float)(1 << INNER_SHIFT), 0, b);
        UNROLL for (int r = 0; r < 8; r++) {
            const int at = m * 8 + r;
            if (at < count) {
                global float* to = y + (size_t)(row + at) * stride;
                store_lanes(to, a[r]);
                store_lanes(to + LANES, b[r]);
            }
        }
    }
}

// activation(gate) * up of every slot: f16 [slots][inner_stride], of which whole 32 columns are written.
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void
expert_gate_up(global const uchar* weights, global const int4* blocks, global const ushort* x, global const float* sums,
               global const float* factors, global ushort* inner, int finish, int pairs, int spans, int tile_bytes,
               int slots, int x_stride, int sums_stride, int inner_stride, int shared_scales, ulong plane, ulong inner_plane) {
    const int4 block = blocks[get_group_id(1)];
    const int pair = get_group_id(0) * TEAM + get_sub_group_id();
    if (block.z == 0 || pair >= pairs) return;
    global const uchar* tiles = weights + ((size_t)block.x * pairs + pair) * 2 * tile_bytes;
    const Rows input = {{x, x_stride, slots, x_stride}, plane, sums, sums_stride};
    inner += pair * LANES;
    const int alone = pair % 2 == 0 && pair == pairs - 1; // the other half of its 32 columns is nobody's
    for (int done = 0; done < block.z; done += 32) {
        const int count = min(32, block.z - done), row = block.y + done;
#define CALL(N) gate_up_rows(N, count, input, row, tiles, tile_bytes, spans, shared_scales, finish, factors, inner, inner_stride, alone, inner_plane);
        SWITCH_BLOCKS(count, CALL)
#undef CALL
    }
}

// Sums over each 32 columns of inner rows, for formats with offsets: f32 [columns / 32][sums_stride]. Global size: slots x 16,
// in work-groups of a sub-group.
SUB_GROUP __attribute__((reqd_work_group_size(LANES, 1, 1))) kernel void
sum_inner(global const ushort* inner, global float* sums, int inner_columns, int inner_stride, int sums_stride,
          ulong inner_plane) {
    const int slot = get_group_id(0);
    inner += (size_t)slot * inner_stride;
    for (int g = 0; g < inner_columns / GROUP; g++) {
        float mine = 0.0f;
        UNROLL for (int t = 0; t < TERMS; t++) {
            const half2 both = as_half2(intel_sub_group_block_read_us2(inner + t * inner_plane + g * GROUP));
            mine += convert_float(both.x) + convert_float(both.y);
        }
        const float sum = sub_group_reduce_add(mine);
        if (get_sub_group_local_id() == 0) sums[(size_t)g * sums_stride + slot] = sum;
    }
}

// y = the second product of each slot, f32 [slots][stride].
SUB_GROUP __attribute__((reqd_work_group_size(LANES * TEAM, 1, 1))) kernel void
expert_down(global const uchar* weights, global const int4* blocks, global const ushort* inner, global const float* sums,
            global float* y, int pairs, int spans, int tile_bytes, int slots, int inner_columns, int inner_stride,
            int sums_stride, int stride, int shared_scales, ulong inner_plane) {
    const int4 block = blocks[get_group_id(1)];
    const int pair = get_group_id(0) * TEAM + get_sub_group_id();
    if (block.z == 0 || pair >= pairs) return;
    global const uchar* tiles = weights + ((size_t)block.x * pairs + pair) * 2 * tile_bytes;
    const Rows input = {{inner, inner_columns, slots, inner_stride}, inner_plane, sums, sums_stride};
    y += pair * 2 * LANES;
    for (int done = 0; done < block.z; done += 32) {
        const int count = min(32, block.z - done), row = block.y + done;
#define CALL(N) down_rows(N, count, input, row, tiles, tile_bytes, spans, shared_scales, y, stride);
        SWITCH_BLOCKS(count, CALL)
#undef CALL
    }
}
