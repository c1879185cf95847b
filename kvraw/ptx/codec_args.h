// The argument block of the entropy coder's kernels. kvraw/codec/args.py holds the same structure as a numpy dtype; the
// table at the end carries the offsets into the PTX text, where the tests compare the two.
#include "arith.h"

enum Flags {
    PACKED = 1,  // streams lie back to back, and lengths holds inclusive prefix sums
    WIDE = 2,    // lengths holds int64, not int32
    CLAMP = 4,   // a symbol outside the alphabet counts as the nearest one inside, and is no fault
    SIGNED = 8   // symbols are int8, which matters where they are clamped
};

enum Fault {
    BAD_SYMBOL = 1,  // value: the symbol
    TOO_SMALL = 2,   // value: bytes needed
    BAD_CDF = 3,     // value: the entry that is not above the one before it
    BAD_LENGTH = 4   // value: the length or prefix sum
};

struct CodecArgs {
    u64 cdf;            // uint16 [streams, alphabet + 1]
    u64 symbols;        // bytes, addressed by the three strides
    u64 symbol_layer;   // bytes per layer
    u64 symbol_token;   // bytes per token
    u64 symbol_channel; // bytes per channel
    u64 bytes;          // the streams
    u64 bytes_size;
    u64 row;            // bytes from one stream's slot to the next, where they are not packed
    u64 lengths;        // one per stream
    u64 ends;           // int64 inclusive prefix sums, for packing
    u64 packed;         // where packing puts the streams
    u64 packed_size;
    u64 status;         // address of two words, or 0
    u64 streams;        // layers * channels
    u64 tokens_magic;   // divides by tokens
    u32 tokens;
    u32 tokens_shift;
    u32 channels;
    u32 alphabet;
    u32 flags;
    u32 reserved;
};

#define AT(field) (u32)(unsigned long long)&((CodecArgs *)0)->field
extern "C" __device__ const u32 kvraw_codec_layout[] = {
    AT(cdf), AT(symbols), AT(symbol_layer), AT(symbol_token), AT(symbol_channel), AT(bytes), AT(bytes_size), AT(row),
    AT(lengths), AT(ends), AT(packed), AT(packed_size), AT(status), AT(streams), AT(tokens_magic), AT(tokens),
    AT(tokens_shift), AT(channels), AT(alphabet), AT(flags), AT(reserved), (u32)sizeof(CodecArgs)};

// Symbols of one channel, one byte per token.
__device__ __forceinline__ u64 first_symbol(const CodecArgs &a, u64 stream)
{
    const u64 layer = stream / a.channels, channel = stream - layer * a.channels;
    return a.symbols + layer * a.symbol_layer + channel * a.symbol_channel;
}

// Entries b and b + 1 of eight neighbouring channels' distributions, the upper end of the last symbol and of what is not
// there at 65536. All loads are asked for before any is waited for.
#define ROWS 8
__device__ __forceinline__ void read_ends(const CodecArgs &a, u64 first, u32 b, u32 *low, u32 *high)
{
    const u32 width = a.alphabet + 1;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        const u64 entry = a.cdf + ((first + r) * width + b) * 2;
        const bool there = first + r < a.streams;
        low[r] = there && b < a.alphabet ? load_u16(entry) : 0x10000;
        high[r] = there && b + 1 < a.alphabet ? load_u16(entry + 2) : 0x10000;
    }
}

// The widest alphabet that a module takes decides how much shared memory a thread has.
#ifdef ALPHABET
#define THREADS (ALPHABET > 64 ? 32 : 64)
#define WARPS (THREADS / 32)
#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#endif
