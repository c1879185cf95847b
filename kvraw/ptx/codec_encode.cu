// Arithmetic coder: a 32-bit interval, 16-bit probabilities, bits written from the high end of each byte.
//
// A thread codes one channel. The interval's common leading bits leave all at once, and so do the steps in which the
// interval straddles the middle ("pending": bits that follow the next one, inverted). Output gathers in a register and
// leaves as 32-bit words. ALPHABET is fixed by the builder.
#include "codec_args.h"

#define PITCH 33

struct Writer {
    u64 gathered; // the low `filled` bits are still to be written
    u32 filled;   // below 32 between calls
    u32 at;       // bytes written, or that would have been
    u32 room;
    u64 to;
    bool words;   // `to` is aligned to words

    // Up to 32 bits.
    __device__ __forceinline__ void put(u32 value, u32 count)
    {
        gathered = (gathered << count) | value;
        filled += count;
        if (filled >= 32) {
            filled -= 32;
            const u32 word = (u32)(gathered >> filled);
            if (at + 4 <= room) {
                if (words) {
                    store_u32(to + at, __byte_perm(word, 0, 0x0123));
                } else {
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        store_u8(to + at + k, word >> (24 - 8 * k));
                }
            }
            at += 4;
        }
    }

    // A bit, and `pending` times its inverse.
    __device__ __forceinline__ void put_run(u32 bit, u32 pending)
    {
        put(bit, 1);
        while (pending) {
            const u32 count = pending < 31 ? pending : 31;
            put(bit ? 0 : (1u << count) - 1, count);
            pending -= count;
        }
    }

    __device__ __forceinline__ u32 finish()
    {
        for (; filled >= 8; ++at) {
            filled -= 8;
            if (at < room)
                store_u8(to + at, (u32)(gathered >> filled));
        }
        if (filled) {
            if (at < room)
                store_u8(to + at, (u32)(gathered << (8 - filled)));
            ++at;
        }
        return at;
    }
};

// The next eight symbols of a channel, zeros behind the last. They are put into one word only where they are used, so
// that nothing waits for them before.
__device__ __forceinline__ void read_ahead(u32 *symbols, u64 at, u64 step, u32 left)
{
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
        symbols[j] = j < left ? load_u8(at + j * step) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) CONCAT(kvraw_codec_encode_a, ALPHABET)(const CodecArgs a)
{
    // A symbol's interval: its lower end, and its upper end less one, which fits 16 bits.
    __shared__ u32 intervals[WARPS][ALPHABET * PITCH];
    __shared__ u32 faulty[THREADS];
    const u32 lane = threadIdx.x & 31, n = a.alphabet;
    u32 *const table = intervals[threadIdx.x >> 5];
    const u64 stream = (u64)blockIdx.x * THREADS + threadIdx.x, first = stream - lane;
    faulty[threadIdx.x] = 0;
    __syncthreads();
    for (u32 b = lane; b < n; b += 32)
        for (u32 r = 0; r < 32; r += ROWS) {
            u32 low[ROWS], high[ROWS];
            read_ends(a, first + r, b, low, high);
#pragma unroll
            for (u32 k = 0; k < ROWS; ++k) {
                table[b * PITCH + r + k] = (low[k] & 0xFFFF) | (high[k] - 1) << 16;
                if (high[k] <= low[k] && first + r + k < a.streams)
                    faulty[(threadIdx.x & ~31) + r + k] = b + 2;
            }
        }
    __syncthreads();
    if (stream >= a.streams)
        return;
    const u64 length = a.lengths + stream * 4;
    if (faulty[threadIdx.x]) {
        report(a.status, stream, BAD_CDF, faulty[threadIdx.x] - 1);
        store_u32(length, 0);
        return;
    }
    Writer out;
    out.gathered = 0;
    out.filled = out.at = 0;
    out.room = a.row < 0x7FFFFFF0 ? (u32)a.row : 0x7FFFFFF0;
    out.to = a.bytes + stream * a.row;
    out.words = ((a.bytes | a.row) & 3) == 0;
    u64 at = first_symbol(a, stream);
    u32 low = 0, high = 0xFFFFFFFF, pending = 0, bad = 0;
    u32 next[8];
    read_ahead(next, at, a.symbol_token, a.tokens);
    for (u32 t = 0; t < a.tokens; t += 8) {
        u64 now = 0;
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
            now |= (u64)next[j] << 8 * j;
        at += 8 * a.symbol_token;
        read_ahead(next, at, a.symbol_token, a.tokens - t > 8 ? a.tokens - t - 8 : 0);
        const u32 count = a.tokens - t < 8 ? a.tokens - t : 8;
        u32 following = 0;
#pragma unroll 1
        for (u32 j = 0; j <= count; ++j) {
            const u32 interval = following;
            u32 symbol = (u32)now & 0xFF;
            now >>= 8;
            if (symbol >= n) {
                bad = symbol;
                symbol = 0;
            }
            following = table[symbol * PITCH + lane];
            if (j == 0)
                continue;
            const u32 from = interval & 0xFFFF, to = (interval >> 16) + 1, range = high - low;
            high = low + (u32)(((u64)range * to + to) >> 16) - 1;
            low += (u32)(((u64)range * from + from) >> 16);
            const u32 same = __clz(low ^ high);
            if (same) {
                const u32 settled = low >> (32 - same), all = same + pending;
                if (all <= 32) {
                    // Pending ones below the first settled bit; where that is set, the carry turns them over.
                    out.put(settled + (((1u << pending) - 1) << (same - 1)), all);
                } else {
                    out.put_run(settled >> (same - 1), pending);
                    out.put(settled & ((1u << (same - 1)) - 1), same - 1);
                }
                pending = 0;
                low <<= same;
                high = __funnelshift_l(0xFFFFFFFF, high, same);
            }
            const u32 straddles = __clz(~((low & ~high) << 1));
            low = (low << straddles) & 0x7FFFFFFF;
            high = __funnelshift_l(0xFFFFFFFF, high, straddles) | 0x80000000;
            pending += straddles;
        }
    }
    out.put_run(low >> 30 & 1, pending + 1);
    const u32 need = out.finish();
    store_u32(length, need);
    if (bad)
        report(a.status, stream, BAD_SYMBOL, bad);
    else if (need > out.room)
        report(a.status, stream, TOO_SMALL, need);
}
