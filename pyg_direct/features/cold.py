"""Where the rows that are not hot lie when several processes read them: what fits the memory of their hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.device import abilities
from pyg_direct.runtime.group import gather, identify_host
from pyg_direct.runtime.host import HOST_SHARE, available_bytes

COLD_POLICIES = ("auto", "unified", "pinned", "shard")


class Room(NamedTuple):
    """What a process says of its host.

    Attributes:
        host: A word that the processes of the host have in common.
        num_bytes: Host memory that rows may take.
        is_shared: Whether its rows lie in memory that processes share already.
    """

    host: str
    num_bytes: int
    is_shared: bool


def check_cold(cold_policy: str, cache_policy: str | None) -> None:
    """Refuse a policy that is none, and rows that are shared in two ways at once.

    Raises:
        ArgumentError: named argument, rule and value.
    """
    if cold_policy not in COLD_POLICIES:
        raise ArgumentError(f"cold_policy must be one of {', '.join(COLD_POLICIES)}, got {cold_policy!r}")
    if cold_policy == "shard" and cache_policy == "p2p_clique_replicate":
        raise ArgumentError("cold_policy='shard' needs cache_policy='device_replicate', as each process keeps hot rows "
                            "of its own, got 'p2p_clique_replicate'")  # fmt: skip


def choose_cold(policy: str, num_bytes: int, devices: Sequence[int]) -> str:
    """Where the processes of these GPUs read `num_bytes` of host memory: `unified`, a copy for each, or `pinned`.

    Unified memory is read at the rate of the link at any size, but no two processes can share it.
    """
    if policy in ("unified", "pinned"):
        return policy
    if not all(abilities(index).managed_without_migration for index in devices):
        return "pinned"
    return "unified" if len(devices) * num_bytes <= HOST_SHARE * available_bytes() else "pinned"


def ask_rooms(is_shared: bool) -> list[Room]:
    """What each process of the group has, by rank; called by all of them."""
    return [Room(*room) for room in gather((identify_host(), int(HOST_SHARE * available_bytes()), is_shared))]


def find_too_small(rooms: Sequence[Room], num_bytes: int) -> Room | None:
    """A host that cannot hold all rows once, where every host can hold the shares of its processes; else None.

    Shares of the processes of one host are no less than one copy of the rows.

    Args:
        rooms: Of all processes.
        num_bytes: Of all rows.
    """
    counts, lacking = Counter(room.host for room in rooms), None
    for host, count in counts.items():
        here = [room for room in rooms if room.host == host]
        least = min(here, key=lambda room: room.num_bytes)
        if any(room.is_shared for room in here) or num_bytes <= least.num_bytes:
            continue
        if num_bytes * count > least.num_bytes * len(rooms):
            return None
        lacking = least
    return lacking
