"""Sums of contents: each word of an array is multiplied by an odd number of its position, then added.

The high half of a word is folded into its low half before, so that changes of signs count in many bits of the product.
A changed word, or a swap of two, almost certainly changes the sum. The odd number is a product: one number for the
position within a block of `BLOCK` words, and one for the block. So the former are mixed once, and NumPy needs few
steps. Both are mixed as by the first half of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). Sums are equal for any
number of threads.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, prange, view_words

BLOCK = 1 << 15
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


@cpu_kernel
def sum_all_cpu(places, factors, sums):
    """Add up the products of several arrays of words; each chunk's sum goes to `sums`, uint64 `[A, C]`.

    `places` are the address of each array and its number of words, int64 `[A, 2]`, and `factors` the odd numbers of the
    positions within a block, uint64 `[BLOCK]`.
    """
    chunks = sums.shape[1]
    # One loop for all: to wake other threads takes as long as to add up 100 KB.
    for c in prange(chunks):
        for a in range(places.shape[0]):
            words = view_words(places[a, 0], places[a, 1]).view(np.uint64)
            share = (words.shape[0] + chunks - 1) // chunks
            begin = min(c * share, words.shape[0])
            sums[a, c] = sum_piece(words, begin, min(begin + share, words.shape[0]), factors)


@cpu_kernel
def sum_some_cpu(words, pieces, length, factors, sums):
    """Add up the products of `pieces` runs of `length` words, uint64 `[n]`: one at a random position in each equal part
    of the words. Each chunk's sum goes to `sums`, uint64 `[C]`.
    """
    chunks, part = sums.shape[0], words.shape[0] // pieces
    share = (pieces + chunks - 1) // chunks
    for c in prange(chunks):
        total = np.uint64(0)
        for p in range(min(c * share, pieces), min((c + 1) * share, pieces)):
            first = p * part + np.int64(mix_place(p) % np.uint64(part - length + 1))
            total += sum_piece(words, first, first + length, factors)
        sums[c] = total
