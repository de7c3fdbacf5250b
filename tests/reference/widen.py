"""Stored numbers as the float32 they mean, from the definitions of the formats."""

from __future__ import annotations

import math
import struct


def widen_half(code: int) -> float:
    """A float16: 5 bits of exponent, 10 of fraction."""
    return float(struct.unpack("<e", struct.pack("<H", code))[0])


def widen_float8(code: int) -> float:
    """A float8_e4m3fn: 4 bits of exponent, 3 of fraction, no infinities; all ones are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    power, fraction = code >> 3 & 15, code & 7
    if (power, fraction) == (15, 7):
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if power == 0 else (1 + fraction / 8) * 2.0 ** (power - 7))


def widen_bits(name: str, code: int) -> int:
    """Bits of the float32 meant by the stored bits; NaNs of a float16 or float8 have one form."""
    if name == "bfloat16":
        # The upper half of a float32.
        return code << 16
    value = widen_half(code) if name == "float16" else widen_float8(code)
    return 0x7FFFFFFF if math.isnan(value) else int(struct.unpack("<I", struct.pack("<f", value))[0])
