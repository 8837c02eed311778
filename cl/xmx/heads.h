// Where heads of HEAD values (16, 32, 64, 128, 256 or 512) lie, for what writes them (rotate.cl) and what reads them
// (attention.cl). A *look* is one query head of one row; those of one key-value head lie together, `group` for each row, so that
// what they share is read once.
//     queries  f16 pairs [key-value heads][looks / 16][KEY / 16][terms][8][16], the second operand of a product; behind them
//              f32 [key-value heads][looks / 16][16], the factor that a look's scores are multiplied by
//     keys     f16 [key-value heads][capacity][KEY]
//     values   f16 [key-value heads][HEAD][capacity], so that a row of them is an operand, too
// Position p lies in slot p % capacity; capacity is a multiple of 64 and of BLOCK, so no block straddles the end of a ring.
//
// Keys may hold anything where nothing was stored: who does not see a position leaves its score out. A weight of zero does not
// leave a value out that is no number, so all values must be numbers: where a row has others, its key becomes NaN instead, which
// reaches those who see the row, and nobody else.

#define KEY (HEAD < 32 ? 32 : HEAD)          // values of a key, zero-padded: a block that is loaded has 32
#define TEAM (HEAD < 64 ? 2 : HEAD / 32)     // sub-groups of a work-group that attends
#define OWN (HEAD / TEAM)                    // values of the results that one of them owns
#define BLOCK (16 * TEAM)                    // positions that they take at a time, from multiples of BLOCK on
#define QUERY_TERMS 2                        // f16 has eleven bits of a query or of a weight, two of them as many as f32
#define QUERY_TILE (KEY / 16 * QUERY_TERMS * 128) // words of 16 looks

inline size_t query_tiles(int looks) { return (looks + LANES - 1) / LANES; }

// Where the factors begin, in words.
inline size_t query_factors(int looks, int kv_heads) { return query_tiles(looks) * kv_heads * QUERY_TILE; }
