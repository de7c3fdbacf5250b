"""Sums of contents, word for word."""

from __future__ import annotations

from collections.abc import Sequence


def mix(number: int) -> int:
    """A number of 64 bits for a place: the first half of SplitMix64's finaliser."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9 % 2**64
    return mixed ^ (mixed >> 29)


def sum_words(words: Sequence[int]) -> int:
    """The sum of words of 64 bits, each times an odd number of its place in its block, and one of the block's place."""
    total = 0
    for place, word in enumerate(words):
        inner = place % 32768
        total += (word ^ (word >> 32)) * (mix(inner) | 1) * (mix(place - inner) | 1)
    return total % 2**64
