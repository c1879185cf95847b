// The argument block of quantize.cu. kvraw/codec/args.py holds the same structure as a numpy dtype; the table at the end
// carries the offsets into the PTX text, where the tests compare the two.
#include "arith.h"

#define LAYERS 512

enum Dtype { FP32 = 0, FP16 = 1, BF16 = 2 };

enum Fault {
    NOT_FINITE = 5 // value: the token
};

struct QuantizeArgs {
    u64 values;      // [layers, tokens, channels], channels dense
    u64 value_layer; // bytes per layer
    u64 value_token; // bytes per token
    u64 symbols;     // uint8 [layers, tokens, channels]
    u64 maxima;      // float32 [layers, tokens]
    u64 status;
    u32 tokens;
    u32 channels;
    u32 dtype;
    u32 reserved;
    u8 middle[LAYERS]; // bins / 2 - 1 of each layer: the symbol of zero
};

#define AT(field) (u32)(unsigned long long)&((QuantizeArgs *)0)->field
extern "C" __device__ const u32 kvraw_quantize_layout[] = {
    AT(values), AT(value_layer), AT(value_token), AT(symbols), AT(maxima), AT(status), AT(tokens), AT(channels), AT(dtype),
    AT(reserved), AT(middle), (u32)sizeof(QuantizeArgs)};
