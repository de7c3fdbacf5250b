"""New identities of a hop and local ids of all its sources, on a CPU, by sorting the sources.

The sources are sorted by identity (`kernels/sampling/worklist.py`), digit by digit, which reads memory in order and
needs no table. One pass then finds equal sources, and sources equal to nodes of earlier hops. New ones come in the
order in which a hop numbers them. Chunks have ranges of identities with about as many sources each.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, cpu_sequence, prange
from pyg_direct.kernels.binary_search import first_not_below

_DIGIT_BITS = 11
_RADIX = 1 << _DIGIT_BITS


@body
def split_range(items, shift, chunks, digits, starts):
    """The first digit of each chunk, and the position of its first item after a sort by the digit above `shift`."""
    before, c = np.int64(0), 0
    counts = np.zeros(_RADIX, np.int64)
    if chunks > 1:
        for e in range(items.shape[0]):
            counts[items[e] >> shift] += 1
    share = (items.shape[0] + chunks - 1) // chunks
    for digit in range(_RADIX):
        while c < chunks and before >= c * share:
            digits[c], starts[c] = digit, before
            c += 1
        before += counts[digit]
    while c <= chunks:
        digits[c], starts[c] = _RADIX, items.shape[0]
        c += 1


@body
def take_range(items, shift, low, high, start, passes, places, keys, order):
    """Put the items with digits [low, high) and their places at `start`, and count their digits of each pass."""
    at = start
    for e in range(items.shape[0]):
        item = items[e]
        digit = item >> shift
        if digit >= low and digit < high:
            keys[at], order[at] = item, e
            at += 1
            for p in range(passes):
                places[p, item & (_RADIX - 1)] += 1
                item >>= _DIGIT_BITS


@body
def move_by_digit(keys, order, to_keys, to_order, begin, end, places, shift):
    """A pass of the sort, stable: keys to the places of their digits (Knuth, TAOCP 3, section 5.2.5)."""
    for i in range(begin, end):
        key = keys[i]
        digit = (key >> shift) & (_RADIX - 1)
        at = places[digit]
        places[digit] = at + 1
        to_keys[at], to_order[at] = key, order[i]


@body
def sort_range(begin, end, passes, places, keys, order, spare_keys, spare_order):
    """Sort keys[begin:end] whose digits were counted, and `order` with them; return True if they end in the spare
    arrays.
    """
    is_spare = False
    for p in range(passes):
        before, most = np.int64(begin), np.int64(0)
        for digit in range(_RADIX):
            number = places[p, digit]
            most = max(most, number)
            places[p, digit] = before
            before += number
        # A digit that all have in common needs no pass.
        if most < end - begin:
            shift = p * _DIGIT_BITS
            if is_spare:
                move_by_digit(spare_keys, spare_order, keys, order, begin, end, places[p], shift)
            else:
                move_by_digit(keys, order, spare_keys, spare_order, begin, end, places[p], shift)
            is_spare = not is_spare
    return is_spare


@body
def find_new(begin, end, keys, order, known, known_locals, codes, to_order, new):
    """List the distinct keys that are not known from new[begin] on; returns their number.

    `codes` gets the place of each key among them, or -1 - local id of a known one, and `to_order` its source.
    """
    count, last, code = np.int64(0), np.int64(-1), np.int64(0)
    k = first_not_below(known, 0, known.shape[0], keys[begin]) if begin < end else np.int64(0)
    for i in range(begin, end):
        key = keys[i]
        if key != last:
            last = key
            while k < known.shape[0] and known[k] < key:
                k += 1
            if k < known.shape[0] and known[k] == key:
                code = -1 - known_locals[k]
            else:
                code = count
                new[begin + count] = key
                count += 1
        codes[i], to_order[i] = code, order[i]
    return count


@body
def sort_chunk(c, sources, top, passes, digits, starts, known, known_locals, keys, order, spare_keys, spare_order,
               new):  # fmt: skip
    """Sort the items of a chunk and list its new keys (`find_new`); returns their number."""
    begin, end = starts[c], starts[c + 1]
    places = np.zeros((passes, _RADIX), np.int64)
    take_range(sources, top, digits[c], digits[c + 1], begin, passes, places, keys, order)
    if sort_range(begin, end, passes, places, keys, order, spare_keys, spare_order):
        return find_new(begin, end, spare_keys, spare_order, known, known_locals, keys, order, new)
    return find_new(begin, end, keys, order, known, known_locals, keys, order, new)


@body
def close_gaps(bases, chunks, starts, firsts, new, counts, begins):
    """Move the new keys of all chunks together; their number, and the number of each type, go to `counts`."""
    total = np.int64(0)
    for c in range(chunks):
        count = firsts[c]
        if starts[c] != total:
            for i in range(count):
                new[total + i] = new[starts[c] + i]
        firsts[c] = total
        total += count
    firsts[chunks] = total
    for kind in range(bases.shape[0]):
        begins[kind] = first_not_below(new, 0, total, bases[kind])
    counts[0] = total
    for kind in range(bases.shape[0] - 1):
        counts[kind + 1] = begins[kind + 1] - begins[kind]


@body
def write_locals(c, bases, tree_shift, of_type, starts, firsts, begins, keys, order, new, new_locals, rows, trees,
                 local_ids):  # fmt: skip
    """The ids of a chunk's new keys, and the local ids of its sources."""
    first, kind = firsts[c], 0
    for i in range(first, firsts[c + 1]):
        while begins[kind + 1] <= i:
            kind += 1
        place = new[i] - bases[kind]
        tree = place >> tree_shift
        rows[i], new_locals[i] = place - (tree << tree_shift), of_type[kind] + i - begins[kind]
        if trees.shape[0] > 0:
            trees[i] = tree
    for i in range(starts[c], starts[c + 1]):
        code = keys[i]
        local_ids[order[i]] = new_locals[first + code] if code >= 0 else -1 - code


@cpu_kernel
def number_sources_cpu(sources, bases, tree_shift, bits, known, known_locals, of_type, chunks, keys, order, spare_keys,
                       spare_order, new, new_locals, rows, trees, local_ids, counts):  # fmt: skip
    """Local ids of sources of so many `bits`; `of_type` nodes of each type are known.

    `new` gets the identities that are not `known`, ascending, and `new_locals` their local ids. `rows` and `trees` get
    their ids within the types and their trees; an empty array gets none. `counts` gets their number, and the number of
    each type.
    """
    top = max(0, bits - _DIGIT_BITS)
    passes = (bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    digits, starts = np.empty(chunks + 1, np.int64), np.empty(chunks + 1, np.int64)
    firsts, begins = np.empty(chunks + 1, np.int64), np.empty(bases.shape[0], np.int64)
    split_range(sources, top, chunks, digits, starts)
    for c in prange(chunks):
        firsts[c] = sort_chunk(c, sources, top, passes, digits, starts, known, known_locals, keys, order, spare_keys,
                               spare_order, new)  # fmt: skip
    close_gaps(bases, chunks, starts, firsts, new, counts, begins)
    for c in prange(chunks):
        write_locals(c, bases, tree_shift, of_type, starts, firsts, begins, keys, order, new, new_locals, rows, trees,
                     local_ids)  # fmt: skip


@cpu_sequence
def merge_known_cpu(items, local_ids, more, more_locals, out, out_locals):
    """Merge two ascending lists of identities, without common ones, and their local ids."""
    i, j = 0, 0
    for k in range(out.shape[0]):
        if j == more.shape[0] or (i < items.shape[0] and items[i] < more[j]):
            out[k], out_locals[k] = items[i], local_ids[i]
            i += 1
        else:
            out[k], out_locals[k] = more[j], more_locals[j]
            j += 1


@cpu_kernel
def find_known_cpu(sources, known, known_locals, local_ids):
    """Local id of each source, -1 for an unknown one."""
    for e in prange(sources.shape[0]):
        at = first_not_below(known, 0, known.shape[0], sources[e])
        is_there = at < known.shape[0] and known[at] == sources[e]
        local_ids[e] = known_locals[at] if is_there else np.int64(-1)
