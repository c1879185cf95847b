// The argument block of rope.cu. kvraw/rope/args.py holds the same structure as a numpy dtype; the table at the end
// carries the offsets into the PTX text, where the tests compare the two.
#include "arith.h"

enum Flags {
    INTERLEAVED = 1, // pairs are neighbours; else (neox) a pair is an element and the one half a rotary dimension on
    OLD_I32 = 2,     // old positions are int32, not int64
    NEW_I32 = 4,
    CHECK = 8,       // a position outside [0, limit) is reported, and its token left alone
    OLD_RANGE = 16,  // old_positions is the first token's position, and the others follow
    NEW_RANGE = 32
};

struct RopeArgs {
    u64 key;
    u64 cache;         // rows of cosines, then sines
    u64 old_positions;
    u64 new_positions;
    u64 status;        // address of two words, or 0
    u64 units;         // layers * tokens * groups * vectors
    u64 tokens;        // of a layer
    u64 key_layer;     // bytes per layer
    u64 key_token;     // bytes per token
    u64 key_head;      // bytes per head
    u64 cache_row;     // bytes per position
    u64 limit;         // positions of the cache
    u64 tokens_magic;
    u64 groups_magic;
    u64 vectors_magic;
    u32 tokens_shift;
    u32 groups_shift;
    u32 vectors_shift;
    u32 groups;        // of heads
    u32 vectors;       // half the rotary dimension, in vectors
    u32 heads;
    u32 half;          // bytes of half the rotary dimension
    u32 flags;
};

#define AT(field) (u32)(unsigned long long)&((RopeArgs *)0)->field
extern "C" __device__ const u32 kvraw_rope_layout[] = {
    AT(key), AT(cache), AT(old_positions), AT(new_positions), AT(status), AT(units), AT(tokens), AT(key_layer),
    AT(key_token), AT(key_head), AT(cache_row), AT(limit), AT(tokens_magic), AT(groups_magic), AT(vectors_magic),
    AT(tokens_shift), AT(groups_shift), AT(vectors_shift), AT(groups), AT(vectors), AT(heads), AT(half), AT(flags),
    (u32)sizeof(RopeArgs)};
