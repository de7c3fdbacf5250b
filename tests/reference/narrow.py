"""Rows as they come back from fewer bits: each number the nearest that the format holds, of two the even one."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence

from tests.reference.widen import widen_float8

# The numbers of a float8_e4m3fn that are not negative, by their code.
FLOAT8 = [widen_float8(code) for code in range(127)]


def narrow(row: Sequence[float], name: str) -> list[float]:
    """The numbers of a row after they were stored as `float16`, `bfloat16` or `float8_e4m3fn`."""
    if name == "float16":
        return [struct.unpack("<e", struct.pack("<e", value))[0] for value in row]
    if name == "bfloat16":
        return [round_to_bits(value, 8) for value in row]
    # The row is divided by the power of two that lets its largest number just fit.
    largest = max(map(abs, row), default=0.0)
    power = -117
    while largest > FLOAT8[-1] * 2.0**power:
        power += 1
    return [math.copysign(nearest_float8(abs(value) * 2.0**-power), value) * 2.0**power for value in row]


def round_to_bits(value: float, bits: int) -> float:
    """The nearest number with so many bits in front of its last."""
    if value == 0:
        return value
    step = 2.0 ** (math.frexp(value)[1] - bits)
    return round(value / step) * step


def nearest_float8(value: float) -> float:
    """The nearest number of a float8; if two are equally near, the one with an even code."""
    code = min(bisect_left(FLOAT8, value), len(FLOAT8) - 1)
    near = [code - 1, code] if code else [code]
    return FLOAT8[min(near, key=lambda code: (abs(FLOAT8[code] - value), code % 2))]
