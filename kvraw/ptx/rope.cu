// Takes the rotation of keys at their old positions back and applies that of the new ones, in place. Every product and
// every sum is rounded to the keys' type, as if each were an operation of its own.
//
// A thread takes the pairs of two vectors in up to HEADS heads of a token, which share the cosines and sines. The two lie
// half a rotary dimension apart, also where pairs are neighbours: so a warp's accesses fill whole sectors. The builder
// fixes NAME, TYPE (32, 16 or 191 for fp32, fp16, bf16), VECTOR (16 bytes, or one element), for bf16 whether the target
// has arithmetic of that type (NATIVE), and for vectors whether pairs are neighbours (NEIGHBOURS): a branch between the
// two ways to load would make the one wait for the other's registers.
#include "rope_args.h"

#define HEADS 4
#define SIZE (TYPE == 32 ? 4 : 2)

#if VECTOR == 16
#define WORDS 4
#else
#define WORDS 1
#endif

// A word holds one fp32 element or two of 16 bits, for one vector operation.
#if TYPE == 32
__device__ __forceinline__ u32 mul(u32 a, u32 b)
{
    return __float_as_uint(__fmul_rn(__uint_as_float(a), __uint_as_float(b)));
}
__device__ __forceinline__ u32 add(u32 a, u32 b)
{
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
}
__device__ __forceinline__ u32 sub(u32 a, u32 b)
{
    return __float_as_uint(__fsub_rn(__uint_as_float(a), __uint_as_float(b)));
}
#elif TYPE == 16 || NATIVE
#if TYPE == 16
#define FMA "fma.rn.f16x2"
#define ONE 0x3C003C00
#else
#define FMA "fma.rn.bf16x2"
#define ONE 0x3F803F80
#endif
#define MINUS_ZERO 0x80008000
__device__ __forceinline__ u32 fma(u32 a, u32 b, u32 c)
{
    u32 d;
    asm(FMA " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Minus zero is what changes no product, the sign of a zero included.
__device__ __forceinline__ u32 mul(u32 a, u32 b)
{
    return fma(a, b, MINUS_ZERO);
}
__device__ __forceinline__ u32 add(u32 a, u32 b)
{
    return fma(a, ONE, b);
}
__device__ __forceinline__ u32 sub(u32 a, u32 b)
{
    return fma(b, ONE | MINUS_ZERO, a);
}
#else
// In fp32, then rounded: fp32 has more than twice the digits, so rounding twice gives what rounding once would.
__device__ __forceinline__ u32 narrow(float value)
{
    const u32 bits = __float_as_uint(value);
    return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FFF;
}
#define BOTH(name, operation)                                                                                   \
    __device__ __forceinline__ u32 name(u32 a, u32 b)                                                           \
    {                                                                                                           \
        const u32 low = narrow(operation(__uint_as_float(a << 16), __uint_as_float(b << 16)));                  \
        const u32 high = narrow(operation(__uint_as_float(a & 0xFFFF0000), __uint_as_float(b & 0xFFFF0000)));   \
        return high << 16 | low;                                                                                \
    }
BOTH(mul, __fmul_rn)
BOTH(add, __fadd_rn)
BOTH(sub, __fsub_rn)
#endif

__device__ __forceinline__ void load(u32 *words, u64 from)
{
#if VECTOR == 16
    const uint4 v = load_v4(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
#elif TYPE == 32
    words[0] = load_u32(from);
#else
    words[0] = load_u16(from);
#endif
}

__device__ __forceinline__ void store(u64 to, const u32 *words)
{
#if VECTOR == 16
    store_v4(to, make_uint4(words[0], words[1], words[2], words[3]));
#elif TYPE == 32
    store_u32(to, words[0]);
#else
    store_u16(to, words[0]);
#endif
}

// The cosines or sines of a thread's pairs. Of neighbouring pairs, a vector of the key has half as many as it has elements.
__device__ __forceinline__ void load_angles(u32 *words, u64 row, u32 step, u32 half)
{
#if VECTOR == 16 && NEIGHBOURS
    const uint2 first = load_v2(row + step / 2), second = load_v2(row + (half + step) / 2);
    words[0] = first.x, words[1] = first.y, words[2] = second.x, words[3] = second.y;
#else
    load(words, row + step);
#endif
}

// Two vectors of neighbouring pairs become one of first and one of second elements, and back.
__device__ __forceinline__ void split(u32 *x, u32 *y)
{
#if VECTOR == 16
    const u32 p[8] = {x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if TYPE == 32
        x[k] = p[2 * k];
        y[k] = p[2 * k + 1];
#else
        x[k] = __byte_perm(p[2 * k], p[2 * k + 1], 0x5410);
        y[k] = __byte_perm(p[2 * k], p[2 * k + 1], 0x7632);
#endif
    }
#endif
}

__device__ __forceinline__ void join(u32 *x, u32 *y)
{
#if VECTOR == 16
    u32 p[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if TYPE == 32
        p[2 * k] = x[k];
        p[2 * k + 1] = y[k];
#else
        p[2 * k] = __byte_perm(x[k], y[k], 0x5410);
        p[2 * k + 1] = __byte_perm(x[k], y[k], 0x7632);
#endif
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        x[k] = p[k];
        y[k] = p[k + 4];
    }
#endif
}

__device__ __forceinline__ i64 position(u64 list, u64 token, u32 range, u32 narrow)
{
    if (range)
        return (i64)(list + token);
    return narrow ? (int)load_u32(list + token * 4) : (i64)load_u64(list + token * 8);
}

extern "C" __global__ void __launch_bounds__(256) NAME(const RopeArgs a)
{
    const u64 unit = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= a.units)
        return;
    const u64 rest = divide(unit, a.vectors_magic, a.vectors_shift);
    const u32 vector = (u32)(unit - rest * a.vectors);
    const u64 row = divide(rest, a.groups_magic, a.groups_shift);
    const u32 group = (u32)(rest - row * a.groups);
    const u64 layer = divide(row, a.tokens_magic, a.tokens_shift), token = row - layer * a.tokens;
    const i64 before = position(a.old_positions, token, a.flags & OLD_RANGE, a.flags & OLD_I32);
    const i64 after = position(a.new_positions, token, a.flags & NEW_RANGE, a.flags & NEW_I32);
    if ((a.flags & CHECK) && ((u64)before >= a.limit || (u64)after >= a.limit)) {
        const u32 second = (u64)before < a.limit;
        report(a.status, token, second, second ? (u64)after : (u64)before);
        return;
    }
    const u32 step = vector * VECTOR;
#if VECTOR == 16
    const bool split_up = NEIGHBOURS;
    const u32 at = step, apart = a.half;
#else
    const bool split_up = false, interleaved = a.flags & INTERLEAVED;
    const u32 at = interleaved ? 2 * step : step, apart = interleaved ? VECTOR : a.half;
#endif
    const u64 key = a.key + layer * a.key_layer + token * a.key_token + (u64)(group * HEADS) * a.key_head + at;
    const u32 heads = min(a.heads - group * HEADS, HEADS);
    const u64 old_row = a.cache + before * a.cache_row, new_row = a.cache + after * a.cache_row;
    u32 x[HEADS][WORDS], y[HEADS][WORDS], oc[WORDS], os[WORDS], nc[WORDS], ns[WORDS];
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h)
        if (h < heads) {
            load(x[h], key + h * a.key_head);
            load(y[h], key + h * a.key_head + apart);
        }
    load_angles(oc, old_row, step, a.half);
    load_angles(os, old_row + a.half, step, a.half);
    load_angles(nc, new_row, step, a.half);
    load_angles(ns, new_row + a.half, step, a.half);
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h)
        if (h < heads) {
            if (split_up)
                split(x[h], y[h]);
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                const u32 u = add(mul(x[h][k], oc[k]), mul(y[h][k], os[k]));
                const u32 v = sub(mul(y[h][k], oc[k]), mul(x[h][k], os[k]));
                x[h][k] = sub(mul(u, nc[k]), mul(v, ns[k]));
                y[h][k] = add(mul(v, nc[k]), mul(u, ns[k]));
            }
            if (split_up)
                join(x[h], y[h]);
            store(key + h * a.key_head, x[h]);
            store(key + h * a.key_head + apart, y[h]);
        }
}
