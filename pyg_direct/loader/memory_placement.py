"""Placement of the rows of a graph, chosen by free memory, and the log line that reports it.

`settle_places` and `keep_once` keep neighbor lists once per host, in memory shared by all its processes. They choose
the memory from which the GPU of each process reads the lists.
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

# Rows of at most so many bytes, such as labels and masks, go to the GPU even if wider ones stay on the host. A read
# over the link costs the same for one byte as for a line.
_NARROW_ROW = 16


class Rows(NamedTuple):
    """An attribute to be placed: its key, size and length, and if its hot rows may be copied to the GPU."""

    key: Any
    num_bytes: int
    num_rows: int
    may_be_cached: bool

    @property
    def is_narrow(self) -> bool:
        """True if a row is so short that most of a read over the link would be unused."""
        return self.num_bytes <= _NARROW_ROW * self.num_rows


class Choice(NamedTuple):
    """Place of an attribute: `cuda`, or `host` with a number of bytes of hot rows in GPU memory."""

    place: str
    hot_bytes: int = 0


def choose_places(attributes: Sequence[Rows], budget: int, *, is_auto: bool, fill_cache: bool) -> dict[Any, Choice]:
    """Choose places of attributes in order of benefit: short rows, whole small tables, hot rows of the others by size.

    Args:
        budget: GPU memory in bytes that they may take together.
        is_auto: True if wide attributes may go to the GPU; short ones may always, up to a quarter of the budget each.
        fill_cache: Use the rest of the budget for hot rows.
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
    """Result of a choice: name, size, place, and the share of it that is also in GPU memory."""

    name: str
    num_bytes: int
    where: str
    hot_share: float = 0.0

    def __str__(self) -> str:
        """Describe it for the line about placement, such as `x 9.5 GB unified (12 % hot in GPU memory)`."""
        where = f"on {self.where}" if ":" in self.where or self.where == "cpu" else self.where
        hot = f" ({100 * self.hot_share:.0f} % hot in GPU memory)" if self.hot_share > 0 else ""
        return f"{self.name} {show_bytes(self.num_bytes)} {where}{hot}"


def describe(parts: Iterable[Placed]) -> str:
    """Describe places in one line, such as `topology 1.0 GB on cuda:0, x 9.5 GB unified (12 % hot in GPU memory)`."""
    return ", ".join(map(str, parts))


_LOGGER = logging.getLogger(__name__)
_ON_HOST = ("unified", "pinned")
# A GPU, or None for the CPU, and a placement.
Place = tuple[int | None, str]
# Cache of common choices: the choice is collective, and a later loader may exist in one process only.
_CHOSEN: WeakKeyDictionary[CSRTopo, dict[tuple[str, torch.device], str]] = WeakKeyDictionary()


class Kept(NamedTuple):
    """Message from the first process of a host to the others.

    Attributes:
        topology: Its own topology; None if no process reads it from the host.
        places: Place of the neighbor lists of each process, with the number of its GPU.
    """

    topology: CSRTopo | None
    places: list[Place]


def settle_places(said: Sequence[Place], num_bytes: int, cold_policy: str) -> list[Place]:
    """Choose the places of neighbor lists for the processes of a host.

    Processes without room in GPU memory read one unified copy each if the host has room for these, otherwise one
    page-locked copy.

    Args:
        said: (GPU or None for the CPU, the place that it would choose alone) for each process.
        num_bytes: Bytes of the lists.
        cold_policy: `unified` and `pinned` apply to all of these processes; `auto`, and `shard`, which concerns rows,
            choose.
    """
    devices = [index for index, place in said if place in _ON_HOST and index is not None]
    if not devices:
        return list(said)
    if cold_policy not in _ON_HOST:
        # If there is room, each process has the placement that its GPU reads faster, by measurement.
        if choose_cold("auto", num_bytes, devices) == "unified":
            return list(said)
        cold_policy = "pinned"
    return [(index, cold_policy if place in _ON_HOST else place) for index, place in said]


def keep_once(topology: CSRTopo, placement: str, device: torch.device, cold_policy: str) -> str:
    """Find the place in this process of a topology that all processes of a group have; the first call is collective.

    If its arrays equal the arrays of the host's first process, they become views of memory shared by its processes.

    Args:
        placement: See `CSRTopo.place`; `auto` is decided here, by all processes of a host.
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
    # On the CPU all processes have the same place.
    place = next(place for index, place in kept.places if index == device.index)
    if kept.topology is None:
        return place
    is_shared = kept.topology is topology or topology.adopt(kept.topology)
    copies = sum(place == "unified" for _, place in kept.places)
    _LOGGER.info("%d edges in %s memory, %s: %d processes of this host keep %.3f GB in %d + 1 copies; in %.1f s",
                 topology.edge_count, place, "shared" if is_shared else "of this process alone", len(kept.places),
                 (copies + 1) * topology.num_bytes / 1e9, copies, time.perf_counter() - begin)  # fmt: skip
    return place
