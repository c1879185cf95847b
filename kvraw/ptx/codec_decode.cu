// Decoder of what codec_encode.cu writes. A thread decodes one channel.
//
// Instead of dividing for the symbol's position in the distribution, the ends of the intervals are scaled to the present
// range and compared, which gives the same symbol: eight-way with thresholds kept in registers, then within a group of
// four that a 16-byte load brings. Only the distance of the code to the interval's lower end is kept, so the steps of
// the coder's renormalisation are plain shifts of it. ALPHABET is fixed by the builder.
#include "codec_args.h"

#define STRIDE (ALPHABET / 8)
#define GROUPS (ALPHABET / 4 + 1)

// A stream's words pass through a ring of shared memory, a column for each thread: at fixed tokens, the same for the whole
// warp, a thread puts in what it asked for at the last such token, and asks for more. No thread waits for another's loads.
#define RING 32
#define PERIOD 16 // tokens; they use up to 18 bits each, 9 words in all
#define BATCH 10
#define TARGET 20 // words in the ring or on their way: 9 for this period, 9 for the next, and 2 that a look ahead spans

struct Reader {
    u64 origin;   // address of the word that holds the first byte
    u64 begin, end; // of the stream
    u32 words;
    u32 first, last; // the words at the stream's ends, put together from its bytes alone
    u32 filled;   // words that went into the ring
    u32 asked;    // words on their way
    u32 head;     // the word of the next bit
    u32 used;     // its bits that are used up
    u32 coming[BATCH];
    u32 *ring;

    __device__ __forceinline__ u32 edge(u32 word) const
    {
        u32 value = 0;
#pragma unroll 1
        for (u32 k = 0; k < 4; ++k) {
            const u64 p = origin + (u64)word * 4 + k;
            value = value << 8 | (p >= begin && p < end ? load_u8(p) : 0);
        }
        return value;
    }

    __device__ __forceinline__ void open(u64 from, u64 to, u32 *column)
    {
        begin = from;
        end = to;
        ring = column;
        origin = from & ~3ull;
        words = (u32)((to - origin + 3) >> 2);
        first = edge(0);
        last = words > 1 ? edge(words - 1) : first;
        filled = asked = head = 0;
        used = (u32)(from & 3) * 8;
        turn();
        turn();
    }

    __device__ __forceinline__ void turn()
    {
#pragma unroll
        for (u32 j = 0; j < BATCH; ++j)
            if (j < asked) {
                const u32 word = filled + j;
                u32 value = __byte_perm(coming[j], 0, 0x0123);
                value = word + 1 == words ? last : word == 0 ? first : value;
                ring[(word % RING) * 32] = word < words ? value : 0;
            }
        filled += asked;
        asked = min(head + TARGET - filled, BATCH);
#pragma unroll
        for (u32 j = 0; j < BATCH; ++j) {
            const u32 word = filled + j;
            coming[j] = j < asked && word && word + 1 < words ? load_u32(origin + (u64)word * 4) : 0;
        }
    }

    __device__ __forceinline__ u32 peek() const
    {
        return __funnelshift_l(ring[((head + 1) % RING) * 32], ring[(head % RING) * 32], used);
    }

    __device__ __forceinline__ void skip(u32 count)
    {
        used += count;
        head += used / 32;
        used %= 32;
    }
};

__device__ __forceinline__ i64 length_at(const CodecArgs &a, u64 at)
{
    return a.flags & WIDE ? (i64)load_u64(a.lengths + at * 8) : (int)load_u32(a.lengths + at * 4);
}

extern "C" __global__ void __launch_bounds__(THREADS) CONCAT(kvraw_codec_decode_a, ALPHABET)(const CodecArgs a)
{
    __shared__ uint4 groups[WARPS][GROUPS * 32];
    __shared__ u32 rings[WARPS][RING * 32];
    __shared__ u32 faulty[THREADS];
    const u32 lane = threadIdx.x & 31, n = a.alphabet;
    const uint4 *const table = groups[threadIdx.x >> 5] + lane;
    u32 *const entries = (u32 *)groups[threadIdx.x >> 5];
    const u64 stream = (u64)blockIdx.x * THREADS + threadIdx.x, first = stream - lane;
    faulty[threadIdx.x] = 0;
    __syncthreads();
    for (u32 b = lane; b < GROUPS * 4; b += 32)
        for (u32 r = 0; r < 32; r += ROWS) {
            u32 low[ROWS], high[ROWS];
            read_ends(a, first + r, b, low, high);
#pragma unroll
            for (u32 k = 0; k < ROWS; ++k) {
                entries[((b / 4) * 32 + r + k) * 4 + b % 4] = low[k];
                if (b < n && high[k] <= low[k] && first + r + k < a.streams)
                    faulty[(threadIdx.x & ~31) + r + k] = b + 2;
            }
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
    in.open(a.bytes + start, a.bytes + end, rings[threadIdx.x >> 5] + lane);
    in.turn();
    u32 low = 0, high = 0xFFFFFFFF, distance = in.peek();
    in.skip(32);
    for (u32 t = 0; t < a.tokens; ++t, to += a.symbol_token) {
        if (t % PERIOD == 0)
            in.turn();
        const u32 bits = in.peek();
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
        distance = __funnelshift_l(bits, distance, same + straddles);
        in.skip(same + straddles);
    }
}
