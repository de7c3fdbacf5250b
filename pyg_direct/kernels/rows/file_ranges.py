"""Rows of a file by large requests: one request reads a range of pages, of which the wanted rows are copied out.

A thread that waits for the disk does not hold Python's GIL.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_sequence, system_function
from pyg_direct.kernels.rows.gather import pread

# Unit of direct reads: their places, lengths and addresses are multiples of it.
PAGE = 4096


@body
def range_of_rows(offset, row_bytes, first, last):
    """First byte, and byte after the end, of the pages that hold the rows `first` to `last`."""
    begin = (offset + first * row_bytes) // PAGE * PAGE
    return begin, -(-(offset + (last + 1) * row_bytes) // PAGE) * PAGE


# (target, source, number of bytes) -> target: the system's own copy is several times faster than a loop over bytes.
memcpy = system_function("memcpy", "i8 i8 i8 i8")


@body
def copy_rows(offset, row_bytes, rows, slots, first, end, source, target):
    """Copy rows `first` to `end - 1` of a list; byte 0 at address `source` is byte `-offset` of the table."""
    i = first
    while i < end:
        stop = i + 1
        # Neighbors that stay neighbors are copied together.
        while stop < end and rows[stop] == rows[stop - 1] + 1 and slots[stop] == slots[stop - 1] + 1:
            stop += 1
        memcpy(target + slots[i] * row_bytes, source + offset + rows[i] * row_bytes, (stop - i) * row_bytes)
        i = stop


@cpu_sequence
def read_file_ranges_cpu(handle, offset, rows, slots, bounds, staging, out, seen, progress):
    """Read row `rows[i]` of the file to `out[slots[i]]`; returns how many requests were served before one that was not.

    Request `j` reads the pages of rows `bounds[j]` to `bounds[j + 1] - 1`, ascending, at once into `staging`. `out` are
    bytes `[m, row_bytes]`; the rows of the file begin at its byte `offset`. `seen` marks pages that were read. The
    first number of `progress` is the first byte of the request that is waited for. The others count the requests, their
    pages, and pages that had been read before.
    """
    row_bytes, target, address = out.shape[1], np.int64(out.ctypes.data), np.int64(staging.ctypes.data)
    for j in range(bounds.shape[0] - 1):
        first, end = bounds[j], bounds[j + 1]
        begin, stop = range_of_rows(offset, row_bytes, rows[first], rows[end - 1])
        progress[0] = begin
        got = pread(np.int32(handle), address, stop - begin, begin)
        # The last page of a file may be short.
        if got < offset + (rows[end - 1] + 1) * row_bytes - begin:
            return j
        copy_rows(offset - begin, row_bytes, rows, slots, first, end, address, target)
        for page in range(begin // PAGE, stop // PAGE):
            progress[3] += seen[page]
            seen[page] = 1
        progress[1] += 1
        progress[2] += (stop - begin) // PAGE
    return bounds.shape[0] - 1
