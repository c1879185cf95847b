// One kernel for every copy plan: both sides affine in (item, d0..d3), each with an optional base table, an optional
// index vector split by a page size, and bounds. VEC (bytes per access: 16, 8, 4, 2 or 1) is fixed by the builder.
//
// A warp takes 32 segments of at most 128 vectors at a time. Each lane works out the two addresses of one segment; then
// the warp walks all vectors of the 32 segments, taking the addresses from the owning lane by shuffle, so that every
// thread keeps UNROLL independent loads in flight whatever the run size.
//
// With PACED, each UNIT of bytes is stored no sooner than its turn by the clock. Turns are given out by a word in device
// memory, shared by all launches that name it: the time from which on the link is free. A turn adds the time that its
// bytes take at the launch's rate, so launches beside each other share the rate, in whatever order they come. While the
// link's other direction is in use, they take longer: both directions together reach less than each on its own.
#include "copy_args.h"

#define UNROLL 8

#if VEC == 16
typedef uint4 vec_t;
#define LOAD(r, p, ok)                                                                                                  \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }" \
                 : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)                                                          \
                 : "l"(p), "r"(ok))
#define STORE(r, p, ok)                                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.cs.v4.u32 [%4], {%0, %1, %2, %3}; }" ::"r"(r.x), \
                 "r"(r.y), "r"(r.z), "r"(r.w), "l"(p), "r"(ok)                                                \
                 : "memory")
#elif VEC == 8
typedef uint2 vec_t;
#define LOAD(r, p, ok)                                                                                         \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }" \
                 : "+r"(r.x), "+r"(r.y)                                                                        \
                 : "l"(p), "r"(ok))
#define STORE(r, p, ok)                                                                                             \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.cs.v2.u32 [%2], {%0, %1}; }" ::"r"(r.x), "r"(r.y), \
                 "l"(p), "r"(ok)                                                                                    \
                 : "memory")
#else
typedef unsigned int vec_t;
#if VEC == 4
#define TYPE "u32"
#elif VEC == 2
#define TYPE "u16"
#elif VEC == 1
#define TYPE "u8"
#else
#error "VEC must be 16, 8, 4, 2 or 1"
#endif
#define LOAD(r, p, ok)                                                                                     \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate." TYPE " %0, [%1]; }" \
                 : "+r"(r)                                                                                 \
                 : "l"(p), "r"(ok))
#define STORE(r, p, ok)                                                                                            \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.cs." TYPE " [%1], %0; }" ::"r"(r), "l"(p), "r"(ok) \
                 : "memory")
#endif

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

// n / d for n < 2^63, from magic = ceil(2^(63 + shift) / d) and shift = ceil(log2 d).
__device__ __forceinline__ u64 divide(u64 n, u64 magic, u32 shift)
{
    return __umul64hi(magic, n << 1) >> shift;
}

// The address of a run on one side, 0 where nothing is to be copied. A bad index goes into the status word.
__device__ __forceinline__ u64 locate(const CopyArgs &a, const CopySide &s, u32 which, u64 item, const u32 *d)
{
    i64 index = (i64)item;
    if (s.flags & INDEX_INLINE)
        index = (i64)a.words[s.index + item];
    else if (s.flags & INDEX_I32)
        index = ((const int *)s.index)[item];
    else if (s.flags & INDEX_I64)
        index = ((const i64 *)s.index)[item];
    if (index < 0 && (s.flags & SKIP_NEGATIVE))
        return 0;
    if ((s.flags & CHECK) && (u64)index >= s.limit) {
        if (a.status)
            *(ulonglong2 *)a.status = make_ulonglong2(((item + 1) << 1) | which, (u64)index);
        return 0;
    }
    const u64 outer = divide((u64)index, s.page_magic, s.page_shift), inner = (u64)index - outer * s.page;
    u64 entry = outer * s.table_outer, offset = outer * s.outer + inner * s.inner;
#pragma unroll
    for (int k = 0; k < DIMS; ++k) {
        entry += d[k] * s.table_stride[k];
        offset += d[k] * s.stride[k];
    }
    return offset + (s.flags & TABLE_INLINE ? a.words[s.table + entry] : ((const u64 *)s.table)[entry]);
}

#ifdef PACED
#define UNIT (4096 / VEC) // vectors
#define UNIT_AT(step) (end - (step) < UNIT ? end - (step) : UNIT)
#define NEVER (1ull << 36)  // 4 s: no turn is that far ahead but by a clock that was set back
#define AHEAD (1ull << 30)  // 67 ms
#define BEHIND (1ull << 18) // 16 us

// Sixteenths of a nanosecond. The clock may tick as rarely as once a microsecond: turns add up all the same.
__device__ __forceinline__ u64 read_clock()
{
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t << 4;
}

// The turn of what takes some time, from a word. An idle link's time is lost but for the slack.
__device__ __forceinline__ u64 take_turn(u64 word, u64 slack, u64 time)
{
    u64 turn;
    asm volatile("red.global.max.u64 [%0], %1;" ::"l"(word), "l"(read_clock() - slack) : "memory");
    asm volatile("atom.global.add.u64 %0, [%1], %2;" : "=l"(turn) : "l"(word), "l"(time) : "memory");
    return turn;
}

__device__ __forceinline__ void await_turn(u64 word, u64 turn)
{
    for (;;) {
        const u64 now = read_clock(), left = turn - now;
        if ((i64)left <= 0)
            return;
        if (left > NEVER) {
            asm volatile("{ .reg .u64 old; atom.global.exch.b64 old, [%0], %1; }" ::"l"(word), "l"(now) : "memory");
            return;
        }
        asm volatile("nanosleep.u32 %0;" ::"r"((u32)(left >> 5))); // sleeps for up to twice that
    }
}

// Whether the link is in use from a direction whose time this is. It lies ahead where turns are waited for, and not far
// behind where they are taken at all; a time of nothing is neither.
__device__ __forceinline__ bool in_use(u64 time)
{
    return read_clock() + AHEAD - time < AHEAD + BEHIND;
}

// Waits for the turn of some vectors. The time of the link's other direction comes meanwhile; where that is in use, later
// turns come later.
__device__ __forceinline__ void await_turn_beside(const CopyArgs &a, u64 turn, u32 vectors)
{
    u64 other = 0;
    if (a.pace_extra)
        asm volatile("atom.global.max.u64 %0, [%1], 0;" : "=l"(other) : "l"(a.pace_other) : "memory"); // past L1
    await_turn(a.pace, turn);
    if (a.pace_extra && in_use(other))
        asm volatile("red.global.add.u64 [%0], %1;" ::"l"(a.pace), "l"(vectors * a.pace_extra >> 8) : "memory");
}
#define KERNEL CONCAT(kvraw_copy_paced_v, VEC)
#else
#define KERNEL CONCAT(kvraw_copy_v, VEC)
#endif

extern "C" __global__ void __launch_bounds__(1024) KERNEL(const CopyArgs args)
{
    const u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const u32 total = args.segment_vectors * 32;
    for (u64 first = ((u64)blockIdx.x * warps + (threadIdx.x >> 5)) * 32; first < args.segments;
         first += (u64)gridDim.x * warps * 32) {
        // An offset that the compiler cannot see through keeps it from hoisting the whole argument block into registers;
        // the assembler folds it away, so the fields are read from the constant bank where they are used.
        u64 zero;
        asm volatile("mov.u64 %0, 0;" : "=l"(zero));
        const CopyArgs &a = *(const CopyArgs *)((const char *)&args + zero);
        const u64 segment = first + lane;
        u64 src = 0, dst = 0;
        u32 vectors = 0;
        if (segment < a.segments) {
            u64 rest = divide(segment, a.split_magic, a.split_shift);
            const u64 part = segment - rest * a.split;
            u32 d[DIMS];
#pragma unroll
            for (int k = 0; k < DIMS; ++k) {
                const u64 q = divide(rest, a.magic[k], a.shift[k]);
                d[k] = (u32)(rest - q * a.size[k]);
                rest = q;
            }
            const u64 item = a.first_item + rest;
            src = locate(a, a.src, 0, item, d);
            dst = src ? locate(a, a.dst, 1, item, d) : 0;
            const u64 begin = part * a.segment_vectors, left = a.run_vectors - begin;
            vectors = dst == 0 ? 0 : left < a.segment_vectors ? (u32)left : a.segment_vectors;
            src += begin * VEC;
            dst += begin * VEC;
        }
#ifdef PACED
        const u32 copied = __ballot_sync(~0u, vectors != 0); // what is left out takes no turns
        const u32 end = (32 - __clz(copied)) * a.segment_vectors;
        u64 turn = 0;
        if (lane == 0 && end && a.pace && a.pace_mean) // all of them at once: in the long run that makes no difference
            await_turn(a.pace + 8, take_turn(a.pace + 8, a.pace_credit, end * a.pace_mean >> 8));
#else
        const u32 end = total;
#endif
        for (u32 step = 0; step < end; step += 32 * UNROLL) {
#ifdef PACED
            const bool first_of_unit = lane == 0 && step % UNIT == 0 && a.pace && a.pace_cost;
            if (first_of_unit)
                turn = take_turn(a.pace, a.pace_slack, UNIT_AT(step) * a.pace_cost >> 8);
#endif
            vec_t r[UNROLL] = {};
            u32 valid = 0;
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const u32 v = step + j * 32 + lane, owner = __umulhi(args.vector_magic, v << 1) & 31;
                const u32 at = v - owner * args.segment_vectors;
                const u64 p = __shfl_sync(~0u, src, owner) + at * VEC;
                const u32 ok = v < total && at < __shfl_sync(~0u, vectors, owner);
                valid |= ok << j;
                LOAD(r[j], p, ok);
            }
#ifdef PACED
            if (first_of_unit)
                await_turn_beside(a, turn, UNIT_AT(step));
#endif
            // The lane read anew: positions computed again cost less than the registers that would hold them.
            u32 lane_again;
            asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_again));
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const u32 v = step + j * 32 + lane_again, owner = __umulhi(args.vector_magic, v << 1) & 31;
                const u32 at = v - owner * args.segment_vectors;
                const u64 p = __shfl_sync(~0u, dst, owner) + at * VEC;
                STORE(r[j], p, valid >> j & 1);
            }
        }
    }
}
