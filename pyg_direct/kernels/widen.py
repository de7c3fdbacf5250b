"""Numbers stored in fewer bits than they are used in, as the bits of the float32 they mean.

Integer steps only, so that CPU and GPU agree to the last bit. A float8 counts in units of its row, a power of two
whose exponent is kept apart, biased by 127; rows are stored so that all results are normal numbers or zero.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import body

# How rows are stored; the same numbers as in cuda_src/rows.cu.
HALF, BFLOAT, FLOAT8 = 3, 4, 5
# What a GPU's own conversion makes of any NaN.
NAN_BITS = 0x7FFFFFFF


@body
def widen_bits(kind, code, exponent):
    """Bits of the float32 meant by `code`, a float16, a bfloat16 or a float8_e4m3fn times 2**(exponent - 127)."""
    code = np.int64(code)
    if kind == BFLOAT:
        return np.uint32((code & 0xFFFF) << 16)
    if kind == HALF:
        digits, bias, unit = np.int64(10), np.int64(15), np.int64(0)
        sign, power, fraction = (code >> 15) & 1, (code >> 10) & 31, code & 1023
        if power == 31:
            return np.uint32(NAN_BITS) if fraction != 0 else np.uint32((sign << 31) | 0x7F800000)
    else:
        digits, bias, unit = np.int64(3), np.int64(7), np.int64(exponent) - 127
        sign, power, fraction = (code >> 7) & 1, (code >> 3) & 15, code & 7
        if (code & 127) == 127:
            return np.uint32(NAN_BITS)
    if power == 0:
        if fraction == 0:
            return np.uint32(sign << 31)
        power = np.int64(1)
        while fraction < (1 << digits):
            fraction <<= 1
            power -= 1
        fraction &= (1 << digits) - 1
    return np.uint32((sign << 31) | ((power - bias + 127 + unit) << 23) | (fraction << (23 - digits)))
