// Decoder of what codec_encode.cu writes. A thread decodes one channel.
//
// Instead of dividing for the symbol's position in the distribution, the ends of the intervals are scaled to the present
// range and compared, which gives the same symbol: eight-way with thresholds kept in registers, then within a group of
// four that a 16-byte load brings. Only the distance of the code to the interval's lower end is kept, so the steps of
// the coder's renormalisation are plain shifts of it. ALPHABET is fixed by the builder.
#include "codec_args.h"

#define STRIDE (ALPHABET / 8)
#define GROUPS (ALPHABET / 4 + 1)

// Reads a stream in aligned words; bytes behind its end are zeros, and nothing outside the buffer is touched.
struct Reader {
    u64 at;          // of the next word
    u64 end;         // of the stream
    u64 begin_safe, end_safe; // of the buffer
    u32 word[3];     // the bits are at `used` in word[0]
    u32 used;

    __device__ __forceinline__ u32 fetch()
    {
        const u64 p = at;
        at += 4;
        if (p >= end)
            return 0;
        u32 w = 0;
        if (p >= begin_safe && p + 4 <= end_safe) {
            w = __byte_perm(load_u32(p), 0, 0x0123);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (p + k >= begin_safe && p + k < end_safe)
                    w |= load_u8(p + k) << (24 - 8 * k);
        }
        const u32 left = end - p < 4 ? (u32)(end - p) : 4;
        return left < 4 ? w & ~(0xFFFFFFFF >> (8 * left)) : w;
    }

    __device__ __forceinline__ void open(u64 start)
    {
        at = start & ~3ull;
        used = (u32)(start & 3) * 8;
        word[0] = fetch();
        word[1] = fetch();
        word[2] = fetch();
    }

    __device__ __forceinline__ u32 peek() const
    {
        return __funnelshift_l(word[1], word[0], used);
    }

    __device__ __forceinline__ void skip(u32 count)
    {
        used += count;
        if (used >= 32) {
            used -= 32;
            word[0] = word[1];
            word[1] = word[2];
            word[2] = fetch();
        }
    }
};

__device__ __forceinline__ i64 length_at(const CodecArgs &a, u64 at)
{
    return a.flags & WIDE ? (i64)load_u64(a.lengths + at * 8) : (int)load_u32(a.lengths + at * 4);
}

extern "C" __global__ void __launch_bounds__(THREADS) CONCAT(kvraw_codec_decode_a, ALPHABET)(const CodecArgs a)
{
    __shared__ uint4 groups[WARPS][GROUPS * 32];
    __shared__ u32 faulty[THREADS];
    const u32 lane = threadIdx.x & 31, n = a.alphabet;
    const uint4 *const table = groups[threadIdx.x >> 5] + lane;
    u32 *const entries = (u32 *)groups[threadIdx.x >> 5];
    const u64 stream = (u64)blockIdx.x * THREADS + threadIdx.x, first = stream - lane;
    faulty[threadIdx.x] = 0;
    __syncthreads();
    const u64 rows = a.cdf + first * (n + 1) * 2;
#pragma unroll 4
    for (u32 r = 0; r < 32; ++r)
        if (first + r < a.streams)
            for (u32 b = lane; b < GROUPS * 4; b += 32) {
                const u64 entry = rows + (r * (n + 1) + b) * 2;
                const u32 low = b < n ? load_u16(entry) : 0x10000;
                entries[((b / 4) * 32 + r) * 4 + b % 4] = low;
                if (b + 1 < n && load_u16(entry + 2) <= low)
                    faulty[(threadIdx.x & ~31) + r] = b + 2;
            }
    __syncthreads();
    if (stream >= a.streams)
        return;
    u64 to = first_symbol(a, stream);
    i64 start, end;
    if (a.flags & PACKED) {
        start = stream ? length_at(a, stream - 1) : 0;
        end = length_at(a, stream);
    } else {
        start = (i64)(stream * a.row);
        end = start + length_at(a, stream);
        if (end < start || end > start + (i64)a.row) {
            report(a.status, stream, BAD_LENGTH, (u64)(end - start));
            end = start;
        }
    }
    if (start < 0 || end < start || end > (i64)a.bytes_size) {
        report(a.status, stream, BAD_LENGTH, (u64)end);
        start = end = 0;
    }
    if (faulty[threadIdx.x]) {
        report(a.status, stream, BAD_CDF, faulty[threadIdx.x] - 1);
        for (u32 t = 0; t < a.tokens; ++t, to += a.symbol_token)
            store_u8(to, 0);
        return;
    }
    u32 pivot[7];
#pragma unroll
    for (u32 k = 0; k < 7; ++k)
        pivot[k] = entries[((k + 1) * STRIDE / 4 * 32 + lane) * 4];
    Reader in;
    in.begin_safe = a.bytes;
    in.end_safe = a.bytes + a.bytes_size;
    in.end = a.bytes + end;
    in.open(a.bytes + start);
    u32 low = 0, high = 0xFFFFFFFF, distance = in.peek();
    in.skip(32);
    for (u32 t = 0; t < a.tokens; ++t, to += a.symbol_token) {
        const u32 range = high - low;
        distance = min(distance, range); // only a damaged stream, or a distribution that does not start at zero, exceeds it
        const u64 limit = ((u64)distance + 1) << 16;
#define SCALED(end) ((u64)range * (end) + (end))
        u32 base = 0;
#pragma unroll
        for (u32 k = 0; k < 7; ++k)
            base += SCALED(pivot[k]) < limit ? STRIDE : 0;
#pragma unroll
        for (u32 width = STRIDE; width > 4; width /= 2) {
            const u32 middle = base + width / 2;
            base = SCALED(entries[(middle / 4 * 32 + lane) * 4]) < limit ? middle : base;
        }
        const uint4 c = table[base / 4 * 32];
        const u64 s1 = SCALED(c.y), s2 = SCALED(c.z), s3 = SCALED(c.w);
        u64 from = SCALED(c.x), upto = s1;
        u32 symbol = base;
        if (s1 < limit) {
            from = s1;
            upto = s2;
            ++symbol;
        }
        if (s2 < limit) {
            from = s2;
            upto = s3;
            ++symbol;
        }
        if (s3 < limit) {
            const u32 following = table[(base / 4 + 1) * 32].x;
            from = s3;
            upto = SCALED(following);
            ++symbol;
        }
        store_u8(to, symbol);
        high = low + (u32)(upto >> 16) - 1;
        low += (u32)(from >> 16);
        distance -= (u32)(from >> 16);
        const u32 same = __clz(low ^ high);
        low <<= same;
        high = __funnelshift_l(0xFFFFFFFF, high, same);
        const u32 straddles = __clz(~((low & ~high) << 1));
        low = (low << straddles) & 0x7FFFFFFF;
        high = __funnelshift_l(0xFFFFFFFF, high, straddles) | 0x80000000;
        distance = __funnelshift_l(in.peek(), distance, same + straddles);
        in.skip(same + straddles);
    }
}
