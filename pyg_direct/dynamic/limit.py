"""What stays on the device under a limit: what saves the most bytes of copies for each byte that it takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """Something that may stay on the device.

    Attributes:
        key: Its name.
        held_bytes: What it takes there.
        saved_bytes: What need not be copied in an epoch if it stays.
    """

    key: Any
    held_bytes: int
    saved_bytes: int


def choose_kept(candidates: Iterable[Candidate], num_bytes: int) -> set[Hashable]:
    """Keys of those that stay in `num_bytes`: by bytes saved for each byte held, as long as there is room.

    Of equal ones the first come first. What saves nothing does not stay.
    """
    useful = [c for c in candidates if c.saved_bytes > 0]
    kept: set[Hashable] = set()
    for candidate in sorted(useful, key=lambda c: -c.saved_bytes / max(1, c.held_bytes)):
        if candidate.held_bytes <= num_bytes:
            num_bytes -= candidate.held_bytes
            kept.add(candidate.key)
    return kept


def choose_among(lists: Sequence[Sequence[Candidate]], num_bytes: int) -> tuple[list[list[Any]], int, int]:
    """`choose_kept` among the candidates of several lists.

    Returns:
        Keys of each list that stay, bytes of room that are left, and bytes that are copied for those that do not stay.
    """
    candidates = [c._replace(key=(number, c.key)) for number, known in enumerate(lists) for c in known]
    chosen = choose_kept(candidates, num_bytes)
    kept = [[c.key for c in known if (number, c.key) in chosen] for number, known in enumerate(lists)]
    room = num_bytes - sum(c.held_bytes for c in candidates if c.key in chosen)
    return kept, room, sum(c.saved_bytes for c in candidates if c.key not in chosen)


def count_entries(frames: Sequence[range]) -> Callable[..., int]:
    """How often in an epoch, which begins anew behind its last frame, snapshots come into frames that the frame before
    has not.

    Args:
        frames: Snapshots of each frame, in the order of an epoch.

    Returns:
        A function of ranges of snapshots: frames that have any of all these where the frame before has none.
    """
    spans = [(min(f[0], f[-1]), max(f[0], f[-1]) + 1) for f in frames]

    def count(*ranges: range) -> int:
        inside = [any(low < times.stop and times.start < high for times in ranges) for low, high in spans]
        return sum(now and not before for now, before in zip(inside, [inside[-1], *inside], strict=False))

    return count
