"""Gather of table rows by id, from one table, from hot rows over cold rows in one pass, or from a file.

`bits` and `ranks` are the ranked bitmap of hot ids. A hot row lies at its rank among the hot ones. A cold row lies at
its id, because the cold table holds all rows. Empty `bits` mean one table, passed as `hot`. A row whose id is outside
[0, num_rows) is filled with zeros, and the lowest such position is left in errors[0].

Rows stored in fewer bits are widened to float32 on the way (`widen_bits`). The steps use only integers, so that CPU and
GPU agree to the last bit. A float8 counts in units of its row. The unit is a power of two, whose exponent is kept
separately, biased by 127. Rows are stored so that all results are normal numbers or zero.

`read_file_rows_cpu` reads rows of a file by the system's own call. A thread that waits for the disk does not hold
Python's GIL.

`gather_typed_*` read many tables in one launch, the rows of all types of a batch, with a list of ids for each table.
`layout` is int64 `[2 * T + 1]`. It holds the first output row of each table, and the end of the last. Then it holds the
offset from these to the ids of each table in `ids`. `tables` is int64 `[2 * T]`: the addresses of the tables, then
their rows. A CPU leaves a row whose id is out of range unchanged, and its lowest position in each chunk in errors[c].

`gather_narrow_gpu` reads several tables by one list of ids, for rows of 1, 2, 4, 8 or 16 bytes, such as labels and
masks.

`copy_graphs_cpu` copies the rows of the graphs of a batch, which lie side by side in a table, in one run each. `spans`
is int64 `[G, 2 * K]`: the first row of each graph in each group of tables, then its rows in each. `ptr` is int64
`[K, B + 1]`: the first row of each graph of the batch, and the end.

`collate_graphs_gpu` does so for all columns of a batch, or of several batches, in one launch. `words` is int64: the
columns, then lists that they point to. See `Column` of `ops/rows/graph_rows.py`.

`scatter_*` write rows into a table by id. Rows are lists of items; each id comes once, so that no row is written twice.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import (
    THREADS,
    body,
    cpu_kernel,
    cpu_sequence,
    cuda,
    device_function,
    gpu_kernel,
    prange,
    prefetch,
    system_function,
    view_words,
)
from pyg_direct.kernels.local_ids.bitmap import bit_of, count_bits, has_bit, rank_of
from pyg_direct.kernels.local_ids.csr import memcpy
from pyg_direct.kernels.sampling.uniform import find_row

# Formats of stored rows; the same numbers as in cuda_src/rows.cu.
HALF, BFLOAT, FLOAT8 = 3, 4, 5
# Result of a GPU's own conversion of any NaN.
NAN_BITS = 0x7FFFFFFF


@body
def widen_bits(kind, code, exponent):
    """Bits of the float32 for `code`, a float16, a bfloat16 or a float8_e4m3fn times 2**(exponent - 127)."""
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


# Ways to read a piece of a row that is only copied; the same numbers as in cuda_src/rows.cu.
ALIGNED, WORDS, BYTES = 0, 1, 2
PIECE = 16
# Rows that a group of threads copies at a time.
ROWS = 4
# Threads of a block that reads the link, as many as take all registers of a multiprocessor. Reads that wait for the
# link slow the kernels beside them. So they should fill a few multiprocessors rather than spread thinly over all.
WIDE = 1024
_FROM_TWO = "u8 u8 u4[] i4[] I[] i8 i4 i4 i4 i4 u1[] u8 i8[]"

copy_two_pieces = device_function("copy_two_pieces", "i4 u8 i8 i4 i4 i4 u8 u8 u8 u8 i4 i4")
copy_piece = device_function("copy_piece", "i4 u8 i8 i4 i4 u8 u8 u8 i4 i4")
copy_found_rows = device_function("copy_found_rows", "i4 u8 i8 i4 i4 u8 i4")
copy_four_rows = device_function("copy_four_rows", "i4 u8 i8 i4 i4 i4 i4 u8 u8 u8 u8 i4 i4 i4 i4")


@body
def find_row_slot(bits, ranks, item):
    """(slot, is hot) of a row."""
    if bits.shape[0] == 0:
        return np.int64(item), True
    if has_bit(bits, item):
        return np.int64(rank_of(bits, ranks, item)), True
    return np.int64(item), False


@cpu_kernel
def gather_rows_cpu(hot, cold, bits, ranks, ids, out):
    for i in prange(ids.shape[0]):
        slot, is_hot = find_row_slot(bits, ranks, ids[i])
        if is_hot:
            for f in range(out.shape[1]):
                out[i, f] = hot[slot, f]
        else:
            for f in range(out.shape[1]):
                out[i, f] = cold[slot, f]


@cpu_kernel
def place_rows_cpu(rows, ids, positions, out):
    for i in prange(ids.shape[0]):
        for f in range(out.shape[1]):
            out[positions[i], f] = rows[ids[i], f]


@cpu_kernel
def widen_rows_cpu(hot, cold, bits, ranks, ids, kind, exponents, out):
    for i in prange(ids.shape[0]):
        slot, is_hot = find_row_slot(bits, ranks, ids[i])
        exponent = exponents[ids[i]] if exponents.shape[0] > 0 else 0
        for f in range(out.shape[1]):
            out[i, f] = widen_bits(kind, hot[slot, f] if is_hot else cold[slot, f], exponent)


@body
def read_id(ids, i):
    """Id `i`, or -1 after the end of the list."""
    return np.int64(ids[i]) if i < ids.shape[0] else np.int64(-1)


@body
def is_row(item, num_rows):
    """Check whether a row exists."""
    return np.uint64(item) < np.uint64(num_rows)


@body
def report_id(ids, i, item, num_rows, errors):
    """Record the position of an id that names no row, if it is the lowest."""
    if not is_row(item, num_rows) and i < ids.shape[0]:
        cuda.atomic.min(errors, 0, np.int64(i))


@body
def read_exponent(exponents, item, num_rows):
    """Exponent of a row, if there are any."""
    return np.int32(exponents[item]) if exponents.shape[0] > 0 and is_row(item, num_rows) else np.int32(0)


@body
def split_offset(offset, row_size):
    """(rows, remainder) of an offset that fits 32 bits."""
    rows = np.uint32(np.uint32(offset) // np.uint32(row_size))
    return np.int64(rows), np.int32(np.uint32(offset) - rows * np.uint32(row_size))


@body
def find_item(hot, cold, bits, ranks, item, num_rows, width, column):
    """(position in a table, is hot) of a number of a row; position -1 if there is no such row."""
    if not is_row(item, num_rows):
        return np.int64(-1), True
    slot, is_hot = find_row_slot(bits, ranks, item)
    return slot * width + column, is_hot


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i4 T[] i8[]", T=("u1", "i2", "u4"), I=("i4", "i8"), resident_blocks=8)
def gather_items_gpu(hot, cold, bits, ranks, ids, num_rows, width, out, errors):
    """Rows of `width` items, a thread an item: for rows shorter than a piece."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < out.shape[0]:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = read_id(ids, i)
        place, is_hot = find_item(hot, cold, bits, ranks, item, num_rows, width, at - i * width)
        value = out.dtype.type(0)
        if place >= 0:
            value = hot[place] if is_hot else cold[place]
        out[at] = value
        report_id(ids, i, item, num_rows, errors)
        at += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i4 i4 u1[] u4[] i8[]", T=("u1", "i2"), I=("i4", "i8"))
def widen_items_gpu(hot, cold, bits, ranks, ids, num_rows, width, kind, exponents, out, errors):
    """Rows of `width` numbers stored in fewer bits, a thread a number: for rows shorter than a piece."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < out.shape[0]:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = read_id(ids, i)
        place, is_hot = find_item(hot, cold, bits, ranks, item, num_rows, width, at - i * width)
        value = np.uint32(0)
        if place >= 0:
            value = widen_bits(kind, hot[place] if is_hot else cold[place], read_exponent(exponents, item, num_rows))
        out[at] = value
        report_id(ids, i, item, num_rows, errors)
        at += np.int64(cuda.gridDim.x) * THREADS


@body
def find_address(table, item, num_rows, row_bytes):
    """Address of a row, 0 if there is no such row."""
    return table + np.uint64(item * row_bytes) if is_row(item, num_rows) else np.uint64(0)


@body
def find_block(block, blocks, strands):
    """Piece of work of a block, if work is cut into `strands` parts that all begin at once; the remainder comes
    last.
    """
    length = np.int32(np.uint32(blocks) // np.uint32(strands))
    turn = np.int32(np.uint32(block) // np.uint32(strands))
    return np.int32((block - turn * strands) * length + turn) if turn < length else np.int32(block)


@gpu_kernel("u8 I[] i8 i4 i4 i4 i4 u1[] u8 i8[]", I=("i4", "i8"), sources=("rows",), resident_blocks=8)
def gather_pieces_gpu(table, ids, num_rows, source_bytes, row_bytes, kind, strands, exponents, out, errors):
    """The output in order, a thread two pieces at a time, so that every store is whole: for GPU memory.

    The list is read at `strands` positions at once, so that ascending ids reach the memories of several GPUs at any
    time. Rows take `source_bytes` in the table and `row_bytes` in `out`. A piece of `WORDS` meets at most two rows; a
    piece of another kind lies in one. `table` and `out` are addresses, `out` a multiple of a piece.
    """
    total = np.int64(ids.shape[0]) * row_bytes
    begin = np.int64(find_block(np.int32(cuda.blockIdx.x), np.int32(cuda.gridDim.x), strands)) * (2 * PIECE * THREADS)
    while begin < total:
        # One long division for both pieces.
        first = np.int64(np.uint64(begin) // np.uint64(row_bytes))
        offset = begin - first * row_bytes + PIECE * cuda.threadIdx.x
        rows_a, offset_a = split_offset(offset, row_bytes)
        rows_b, offset_b = split_offset(offset + PIECE * THREADS, row_bytes)
        i_a, i_b = first + rows_a, first + rows_b
        # All ids are requested before the first is used.
        item_a, item_b = read_id(ids, i_a), read_id(ids, i_b)
        next_a, next_b = np.int64(0), np.int64(0)
        if row_bytes - offset_a < PIECE:
            next_a = read_id(ids, i_a + 1)
        if row_bytes - offset_b < PIECE:
            next_b = read_id(ids, i_b + 1)
        report_id(ids, i_a, item_a, num_rows, errors)
        report_id(ids, i_b, item_b, num_rows, errors)
        if kind == WORDS:
            # If a row lies in the middle of a piece, no other begins there.
            report_id(ids, i_a + 1, next_a, num_rows, errors)
            report_id(ids, i_b + 1, next_b, num_rows, errors)
        at = begin + PIECE * cuda.threadIdx.x
        copy_two_pieces(kind, out + np.uint64(at), total - at, row_bytes, offset_a, offset_b,
                        find_address(table, item_a, num_rows, source_bytes),
                        find_address(table, next_a, num_rows, source_bytes),
                        find_address(table, item_b, num_rows, source_bytes),
                        find_address(table, next_b, num_rows, source_bytes),
                        read_exponent(exponents, item_a, num_rows),
                        read_exponent(exponents, item_b, num_rows))  # fmt: skip
        begin += np.int64(cuda.gridDim.x) * (2 * PIECE * THREADS)


@gpu_kernel("u8 I[] i8 i4 i4 i4 u1[] u8 i8[]", I=("i4", "i8"), sources=("rows",), resident_blocks=6)
def gather_odd_pieces_gpu(table, ids, num_rows, source_bytes, row_bytes, kind, exponents, out, errors):
    """As `gather_pieces_gpu`, a thread one piece at a time, for bytes and for numbers to be widened of any alignment.

    A piece may meet two rows, one of bytes three.
    """
    total = np.int64(ids.shape[0]) * row_bytes
    begin = np.int64(cuda.blockIdx.x) * (PIECE * THREADS)
    while begin < total:
        first = np.int64(np.uint64(begin) // np.uint64(row_bytes))
        rows, offset = split_offset(begin - first * row_bytes + PIECE * cuda.threadIdx.x, row_bytes)
        i, cut = first + rows, row_bytes - offset
        item, after, last = read_id(ids, i), np.int64(0), np.int64(0)
        if cut < PIECE:
            after = read_id(ids, i + 1)
        if cut + row_bytes < PIECE:
            last = read_id(ids, i + 2)
        report_id(ids, i, item, num_rows, errors)
        report_id(ids, i + 1, after, num_rows, errors)
        report_id(ids, i + 2, last, num_rows, errors)
        at = begin + PIECE * cuda.threadIdx.x
        copy_piece(kind, out + np.uint64(at), total - at, row_bytes, offset,
                   find_address(table, item, num_rows, source_bytes),
                   find_address(table, after, num_rows, source_bytes),
                   find_address(table, last, num_rows, source_bytes),
                   read_exponent(exponents, item, num_rows), read_exponent(exponents, after, num_rows))  # fmt: skip
        begin += np.int64(cuda.gridDim.x) * (PIECE * THREADS)


@body
def find_address_of_two(hot, cold, bits, ranks, item, num_rows, row_bytes):
    """Address of a row in hot or cold rows, 0 if there is no such row."""
    # Without branches, so that the reads of several rows are issued at once.
    is_known = is_row(item, num_rows)
    item = item if is_known else np.int64(0)
    word, rank, bit = bits[item >> 5], ranks[item >> 5], bit_of(item)
    is_hot = (word & bit) != 0
    slot = np.int64(rank + count_bits(np.uint32(word & (bit - np.uint32(1))))) if is_hot else item
    address = (hot if is_hot else cold) + np.uint64(slot * row_bytes)
    return address if is_known else np.uint64(0)


@gpu_kernel(_FROM_TWO, I=("i4", "i8"), sources=("rows",), resident_blocks=1, threads=WIDE)
def gather_listed_gpu(hot, cold, bits, ranks, ids, num_rows, source_bytes, row_bytes, lane_bits, kind, exponents, out,
                      errors):  # fmt: skip
    """Groups of 2**lane_bits threads (at least four), so that a row is requested at once: for the link.

    Each lane locates one row of as many, which takes two dependent reads; then all lanes copy four rows at a time.
    Parameters as in `gather_pieces_gpu`, of any kind but `BYTES`.
    """
    thread = np.int64(cuda.blockIdx.x) * WIDE + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * WIDE
    num_ids = np.int64(ids.shape[0])
    lane = thread & ((1 << lane_bits) - 1)
    i, item = thread, read_id(ids, thread)
    # The groups of a warp stay together.
    while i - (thread & 31) < num_ids:
        # The next id is in flight while these rows are.
        next_item = read_id(ids, i + step)
        if bits.shape[0] > 0:
            row = find_address_of_two(hot, cold, bits, ranks, item, num_rows, source_bytes)
        else:
            row = find_address(hot, item, num_rows, source_bytes)
        report_id(ids, i, item, num_rows, errors)
        first = i - lane
        copy_found_rows(kind, out + np.uint64(first * row_bytes), num_ids - first, row_bytes, lane_bits, row,
                        read_exponent(exponents, item, num_rows))  # fmt: skip
        i, item = i + step, next_item


@gpu_kernel(_FROM_TWO, I=("i4", "i8"), sources=("rows",), resident_blocks=1, threads=WIDE)
def gather_groups_gpu(hot, cold, bits, ranks, ids, num_rows, source_bytes, row_bytes, lane_bits, kind, exponents, out,
                      errors):  # fmt: skip
    """As `gather_listed_gpu` for any alignment and rows of any length: each lane finds all four rows of its group."""
    thread = np.int64(cuda.blockIdx.x) * WIDE + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    groups = (np.int64(cuda.gridDim.x) * WIDE) >> lane_bits
    num_ids = np.int64(ids.shape[0])
    i = thread >> lane_bits
    a, b = read_id(ids, i), read_id(ids, i + groups)
    c, d = read_id(ids, i + 2 * groups), read_id(ids, i + 3 * groups)
    while i < num_ids:
        # The next ids are in flight while these rows are.
        j = i + ROWS * groups
        next_a, next_b = read_id(ids, j), read_id(ids, j + groups)
        next_c, next_d = read_id(ids, j + 2 * groups), read_id(ids, j + 3 * groups)
        count = np.int32(1 + (i + groups < num_ids) + (i + 2 * groups < num_ids) + (i + 3 * groups < num_ids))
        if bits.shape[0] > 0:
            row_a = find_address_of_two(hot, cold, bits, ranks, a, num_rows, source_bytes)
            row_b = find_address_of_two(hot, cold, bits, ranks, b, num_rows, source_bytes)
            row_c = find_address_of_two(hot, cold, bits, ranks, c, num_rows, source_bytes)
            row_d = find_address_of_two(hot, cold, bits, ranks, d, num_rows, source_bytes)
        else:
            row_a = find_address(hot, a, num_rows, source_bytes)
            row_b = find_address(hot, b, num_rows, source_bytes)
            row_c = find_address(hot, c, num_rows, source_bytes)
            row_d = find_address(hot, d, num_rows, source_bytes)
        copy_four_rows(kind, out + np.uint64(i * row_bytes), groups * row_bytes, count, row_bytes, lane, lanes, row_a,
                       row_b, row_c, row_d, read_exponent(exponents, a, num_rows),
                       read_exponent(exponents, b, num_rows), read_exponent(exponents, c, num_rows),
                       read_exponent(exponents, d, num_rows))  # fmt: skip
        report_id(ids, i, a, num_rows, errors)
        report_id(ids, i + groups, b, num_rows, errors)
        report_id(ids, i + 2 * groups, c, num_rows, errors)
        report_id(ids, i + 3 * groups, d, num_rows, errors)
        a, b, c, d = next_a, next_b, next_c, next_d
        i = j


# (handle, address, number of bytes, offset in the file) -> number of bytes read, negative if none could be.
pread = system_function("pread", "i8 i4 i8 i8 i8")


@cpu_kernel
def read_file_rows_cpu(handle, offset, ids, positions, out):
    """Read row `ids[i]` of the file to `out[positions[i]]`; returns how many were read before an incomplete one.

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


MOST_TABLES = 4

copy_items = device_function("copy_items", "i8 i8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4")
shift_number = device_function("shift_number", "u8 i8 u8 i8 i8")


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


# Bytes of a cache line, and graphs whose rows are requested before they are copied: they lie far apart.
LINE = 64
AHEAD = 4


@body
def prefetch_run(address, num_bytes):
    """Ask for the cache lines of bytes that lie side by side."""
    for at in range(0, num_bytes, LINE):
        prefetch(address + at)


@body
def fill_words(words, value):
    """Write a number to all items."""
    for i in range(words.shape[0]):
        words[i] = value


@body
def shift_words(words, shift):
    """Add a number to all items."""
    for i in range(words.shape[0]):
        words[i] += shift


@cpu_sequence
def place_graphs_cpu(numbers, spans, ptr):
    """Place the graphs of a batch one after the other, in each group of tables."""
    groups = ptr.shape[0]
    for g in range(groups):
        ptr[g, 0] = 0
    for b in range(numbers.shape[0]):
        for g in range(groups):
            ptr[g, b + 1] = ptr[g, b] + spans[numbers[b], groups + g]


@cpu_kernel
def copy_graphs_cpu(numbers, spans, ptr, columns):
    """Copy the rows of graphs out of tables, each viewed as lines of rows.

    A table has seven numbers in `columns`, int64 `[C, 7]`. The first two are addresses, of its output and its own. Then
    come its group, or -1 if each graph has one row, the bytes of a row, its lines and its rows. The last is the group
    whose first row of the graph in the batch is added to its items, int64; -1 for none.

    An output without a table, of address 0, gets the number of the graph in the batch for each row, int64.
    """
    count = numbers.shape[0]
    for b in prange(count):
        ahead = min(b + AHEAD, count - 1)
        for c in range(columns.shape[0]):
            group, width = columns[c, 2], columns[c, 3]
            first, rows = numbers[ahead], np.int64(1)
            if group >= 0:
                first, rows = spans[numbers[ahead], group], ptr[group, ahead + 1] - ptr[group, ahead]
            for line in range(columns[c, 4] if columns[c, 1] != 0 else 0):
                prefetch_run(columns[c, 1] + (line * columns[c, 5] + first) * width, rows * width)
        for c in range(columns.shape[0]):
            group, width = columns[c, 2], columns[c, 3]
            first, place, rows, total = numbers[b], np.int64(b), np.int64(1), np.int64(count)
            if group >= 0:
                first, place, total = spans[numbers[b], group], ptr[group, b], ptr[group, count]
                rows = ptr[group, b + 1] - place
            for line in range(columns[c, 4]):
                target = columns[c, 0] + (line * total + place) * width
                if columns[c, 1] == 0:
                    fill_words(view_words(target, rows), b)
                    continue
                memcpy(target, columns[c, 1] + (line * columns[c, 5] + first) * width, rows * width)
                if columns[c, 6] >= 0:
                    shift_words(view_words(target, rows), ptr[columns[c, 6], b])


# Numbers of a column in `words`, and kinds of columns.
COLUMN = 12
COPIED, SHIFTED, NUMBERED, LISTED = 0, 1, 2, 3
# Threads that copy the rows of a graph together.
LANES = 32


@gpu_kernel("i8[] i8 i8", sources=("narrow",))
def collate_graphs_gpu(words, most, columns):
    """A few lanes for each graph and column, whose batch has at most `most` graphs. Lists begin behind the columns."""
    none, lists = np.uint64(0), columns * COLUMN
    lane = np.int64(cuda.threadIdx.x % LANES)
    pair = (np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) // LANES
    while pair < most * columns:
        column = pair // most
        b = pair - column * most
        at = column * COLUMN
        out, table, kind = np.uint64(words[at]), np.uint64(words[at + 1]), words[at + 2]
        firsts, ptr, width = lists + words[at + 3], lists + words[at + 4], words[at + 6]
        count = words[at + 9]
        place, rows, total = b, np.int64(1), count
        if b >= count:
            rows = np.int64(0)
        elif words[at + 4] >= 0:
            place, total = words[ptr + b], words[ptr + count]
            rows = words[ptr + b + 1] - place
        if kind == LISTED:
            # The list itself, by the lanes of all graphs.
            i = b * LANES + lane
            while i < words[at + 7]:
                shift_number(out, i, none, np.int64(0), words[firsts + i])
                i += most * LANES
        elif kind == NUMBERED:
            i = lane
            while i < rows:
                shift_number(out, place + i, none, np.int64(0), b)
                i += LANES
        elif rows > 0:
            for line in range(words[at + 7]):
                to = (line * total + place) * width
                source = (line * words[at + 8] + words[firsts + b]) * width
                i = lane
                while i < rows * width:
                    if kind == SHIFTED:
                        shifts = lists + words[at + 10]
                        shift_number(out, to + i, table, source + i, words[shifts + line * words[at + 11] + b])
                    else:
                        copy_items(to + i, source + i, table, none, none, none, out, none, none, none,
                                   np.int32(words[at + 5]), np.int32(0), np.int32(0), np.int32(0))  # fmt: skip
                    i += LANES
        pair += np.int64(cuda.gridDim.x) * (THREADS // LANES)


@cpu_kernel
def shift_graphs_cpu(numbers, spans, ptr, group, table, shifts, out):
    """Copy the items of graphs out of the lines of a table, with a number of each graph added.

    `shifts` is `[B, L]` for L lines, or `[B, 1]` for all of them.
    """
    count, address, width = numbers.shape[0], np.int64(table.ctypes.data), table.itemsize
    for b in prange(count):
        ahead = min(b + AHEAD, count - 1)
        first, rows = spans[numbers[ahead], group], ptr[group, ahead + 1] - ptr[group, ahead]
        for line in range(table.shape[0]):
            prefetch_run(address + (line * table.shape[1] + first) * width, rows * width)
        first, place = spans[numbers[b], group], ptr[group, b]
        for line in range(table.shape[0]):
            shift = shifts[b, min(line, shifts.shape[1] - 1)]
            own, target = table[line, first:], out[line, place : ptr[group, b + 1]]
            for i in range(target.shape[0]):
                target[i] = own[i] + shift


@cpu_kernel
def scatter_rows_cpu(rows, ids, table):
    for i in prange(ids.shape[0]):
        for f in range(rows.shape[1]):
            table[ids[i], f] = rows[i, f]


@gpu_kernel("T[] I[] i8 i8 T[] i8[]", T=("u1", "i2", "u4", "i8"), I=("i4", "i8"))
def scatter_items_gpu(rows, ids, num_rows, width, table, errors):
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < rows.shape[0]:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = read_id(ids, i)
        if is_row(item, num_rows):
            table[item * width + at - i * width] = rows[at]
        report_id(ids, i, item, num_rows, errors)
        at += np.int64(cuda.gridDim.x) * THREADS
