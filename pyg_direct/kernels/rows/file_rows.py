"""Rows and numbers in files, read page by page.

One large request reads a range of pages, of which the wanted rows are copied out; a thread that waits for the disk does
not hold Python's GIL. `list_pages_cpu` and `take_numbers_cpu` read numbers of an array of which some pages are in
memory. `list_fresh_rows_cpu` lists rows that a batch reads first of all batches of its window.
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


@cpu_sequence
def list_pages_cpu(positions, lead, per_page, tick, ticks, found):
    """List each page that holds one of these positions once; returns their number.

    Position 0 is number `lead` of the first page. `ticks` marks the pages of this call by `tick`.
    """
    count = 0
    for i in range(positions.shape[0]):
        page = (lead + positions[i]) // per_page
        if ticks[page] != tick:
            ticks[page] = tick
            found[count] = page
            count += 1
    return count


@cpu_sequence
def take_numbers_cpu(positions, left, lead, per_page, slots, memory, out):
    """Read the numbers at `positions[left[...]]` whose pages are in memory; the others stay in `left`.

    Returns how many stay. `slots` has the slot of each page, -1 for none; `memory` holds slots of `per_page` numbers.
    """
    count = 0
    for j in range(left.shape[0]):
        i = left[j]
        place = lead + positions[i]
        slot = slots[place // per_page]
        if slot < 0:
            left[count] = i
            count += 1
        else:
            out[i] = memory[slot * per_page + place % per_page]
    return count


@cpu_sequence
def list_fresh_rows_cpu(ids, claims, first_batch, table, found):
    """List each row of `ids` once that no batch from `first_batch` on has claimed; returns their number.

    `claims` has the last batch that claimed each row. `table` is a hash table of rows, all -1. Its length is a power of
    two, above the number of ids. `np.unique` takes about 25 times as long.
    """
    mask, count = table.shape[0] - 1, 0
    for i in range(ids.shape[0]):
        row = ids[i]
        if claims[row] >= first_batch:
            continue
        # The middle bits of a product with the golden ratio: rows with equal steps between lie apart.
        place = (row * 0x9E3779B1 >> 8) & mask
        while table[place] >= 0 and table[place] != row:
            place = (place + 1) & mask
        if table[place] < 0:
            table[place] = row
            found[count] = row
            count += 1
    return count
