"""Gather from many tables in one launch: the rows of all types of a batch.

`gather_typed_*` has a list of ids for each table. `layout` is int64 `[2 * T + 1]`. It holds the first output row of
each table, and the end of the last. Then it holds the offset from these to the ids of each table in `ids`. `tables` is
int64 `[2 * T]`: the addresses of the tables, then their rows. A row whose id is out of range is filled with zeros, and
the lowest such position in the output is left in errors[0]. A CPU leaves such a row unchanged, and its lowest position
in each chunk in errors[c].

`gather_narrow_gpu` reads several tables by one list of ids, for rows of 1, 2, 4, 8 or 16 bytes, such as labels and
masks.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.local_ids.csr import memcpy
from pyg_direct.kernels.rows.gather import (
    ALIGNED,
    PIECE,
    copy_two_pieces,
    find_address,
    is_row,
    read_id,
    report_id,
    split_offset,
)
from pyg_direct.kernels.sampling.uniform import find_row

MOST_TABLES = 4

copy_items = device_function("copy_items", "i8 i8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4")


@gpu_kernel("I[] i8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i8[]", I=("i4", "i8"), sources=("narrow",))
def gather_narrow_gpu(ids, num_rows, table_a, table_b, table_c, table_d, out_a, out_b, out_c, out_d, bits_a, bits_b,
                      bits_c, bits_d, errors):  # fmt: skip
    """A thread an id. Tables and outputs are addresses, 0 if there are fewer than four; rows take 2**bits bytes."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < ids.shape[0]:
        item = read_id(ids, i)
        report_id(ids, i, item, num_rows, errors)
        copy_items(i, item if is_row(item, num_rows) else np.int64(-1), table_a, table_b, table_c, table_d, out_a,
                   out_b, out_c, out_d, bits_a, bits_b, bits_c, bits_d)  # fmt: skip
        i += np.int64(cuda.gridDim.x) * THREADS


@body
def find_typed_row(layout, tables, ids, i, errors):
    """(number of the table, id) of a row of the output; the id is -1 if it names no row."""
    count = tables.shape[0] >> 1
    table = find_row(layout, count, i)
    item = np.int64(ids[i + layout[count + 1 + table]])
    if not is_row(item, tables[count + table]):
        cuda.atomic.min(errors, 0, np.int64(i))
        item = np.int64(-1)
    return table, item


@body
def find_typed_address(layout, tables, ids, i, row_bytes, errors):
    """Address of the row that row `i` of the output copies; 0 for none, and after the last."""
    count = tables.shape[0] >> 1
    if i >= layout[count]:
        return np.uint64(0)
    table, item = find_typed_row(layout, tables, ids, i, errors)
    return find_address(np.uint64(tables[table]), item, tables[count + table], row_bytes)


@body
def copy_typed(i, end, layout, tables, ids, row_bytes, out):
    """Copy the rows [i, end) of the output; return the first row whose id is invalid, `end` if all are valid."""
    count, wrong = tables.shape[0] >> 1, end
    table = find_row(layout, count, i)
    while i < end:
        begin, i = i, min(end, layout[table + 1])
        to_id, address, num_rows = layout[count + 1 + table], tables[table], tables[count + table]
        for at in range(begin, i):
            item = ids[at + to_id]
            if is_row(item, num_rows):
                memcpy(out + at * row_bytes, address + item * row_bytes, row_bytes)
            else:
                wrong = min(wrong, at)
        table += 1
    return wrong


@cpu_kernel
def gather_typed_cpu(layout, tables, ids, row_bytes, out, chunks, errors):
    """Rows of any number of bytes; `out` is an address."""
    total = layout[tables.shape[0] >> 1]
    share = (total + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, total), min((c + 1) * share, total)
        wrong = copy_typed(begin, end, layout, tables, ids, row_bytes, out)
        if wrong < end:
            errors[c] = min(errors[c], wrong)


@gpu_kernel("i8[] i8[] i8[] i4 u8 i8[]", sources=("rows",), resident_blocks=8)
def gather_typed_gpu(layout, tables, ids, row_bytes, out, errors):
    """Rows of whole pieces; a thread two pieces at a time. `out` is an address; all are multiples of a piece."""
    total = layout[tables.shape[0] >> 1] * row_bytes
    begin = np.int64(cuda.blockIdx.x) * (2 * PIECE * THREADS)
    while begin < total:
        first = np.int64(np.uint64(begin) // np.uint64(row_bytes))
        offset = begin - first * row_bytes + PIECE * cuda.threadIdx.x
        rows_a, offset_a = split_offset(offset, row_bytes)
        rows_b, offset_b = split_offset(offset + PIECE * THREADS, row_bytes)
        row_a = find_typed_address(layout, tables, ids, first + rows_a, row_bytes, errors)
        row_b = find_typed_address(layout, tables, ids, first + rows_b, row_bytes, errors)
        at = begin + PIECE * cuda.threadIdx.x
        none = np.uint64(0)
        copy_two_pieces(ALIGNED, out + np.uint64(at), total - at, row_bytes, offset_a, offset_b, row_a, none, row_b,
                        none, np.int32(0), np.int32(0))  # fmt: skip
        begin += np.int64(cuda.gridDim.x) * (2 * PIECE * THREADS)


@gpu_kernel("i8[] i8[] i8[] i4 u8 i8[]", sources=("narrow",))
def gather_typed_narrow_gpu(layout, tables, ids, bits, out, errors):
    """Rows of 2**bits bytes, up to 16; a thread a row. `out` is an address."""
    total, none = layout[tables.shape[0] >> 1], np.uint64(0)
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < total:
        table, item = find_typed_row(layout, tables, ids, i, errors)
        copy_items(i, item, np.uint64(tables[table]), none, none, none, out, none, none, none, bits, np.int32(0),
                   np.int32(0), np.int32(0))  # fmt: skip
        i += np.int64(cuda.gridDim.x) * THREADS
