"""Sums of contents, word for word."""

from __future__ import annotations

from collections.abc import Sequence


def sum_words(words: Sequence[int]) -> int:
    """The sum of words of 64 bits, each mixed with its place."""
    total = 0
    for place, word in enumerate(words):
        mixed = (word + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9 % 2**64
        total += mixed ^ (mixed >> 29)
    return total % 2**64
