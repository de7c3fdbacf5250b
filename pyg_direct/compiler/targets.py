"""The architectures that code is generated for, and the PTX versions that the oldest supported drivers read."""

from __future__ import annotations

import re

from pyg_direct.errors import DeviceError

# A driver runs PTX of its GPU's architecture and of older ones. The code uses nothing newer than PTX 8.0, which every
# driver of CUDA 12 reads; but on compute capability 9.0 four numbers are added to memory at once, which drivers of CUDA
# 12.1 read; and 8.6 is the first that knows 10.0.
PTX_VERSIONS = {(7, 5): "8.0", (8, 0): "8.0", (9, 0): "8.1", (10, 0): "8.6"}


def nearest_target(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Find the newest architecture whose code a GPU of this compute capability runs.

    Raises:
        DeviceError: it is older than all of them.
    """
    older = [target for target in PTX_VERSIONS if target <= compute_capability]
    if not older:
        raise DeviceError("device must have compute capability 7.5 or more, got {}.{}".format(*compute_capability))
    return max(older)


def stamp_version(ptx: str, target: tuple[int, int]) -> str:
    """PTX with the version of its target; compilers stamp the newest they know, whatever the code uses."""
    stamped, count = re.subn(r"^\.version .*$", f".version {PTX_VERSIONS[target]}", ptx, count=1, flags=re.MULTILINE)
    assert count == 1, "PTX without a version"
    return stamped
