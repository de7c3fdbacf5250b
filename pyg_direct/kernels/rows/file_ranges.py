"""Rows of a file by large requests: one request reads a range of pages, of which the wanted rows are copied out.

A thread that waits for the disk does not hold Python's GIL.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_sequence, system_function
from pyg_direct.kernels.rows.gather import pread

# Unit in which the system caches files. Places, lengths and addresses of direct reads are multiples of it, unless the
# disk has smaller blocks.
PAGE = 4096
# Smallest block of a disk: a mark has a bit for each in a page.
LEAST_BLOCK = 512


@body
def range_of_rows(offset, row_bytes, first, last, unit):
    """First byte, and byte after the end, of the units of `unit` bytes that hold the rows `first` to `last`."""
    begin = (offset + first * row_bytes) // unit * unit
    return begin, -(-(offset + (last + 1) * row_bytes) // unit) * unit


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
def read_file_ranges_cpu(handle, offset, rows, slots, bounds, staging, out, seen, progress, unit):
    """Read row `rows[i]` of the file to `out[slots[i]]`; returns how many requests were served before one that was not.

    Request `j` reads the units of rows `bounds[j]` to `bounds[j + 1] - 1`, ascending, at once into `staging`. `out` are
    bytes `[m, row_bytes]`; the rows of the file begin at its byte `offset`. `unit` are the bytes of a page, or of a
    block of the disk. `seen` has a byte for each page, whose bits mark blocks that were read. The first number of
    `progress` is the first byte of the request that is waited for. The others count the requests, their units, and
    units that had been read before.
    """
    # Bits of a unit in the mark of its page.
    per_page, width = PAGE // unit, unit // LEAST_BLOCK
    row_bytes, target, address = out.shape[1], np.int64(out.ctypes.data), np.int64(staging.ctypes.data)
    for j in range(bounds.shape[0] - 1):
        first, end = bounds[j], bounds[j + 1]
        begin, stop = range_of_rows(offset, row_bytes, rows[first], rows[end - 1], unit)
        progress[0] = begin
        got = pread(np.int32(handle), address, stop - begin, begin)
        # The last page of a file may be short.
        if got < offset + (rows[end - 1] + 1) * row_bytes - begin:
            return j
        copy_rows(offset - begin, row_bytes, rows, slots, first, end, address, target)
        for place in range(begin // unit, stop // unit):
            bits = ((1 << width) - 1) << (place % per_page * width)
            progress[3] += (seen[place // per_page] & bits) != 0
            seen[place // per_page] |= np.uint8(bits)
        progress[1] += 1
        progress[2] += (stop - begin) // unit
    return bounds.shape[0] - 1
