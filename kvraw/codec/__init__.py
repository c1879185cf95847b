"""CacheGen's entropy coder: quantized KV chunks to bytes and back, on a GPU (PTX) or on the CPU (numba), alike.

Symbols are bytes ``[layers, tokens, channels]`` below an alphabet's size; each (layer, channel) is a stream of its own,
coded with a distribution of its own.

- `encode`, `decode` and `Encoded`: symbols to one object that can be stored, and back.
- `compress`, `decompress` and `Compressed`: the same for a KV chunk in fp32, fp16 or bf16, quantized per layer.
- `write_cdf`, `encode_into`, `decode_into`, `quantize_into`, `dequantize_into`: the single steps between buffers of
  the caller's, enqueued on the caller's stream.
"""

from kvraw.codec.chunk import Compressed, compress, decompress
from kvraw.codec.coder import decode_into, encode_into, write_cdf
from kvraw.codec.encoded import Encoded
from kvraw.codec.quantize import dequantize_into, quantize_into
from kvraw.codec.streams import decode, encode

__all__ = [
    "Compressed",
    "Encoded",
    "compress",
    "decode",
    "decode_into",
    "decompress",
    "dequantize_into",
    "encode",
    "encode_into",
    "quantize_into",
    "write_cdf",
]
