"""Sums of contents, word for word."""

from __future__ import annotations

from collections.abc import Sequence


def mix(number: int) -> int:
    """A number of 64 bits for a place: the first half of SplitMix64's finaliser."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9 % 2**64
    return mixed ^ (mixed >> 29)


def sum_words(words: Sequence[int]) -> int:
    """The sum of words of 64 bits: of each chunk, the classes of places modulo 761 and 769, each times an odd number of
    its place among all classes, and one of the chunk.
    """
    total = 0
    for chunk, begin in enumerate(range(0, len(words), 131072)):
        classes = [0] * (761 + 769)
        for place, word in enumerate(words[begin : begin + 131072]):
            classes[place % 761] += word
            classes[761 + place % 769] += word
        for place, added in enumerate(classes):
            own = added % 2**64
            total += (own ^ (own >> 32)) * (mix(place) | 1) * (mix(chunk) | 1)
    return total % 2**64
