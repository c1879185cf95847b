// Types and integer helpers that the kernels other than the copies share.
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// n / d for n < 2^63, from magic = ceil(2^(63 + shift) / d) and shift = ceil(log2 d).
__device__ __forceinline__ u64 divide(u64 n, u64 magic, u32 shift)
{
    return __umul64hi(magic, n << 1) >> shift;
}

// What went wrong first, or last: any one of the threads that write is as good as another.
__device__ __forceinline__ void report(u64 status, u64 where, u32 kind, u64 value)
{
    if (status)
        asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(status), "l"(((where + 1) << 4) | kind), "l"(value) : "memory");
}

// Accesses to global memory by address: the compiler cannot tell what space a number points into.
#define ACCESS(name, type, ptx, constraint)                                                  \
    __device__ __forceinline__ type load_##name(u64 from)                                    \
    {                                                                                        \
        type value;                                                                          \
        asm volatile("ld.global." ptx " %0, [%1];" : "=" constraint(value) : "l"(from));     \
        return value;                                                                        \
    }                                                                                        \
    __device__ __forceinline__ void store_##name(u64 to, type value)                         \
    {                                                                                        \
        asm volatile("st.global." ptx " [%0], %1;" ::"l"(to), constraint(value) : "memory"); \
    }
ACCESS(u8, u32, "u8", "r")
ACCESS(u16, u32, "u16", "r")
ACCESS(u32, u32, "u32", "r")
ACCESS(u64, u64, "u64", "l")
ACCESS(f32, float, "f32", "f")

__device__ __forceinline__ uint4 load_v4(u64 from)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ __forceinline__ uint2 load_v2(u64 from)
{
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

__device__ __forceinline__ void store_v4(u64 to, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
