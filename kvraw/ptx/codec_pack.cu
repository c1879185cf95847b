// Puts streams that lie in slots of equal size back to back; a warp moves one.
#include "codec_args.h"

extern "C" __global__ void __launch_bounds__(256) kvraw_codec_pack(const CodecArgs a)
{
    const u64 stream = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (stream >= a.streams)
        return;
    const i64 end = (i64)load_u64(a.ends + stream * 8), start = stream ? (i64)load_u64(a.ends + stream * 8 - 8) : 0;
    if (start < 0 || end < start || (u64)end > a.packed_size || (u64)(end - start) > a.row) {
        report(a.status, stream, BAD_LENGTH, (u64)end);
        return;
    }
    const u64 from = a.bytes + stream * a.row, to = a.packed + start;
    for (u32 k = threadIdx.x & 31; k < (u32)(end - start); k += 32)
        store_u8(to + k, load_u8(from + k));
}
