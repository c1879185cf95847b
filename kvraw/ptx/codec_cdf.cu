// Counts each channel's symbols and turns the counts into a cumulative distribution in 16 bits.
//
// A thread counts one channel, in a column of shared memory of its own; a warp's threads read neighbouring channels, and
// write the rows of the result together. ALPHABET is fixed by the builder.
#include "codec_args.h"

#define PITCH 33 // words per bin: neighbouring bins of a channel, and of a bin the channels, lie in different banks
#define AHEAD 16 // symbols read at once, while those before them are counted

__device__ __forceinline__ void read_ahead(u32 *symbols, u64 at, u64 step, u32 left)
{
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j)
        symbols[j] = j < left ? load_u8(at + j * step) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) CONCAT(kvraw_codec_cdf_a, ALPHABET)(const CodecArgs a)
{
    __shared__ u32 counts[WARPS][(ALPHABET + 1) * PITCH];
    const u32 lane = threadIdx.x & 31;
    u32 *const mine = counts[threadIdx.x >> 5];
    const u64 stream = (u64)blockIdx.x * THREADS + threadIdx.x, first = stream - lane;
    const u32 top = a.alphabet - 1;
    for (u32 b = 0; b <= a.alphabet; ++b)
        mine[b * PITCH + lane] = 0;
    if (stream < a.streams) {
        u64 at = first_symbol(a, stream);
        u32 bad = 0, next[AHEAD];
        read_ahead(next, at, a.symbol_token, a.tokens);
        for (u32 t = 0; t < a.tokens; t += AHEAD) {
            u64 low = 0, high = 0;
#pragma unroll
            for (u32 j = 0; j < AHEAD / 2; ++j) {
                low |= (u64)next[j] << 8 * j;
                high |= (u64)next[j + AHEAD / 2] << 8 * j;
            }
            at += AHEAD * a.symbol_token;
            read_ahead(next, at, a.symbol_token, a.tokens - t > AHEAD ? a.tokens - t - AHEAD : 0);
            const u32 count = a.tokens - t < AHEAD ? a.tokens - t : AHEAD;
            // A loop, not a list of steps: the assembler would move the loads behind most of them.
#pragma unroll 1
            for (u32 j = 0; j < count; ++j) {
                u32 s = (u32)low & 0xFF;
                low = low >> 8 | high << 56;
                high >>= 8;
                if (s > top) {
                    bad = s;
                    s = (a.flags & SIGNED) && s > 127 ? 0 : top;
                }
                ++mine[s * PITCH + lane];
            }
        }
        if (bad && !(a.flags & CLAMP))
            report(a.status, stream, BAD_SYMBOL, bad);
        u64 sum = 0;
        for (u32 b = 0; b <= a.alphabet; ++b) {
            const u32 count = mine[b * PITCH + lane];
            const u64 share = a.tokens ? divide((0xFFFF - a.alphabet) * sum, a.tokens_magic, a.tokens_shift) : 0;
            mine[b * PITCH + lane] = (u32)share + b;
            sum += count;
        }
    }
    __syncthreads();
    const u32 width = a.alphabet + 1;
    const u64 rows = a.cdf + first * width * 2;
    for (u32 r = 0; r < 32 && first + r < a.streams; ++r)
        for (u32 b = lane; b < width; b += 32)
            store_u16(rows + (r * width + b) * 2, mine[b * PITCH + r]);
}
