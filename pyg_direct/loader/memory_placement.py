"""Placement of the rows of a graph, chosen by free memory, and the log line that reports it.

`settle_places` and `keep_once` keep neighbor lists once per host, in memory that all its processes see. They choose
where the GPU of each process reads the lists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from pyg_direct.features.process_sharing import choose_cold
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.placed_topology import AUTO_PLACEMENTS
from pyg_direct.profiling import show_bytes
from pyg_direct.runtime.comm.host_group import give_to_host, has_group

# Rows of at most so many bytes, such as labels and masks, go to the GPU also where wider ones stay on the host: a
# read over the link costs the same for one byte as for a line.
_NARROW_ROW = 16


class Rows(NamedTuple):
    """One attribute that is to be placed: its key, size, length and whether its hot rows may be copied to the GPU."""

    key: Any
    num_bytes: int
    num_rows: int
    may_be_cached: bool

    @property
    def is_narrow(self) -> bool:
        """Whether a row is so short that reading it over the link would be a waste."""
        return self.num_bytes <= _NARROW_ROW * self.num_rows


class Choice(NamedTuple):
    """Where an attribute lives: `cuda`, or `host` with so many bytes of hot rows in GPU memory."""

    place: str
    hot_bytes: int = 0


def choose_places(attributes: Sequence[Rows], budget: int, *, is_auto: bool, fill_cache: bool) -> dict[Any, Choice]:
    """Places of attributes in the order in which GPU memory does most good: short rows, then small tables whole, then
    the hot rows of the others, each in proportion to its size.

    Args:
        attributes: What is to be placed.
        budget: GPU memory in bytes that they may take together.
        is_auto: Whether wide attributes may go to the GPU; short ones may in any case, up to a quarter of the budget
            each.
        fill_cache: Whether what is left of the budget goes to hot rows.
    """
    places = {}
    for rows in sorted(attributes, key=lambda rows: rows.num_bytes):
        fits = rows.num_bytes <= budget if is_auto else rows.is_narrow and 4 * rows.num_bytes <= budget
        places[rows.key] = Choice("cuda" if fits else "host")
        budget -= rows.num_bytes if fits else 0
    cached = [rows for rows in attributes if rows.may_be_cached and places[rows.key].place == "host"]
    total = sum(rows.num_bytes for rows in cached)
    if fill_cache and budget > 0:
        for rows in cached:
            places[rows.key] = Choice("host", budget * rows.num_bytes // total)
    return places


class Placed(NamedTuple):
    """What came of a choice: name, size, where, and the share of it that is also in GPU memory."""

    name: str
    num_bytes: int
    where: str
    hot_share: float = 0.0


def describe(parts: Iterable[Placed]) -> str:
    """One line, such as `topology 1.0 GB on cuda:0, x 9.5 GB unified (12 % hot in GPU memory)`."""
    words = []
    for part in parts:
        where = f"on {part.where}" if ":" in part.where else part.where
        hot = f" ({100 * part.hot_share:.0f} % hot in GPU memory)" if part.hot_share > 0 else ""
        words.append(f"{part.name} {show_bytes(part.num_bytes)} {where}{hot}")
    return ", ".join(words)


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
    if not has_group() or placement not in AUTO_PLACEMENTS:
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
