"""Rows of a file, read by the system's own call: a thread that waits for the disk holds no lock of Python's."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import cpu_kernel, system_function

# (handle, address, number of bytes, place in the file) -> number of bytes read, negative if none could be.
pread = system_function("pread", "i8 i4 i8 i8 i8")


@cpu_kernel
def read_file_rows_cpu(handle, offset, ids, positions, out):
    """Read row `ids[i]` of the file to `out[positions[i]]`; returns how many were read before one that was not whole.

    `out` are bytes `[m, row_bytes]`; the rows of the file begin at its byte `offset`.
    """
    row_bytes, address = out.shape[1], np.int64(out.ctypes.data)
    for i in range(ids.shape[0]):
        if (
            pread(np.int32(handle), address + positions[i] * row_bytes, row_bytes, offset + ids[i] * row_bytes)
            != row_bytes
        ):
            return i
    return ids.shape[0]
