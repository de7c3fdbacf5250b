"""Neighbor lists of the processes of a host: once in memory that all see, and where each one's GPU reads them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from pyg_direct.features.cold import choose_cold
from pyg_direct.graph.placed import PLACEMENTS
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.runtime.group import give_to_host, has_group

_LOGGER = logging.getLogger(__name__)
_ON_HOST = ("unified", "pinned")
# A GPU, or None for the CPU, and a placement.
Place = tuple[int | None, str]
# What was chosen together is not asked again, as by a loader that one process alone has.
_CHOSEN: WeakKeyDictionary[CSRTopo, dict[tuple[str, torch.device], str]] = WeakKeyDictionary()


class Kept(NamedTuple):
    """What the first process of a host gives the others.

    Attributes:
        topology: Its own; None where no process reads it from the host.
        places: Where each process has its neighbor lists, with the number of its GPU.
    """

    topology: CSRTopo | None
    places: list[Place]


def settle_places(said: Sequence[Place], num_bytes: int, cold_policy: str) -> list[Place]:
    """Where the processes of a host have neighbor lists that they choose a place for.

    Those that cannot have them in GPU memory read a unified copy each where the host has room for as many, else one
    that is page-locked.

    Args:
        said: (GPU or None for the CPU, the place that it would choose alone) of each.
        num_bytes: Of the lists.
        cold_policy: `unified` and `pinned` are for all of those; `auto`, and `shard`, which is about rows, decide.
    """
    devices = [index for index, place in said if place in _ON_HOST and index is not None]
    if not devices:
        return list(said)
    if cold_policy not in _ON_HOST:
        # Where there is room, each has what its GPU was measured to read faster.
        if choose_cold("auto", num_bytes, devices) == "unified":
            return list(said)
        cold_policy = "pinned"
    return [(index, cold_policy if place in _ON_HOST else place) for index, place in said]


def keep_once(topology: CSRTopo, placement: str, device: torch.device, cold_policy: str) -> str:
    """Where this process has a topology that all processes of a group have; first called by all of them.

    Its arrays become views of memory that the processes of the host share, if they equal those of the first of them.

    Args:
        topology: Equal in all processes.
        placement: See `CSRTopo.place`; `auto` is decided here, by all processes of a host.
        device: The one that samples.
        cold_policy: See `settle_places`.
    """
    if not has_group() or placement not in ("auto", *PLACEMENTS):
        return placement
    chosen = _CHOSEN.setdefault(topology, {})
    if (placement, device) not in chosen:
        chosen[placement, device] = _choose(topology, placement, device, cold_policy)
    return chosen[placement, device]


def _choose(topology: CSRTopo, placement: str, device: torch.device, cold_policy: str) -> str:
    begin = time.perf_counter()
    own = topology.choose_placement(device) if placement == "auto" else placement

    def make(said: list[Any]) -> Kept:
        places: list[Place] = [(index, place) for index, place in said]
        if placement == "auto":
            places = settle_places(places, topology.num_bytes, cold_policy)
        return Kept(topology if any(place != "cuda" for _, place in places) else None, places)

    kept = give_to_host(make, (device.index, own))
    # On the CPU all have the same place.
    place = next(place for index, place in kept.places if index == device.index)
    if kept.topology is None:
        return place
    is_shared = kept.topology is topology or topology.adopt(kept.topology)
    copies = sum(place == "unified" for _, place in kept.places)
    _LOGGER.info("%d edges in %s memory, %s: %d processes of this host keep %.3f GB in %d + 1 copies; in %.1f s",
                 topology.edge_count, place, "shared" if is_shared else "of this process alone", len(kept.places),
                 (copies + 1) * topology.num_bytes / 1e9, copies, time.perf_counter() - begin)  # fmt: skip
    return place
