"""fp16 and bf16 in numba kernels: bits to fp32 and back, without libraries that a target may lack.

Values travel by the type of the array that holds them: float32 as it is, fp16 as uint16, bf16 as int16. Imported on
first use only.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba.core import types

from kvraw.copying import cpu_plain
from kvraw.runtime.jit import primitive

__all__ = ["narrow", "widen"]

_WORD, _HALF, _FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _converts_fp16() -> bool:
    """Whether the processor that numba compiles for has instructions for it; without, LLVM calls a library."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # set by the user: for another processor, perhaps
        return False
    return platform.machine() == "aarch64" or bool(llvm.get_host_cpu_features().get("f16c"))


_NATIVE = _converts_fp16()


def _fp16_to_fp32(builder: Any, value: Any) -> Any:
    if _NATIVE:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
    bits = builder.zext(value, _WORD)
    magnitude = builder.shl(builder.and_(bits, _word(0x7FFF)), _word(13))
    # The exponent's bias is made up for by a product, which serves subnormal numbers as well.
    scaled = builder.bitcast(
        builder.fmul(builder.bitcast(magnitude, _FLOAT), ir.Constant(_FLOAT, float(2.0**112))), _WORD
    )
    special = builder.icmp_unsigned(">=", magnitude, _word(0x7C00 << 13))
    found = builder.select(special, builder.or_(magnitude, _word(0x7F800000)), scaled)
    return builder.bitcast(builder.or_(found, builder.shl(builder.and_(bits, _word(0x8000)), _word(16))), _FLOAT)


def _fp32_to_fp16(builder: Any, value: Any) -> Any:
    if _NATIVE:
        found = builder.bitcast(builder.fptrunc(value, ir.HalfType()), _HALF)
        return builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_HALF, 0x7FFF), found)
    bits = builder.bitcast(value, _WORD)
    sign = builder.and_(bits, _word(0x80000000))
    magnitude = builder.xor(bits, sign)
    odd = builder.and_(builder.lshr(magnitude, _word(13)), _word(1))
    rounded = builder.lshr(builder.add(builder.add(magnitude, _word(0xC8000FFF)), odd), _word(13))
    # Below 2**-14 an addition rounds where the subnormal numbers' last place is.
    added = builder.fadd(builder.bitcast(magnitude, _FLOAT), ir.Constant(_FLOAT, 0.5))
    small = builder.sub(builder.bitcast(added, _WORD), _word(0x3F000000))
    found = builder.select(builder.icmp_unsigned("<", magnitude, _word(0x38800000)), small, rounded)
    found = builder.select(builder.icmp_unsigned(">=", magnitude, _word(0x47800000)), _word(0x7C00), found)
    found = builder.or_(found, builder.lshr(sign, _word(16)))
    nan = builder.icmp_unsigned(">", magnitude, _word(0x7F800000))
    return builder.trunc(builder.select(nan, _word(0x7FFF), found), _HALF)


def _bf16_to_fp32(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(value, _WORD), _word(16)), _FLOAT)


def _fp32_to_bf16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(bits, _word(16)), _word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _word(0x7FFF)), odd), _word(16))
    nan = builder.icmp_unsigned(">", builder.and_(bits, _word(0x7FFFFFFF)), _word(0x7F800000))
    return builder.trunc(builder.select(nan, _word(0x7FFF), rounded), _HALF)


_TO_FP32 = {types.uint16: _fp16_to_fp32, types.int16: _bf16_to_fp32}
_FROM_FP32 = {types.uint16: _fp32_to_fp16, types.int16: _fp32_to_bf16}


@primitive(cpu_plain.widen)
def widen(typingctx: Any, value: Any) -> Any:
    """A value as float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0] if value == types.float32 else _TO_FP32[value](builder, arguments[0])

    return types.float32(value), codegen


@primitive(cpu_plain.narrow)
def narrow(typingctx: Any, value: Any, like: Any) -> Any:
    """A float32, rounded to nearest even, as the type of `like`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0] if like == types.float32 else _FROM_FP32[like](builder, arguments[0])

    return like(types.float32, like), codegen
