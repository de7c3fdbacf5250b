"""Sums of contents: each word of an array is mixed with its position, then added.

The mixing is the first half of SplitMix64's (Steele, Lea & Flood, OOPSLA 2014). A changed word, or a swap of two,
almost certainly changes the sum. Sums are equal for any number of threads.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, prange

_STEP, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@body
def mix_word(word, place):
    """Mix a word of 64 bits with its position."""
    mixed = np.uint64(word + (np.uint64(place) + np.uint64(1)) * _STEP)
    mixed = np.uint64((mixed ^ (mixed >> np.uint64(32))) * _FACTOR)
    return np.uint64(mixed ^ (mixed >> np.uint64(29)))


@body
def sum_piece(words, begin, end):
    """Sum the mixed words [begin, end)."""
    # From 0: an index that could be negative, counted from the end, would prevent vector instructions.
    own, total = words[begin:end], np.uint64(0)
    place = np.uint64(begin)
    for i in range(own.shape[0]):
        total += mix_word(own[i], place + np.uint64(i))
    return total


@cpu_kernel
def sum_all_cpu(words, sums):
    """Add up the mixed words, uint64 `[n]`; each chunk's sum goes to `sums`, uint64 `[C]`."""
    chunks = sums.shape[0]
    share = (words.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin = min(c * share, words.shape[0])
        sums[c] = sum_piece(words, begin, min(begin + share, words.shape[0]))


@cpu_kernel
def sum_some_cpu(words, pieces, length, sums):
    """As `sum_all_cpu`, for `pieces` runs of `length` words: one at a random position in each equal part of the
    words.
    """
    chunks, part = sums.shape[0], words.shape[0] // pieces
    share = (pieces + chunks - 1) // chunks
    for c in prange(chunks):
        total = np.uint64(0)
        for p in range(min(c * share, pieces), min((c + 1) * share, pieces)):
            first = p * part + np.int64(mix_word(np.uint64(0), p) % np.uint64(part - length + 1))
            total += sum_piece(words, first, first + length)
        sums[c] = total
