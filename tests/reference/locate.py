"""Places of ids among those that are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def locate(ids: Sequence[int], present: Collection[int]) -> list[int]:
    """Rank of each id among the present ones, in ascending order; -1 if it is not there."""
    ranks = {item: rank for rank, item in enumerate(sorted(present))}
    return [ranks.get(item, -1) for item in ids]
