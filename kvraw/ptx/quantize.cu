// A row of a KV chunk (one token of one layer) becomes symbols around a middle one, scaled by the row's largest
// magnitude; and back. A thread block takes one row. BACK is fixed by the builder.
#include "quantize_args.h"

__device__ __forceinline__ float load(u64 row, u32 at, u32 dtype)
{
    if (dtype == FP32)
        return load_f32(row + (u64)at * 4);
    const u16 bits = (u16)load_u16(row + (u64)at * 2);
    if (dtype == BF16)
        return __uint_as_float((u32)bits << 16);
    float value;
    asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ void store(u64 row, u32 at, u32 dtype, float value)
{
    if (dtype == FP32) {
        store_f32(row + (u64)at * 4, value);
    } else if (dtype == FP16) {
        u16 bits;
        asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(value));
        store_u16(row + (u64)at * 2, bits);
    } else {
        const u32 bits = __float_as_uint(value);
        store_u16(row + (u64)at * 2, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

#if BACK
extern "C" __global__ void __launch_bounds__(128) kvraw_dequantize(const QuantizeArgs a)
#else
extern "C" __global__ void __launch_bounds__(128) kvraw_quantize(const QuantizeArgs a)
#endif
{
    const u32 row = blockIdx.x, layer = row / a.tokens, token = row - layer * a.tokens;
    const u64 values = a.values + layer * a.value_layer + token * a.value_token;
    const u64 symbols = a.symbols + (u64)row * a.channels;
    const u64 maximum = a.maxima + (u64)row * 4;
    const float middle = (float)a.middle[layer];
#if BACK
    const float largest = load_f32(maximum);
    for (u32 k = threadIdx.x; k < a.channels; k += blockDim.x)
        store(values, k, a.dtype, __fmul_rn(__fdiv_rn(__fsub_rn((float)load_u8(symbols + k), middle), middle), largest));
#else
    __shared__ u32 largest[4];
    u32 bits = 0; // magnitudes order as their bits do, NaNs above infinity
    for (u32 k = threadIdx.x; k < a.channels; k += blockDim.x)
        bits = max(bits, __float_as_uint(load(values, k, a.dtype)) & 0x7FFFFFFF);
#pragma unroll
    for (u32 step = 16; step; step /= 2)
        bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    if ((threadIdx.x & 31) == 0)
        largest[threadIdx.x >> 5] = bits;
    __syncthreads();
    bits = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
    if (threadIdx.x == 0) {
        store_f32(maximum, __uint_as_float(bits));
        if (bits >= 0x7F800000)
            report(a.status, layer, NOT_FINITE, token);
    }
    // Where the scale overflows, every value is next to nothing, as in a row of zeros.
    const float scale = __fdiv_rn(middle, __uint_as_float(bits));
    const bool plain = bits < 0x7F800000 && __float_as_uint(scale) < 0x7F800000;
    for (u32 k = threadIdx.x; k < a.channels; k += blockDim.x) {
        float at = middle;
        if (plain)
            at = __fadd_rn(__fmul_rn(load(values, k, a.dtype), scale), middle);
        store_u8(symbols + k, (u32)max(0, min(__float2int_rn(at), 2 * (int)middle)));
    }
#endif
}
