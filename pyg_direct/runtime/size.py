"""Sizes of caches, as numbers or in words."""

from __future__ import annotations

import re

import numpy as np

from pyg_direct.errors import ArgumentError, ArgumentTypeError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def parse_size(size: int | str, whole: int | None = None, name: str = "device_cache_size") -> int:
    """Bytes meant by 1000, `"200M"`, `"0.9G"`, `"3GB"` or, given the `whole` in bytes, `"20%"`.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer, str)):
        raise ArgumentTypeError(f"{name} must be a number of bytes or a string such as '200M', got {size!r}")
    if not isinstance(size, str):
        if size < 0:
            raise ArgumentError(f"{name} must be at least 0, got {size}")
        return int(size)
    share = _SHARE.fullmatch(size)
    if share is not None and whole is not None:
        if float(share[1]) > 100:
            raise ArgumentError(f"{name} must be at most 100%, got {size!r}")
        return int(float(share[1]) / 100 * whole)
    match = _PATTERN.fullmatch(size)
    if match is None:
        like = "1000, '200M', '0.9G' or '3GB'" if whole is None else "1000, '200M', '0.9G', '3GB' or '20%'"
        raise ArgumentError(f"{name} must look like {like}, got {size!r}")
    if whole is not None and size.strip()[-1] in "0123456789." and float(match[1]) > 0:
        # Whoever writes "20" where "20%" may stand hardly means 20 bytes.
        number = size.strip()
        raise ArgumentError(f"{name} must have a unit where it is a string, got {size!r}: write '{number}%', "
                            f"'{number}MB' or '{number}B'")  # fmt: skip
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if num_bytes >= 2**63:
        raise ArgumentError(f"{name} must be less than 2^63 bytes, got {size!r}")
    return int(num_bytes)
