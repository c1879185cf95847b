// One kernel for every copy plan: both sides affine in (item, d0..d3), each with an optional base table, an optional
// index vector split by a page size, and bounds. VEC (bytes per access: 16, 8, 4, 2 or 1) is fixed by the builder.
//
// A warp takes 32 segments of at most 128 vectors at a time. Each lane works out the two addresses of one segment; then
// the warp walks all vectors of the 32 segments, taking the addresses from the owning lane by shuffle, so that every
// thread keeps UNROLL independent loads in flight whatever the run size.
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

extern "C" __global__ void __launch_bounds__(1024) CONCAT(kvraw_copy_v, VEC)(const CopyArgs args)
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
        for (u32 step = 0; step < total; step += 32 * UNROLL) {
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
