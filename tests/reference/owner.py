"""Part that owns a node, and nodes grouped by it."""

from __future__ import annotations

from collections.abc import Sequence

_WORD = 2**64 - 1


def find_owner(item: int, num_parts: int, bounds: Sequence[int], table: Sequence[int]) -> int:
    """By a table; by the first nodes of all parts but the first; or by bits 32 to 62 of splitmix64's finaliser."""
    if table:
        return table[item] if 0 <= item < len(table) else 0
    if bounds:
        return sum(bound <= item for bound in bounds)
    word = item & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (((word >> 32) & 0x7FFFFFFF) * num_parts) >> 31


def find_bucket(owner: int, own: int, num_parts: int) -> int:
    """Place of a part among the others, ascending, and `own` behind them."""
    parts = [part for part in range(num_parts) if part != own]
    return (parts if own < 0 else [*parts, own]).index(owner)


def group(keys: Sequence[int], num_buckets: int) -> tuple[list[int], list[int]]:
    """(positions of the keys, bucket after bucket, first position of each and end of the last)."""
    by_bucket = [[place for place, key in enumerate(keys) if key == bucket] for bucket in range(num_buckets)]
    bounds = [sum(map(len, by_bucket[:bucket])) for bucket in range(num_buckets + 1)]
    return [place for places in by_bucket for place in places], bounds
