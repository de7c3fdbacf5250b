"""Sums of contents: words of an array are added up in classes, and the sum of each is multiplied by an odd number.

The words of a chunk of `CHUNK` words are added up twice: by their positions modulo each of `WIDTHS`. These are primes,
as no usual row of features is a multiple of them. An addition by vector instructions takes a fraction of a product's
time. Changes of up to three words of a chunk change the sum of a class, whatever they are; more
changes almost certainly do. The high half of a sum is folded into its low half, so that changes of signs count in many
bits of the product. The odd number is a product: one number for the class, and one for the chunk.

Samples of larger arrays are words times an odd number for the position within a block of `BLOCK` words, and one for the
block. All of these are mixed as by the first half of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). Sums are equal for
any number of threads.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, prange

BLOCK = 1 << 15
WIDTHS = (761, 769)
CHUNK = 1 << 17
_FIRST, _SECOND = WIDTHS
_STEP, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@body
def mix_place(place):
    """Mix a position, to 64 bits."""
    mixed = np.uint64((np.uint64(place) + np.uint64(1)) * _STEP)
    mixed = np.uint64((mixed ^ (mixed >> np.uint64(32))) * _FACTOR)
    return np.uint64(mixed ^ (mixed >> np.uint64(29)))


@body
def sum_block(words, begin, end, offset, factors):
    """Sum the products of the words [begin, end) of one block, whose first word is `offset`; without its own factor."""
    # From 0: an index that could be negative, counted from the end, would prevent vector instructions.
    own, total = words[begin:end], np.uint64(0)
    odd = factors[begin - offset : end - offset]
    for i in range(own.shape[0]):
        total += (own[i] ^ (own[i] >> np.uint64(32))) * odd[i]
    return total


@body
def sum_piece(words, begin, end, factors):
    """Sum the products of the words [begin, end)."""
    total = np.uint64(0)
    for offset in range(begin // BLOCK * BLOCK, end, BLOCK):
        own = sum_block(words, max(begin, offset), min(end, offset + BLOCK), offset, factors)
        total += own * (mix_place(offset) | np.uint64(1))
    return total


@body
def add_classes(words, sums):
    """Add the words to the class sums of their positions modulo the length of `sums`."""
    width = sums.shape[0]
    for begin in range(0, words.shape[0], width):
        # From 0, as above.
        row = words[begin : begin + width]
        own = sums[: row.shape[0]]
        for i in range(row.shape[0]):
            own[i] += row[i]


@body
def sum_chunks(words, first, last, factors):
    """Sum the products of the chunks [first, last)."""
    total, classes = np.uint64(0), np.empty(_FIRST + _SECOND, np.uint64)
    for c in range(first, last):
        own = words[c * CHUNK : (c + 1) * CHUNK]
        classes[:] = np.uint64(0)
        add_classes(own, classes[:_FIRST])
        add_classes(own, classes[_FIRST:])
        total += sum_block(classes, 0, classes.shape[0], 0, factors) * (mix_place(c) | np.uint64(1))
    return total


@cpu_kernel
def sum_all_cpu(words, factors, sums):
    """Add up the products, uint64 `[n]`; each share's sum goes to `sums`, uint64 `[C]`.

    `factors` are the odd numbers of the positions within a block, and of classes, uint64 `[BLOCK]`.
    """
    shares, chunks = sums.shape[0], (words.shape[0] + CHUNK - 1) // CHUNK
    share = (chunks + shares - 1) // shares
    for c in prange(shares):
        sums[c] = sum_chunks(words, min(c * share, chunks), min((c + 1) * share, chunks), factors)


@cpu_kernel
def sum_some_cpu(words, pieces, length, factors, sums):
    """Add up the products of samples, as `sum_all_cpu`: `pieces` runs of `length` words, one at a random position in
    each equal part of the words.
    """
    chunks, part = sums.shape[0], words.shape[0] // pieces
    share = (pieces + chunks - 1) // chunks
    for c in prange(chunks):
        total = np.uint64(0)
        for p in range(min(c * share, pieces), min((c + 1) * share, pieces)):
            first = p * part + np.int64(mix_place(p) % np.uint64(part - length + 1))
            total += sum_piece(words, first, first + length, factors)
        sums[c] = total
