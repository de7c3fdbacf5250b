"""How many snapshots to aggregate at once, and in which form (PiPAD, section 4.4).

Speeds of the device are measured once and kept on disk; with them the seconds of every option are told from the edges
that snapshots share. Options nest: a group of eight stays whole or falls apart into two of four, and so on, so that the
best choice for each half is that of the whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.disk import recall
from pyg_direct.dynamic.group import build_group
from pyg_direct.dynamic.operator import Factors
from pyg_direct.ops.overlap import EdgeUnion, merge_unions
from pyg_direct.ops.snapshots import aggregate_snapshots

_WIDTHS = (1, 4, 16, 64, 256)
_NODES, _EDGES = 20_000, 200_000


@dataclass(frozen=True)
class Speeds:
    """What a device needs.

    Attributes:
        seconds_of_width: Seconds an edge whose row has 1, 4, 16, 64 and 256 numbers.
        launch_seconds: Seconds of an aggregation without edges.
        bytes_per_second: From host memory to the device; 0 where these are one.
    """

    seconds_of_width: tuple[float, ...]
    launch_seconds: float
    bytes_per_second: float

    def per_edge(self, width: int) -> float:
        """Seconds of an edge with `width` numbers, between measured widths in proportion."""
        place = min(max(0.0, math.log(max(1, width), 4)), len(_WIDTHS) - 1.0)
        low = min(int(place), len(_WIDTHS) - 2)
        share = place - low
        known = self.seconds_of_width
        between = math.exp((1 - share) * math.log(known[low]) + share * math.log(known[low + 1]))
        return between * max(1.0, width / _WIDTHS[-1])


class Option(NamedTuple):
    """A group of snapshots and what it is expected to take.

    Attributes:
        first, last: Snapshots [first, last).
        form: "split" or "mask".
        seconds: Of its aggregation, the transfer of its structure included.
        overlap_rate: S * shared edges / edges of all its snapshots.
    """

    first: int
    last: int
    form: str
    seconds: float
    overlap_rate: float

    def __str__(self) -> str:
        return (
            f"snapshots {self.first} to {self.last - 1}: {self.form}, overlap {self.overlap_rate:.2f}, "
            f"{1e6 * self.seconds:.0f} us expected"
        )


def expect_options(union: EdgeUnion, num_edges: int, channels: int, first: int, speeds: Speeds,
                   num_weights: int = 0) -> list[Option]:  # fmt: skip
    """The options for one group; for a single snapshot both forms are one.

    Args:
        union: Edges of the group.
        num_edges: Edges of all its snapshots, each counted in each.
        channels: F.
        first: Its first snapshot.
        speeds: Of the device.
        num_weights: Weights of an edge in a snapshot, 0 or 1.
    """
    size = union.num_snapshots
    shared = int((union.presence == union.full).sum())
    rate = size * shared / num_edges if num_edges else 1.0

    def sum_up(wide: int, narrow: int, launches: int, num_bytes: int) -> float:
        copied = num_bytes / speeds.bytes_per_second if speeds.bytes_per_second else 0.0
        work = wide * speeds.per_edge(size * channels) + narrow * speeds.per_edge(channels)
        return work + launches * speeds.launch_seconds + copied

    rest = num_edges - size * shared
    edge_bytes = 4 + 4 * num_weights
    union_bytes = union.keys.numel() * (5 + 4 * num_weights * size)
    mask = Option(first, first + size, "mask", sum_up(union.keys.numel(), 0, 1, union_bytes), rate)
    if size == 1:
        return [mask]
    split_bytes = shared * (4 + 4 * num_weights * size) + rest * edge_bytes
    return [mask, Option(first, first + size, "split", sum_up(shared, rest, 2, split_bytes), rate)]


def choose_groups(keys: Sequence[Tensor], channels: int, speeds: Speeds, first: int = 0, num_weights: int = 0,
                  largest: int = 8) -> list[Option]:  # fmt: skip
    """The options that together take the least for consecutive snapshots.

    Args:
        keys: target * N + source of the edges of 1 to 8 snapshots, ascending and unique.
        channels: F.
        speeds: Of the device.
        first: Number of the first snapshot.
        num_weights: Weights of an edge in a snapshot, 0 or 1.
        largest: Snapshots of a group at most, where memory bounds it.
    """
    groups = []
    for offset, part in enumerate(keys):
        union = EdgeUnion.of(part)
        options = expect_options(union, part.numel(), channels, first + offset, speeds, num_weights)
        groups.append((union, part.numel(), options))
    while len(groups) > 1:
        merged = []
        for low in range(0, len(groups) - 1, 2):
            (left, left_edges, left_options), (right, right_edges, right_options) = groups[low : low + 2]
            union, num_edges = merge_unions(left, right), left_edges + right_edges
            apart = left_options + right_options
            options = expect_options(union, num_edges, channels, apart[0].first, speeds, num_weights)
            best = min(options, key=lambda option: option.seconds)
            whole = union.num_snapshots <= largest and best.seconds <= sum(option.seconds for option in apart)
            merged.append((union, num_edges, [best] if whole else apart))
        groups = merged + groups[2 * len(merged) :]
    return groups[0][2]


def find_speeds(device: torch.device) -> Speeds:
    """The speeds of a device, measured at the first call on this machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"

    def is_valid(kept: Any) -> bool:
        return isinstance(kept, list) and len(kept) == 3 and len(kept[0]) == len(_WIDTHS)

    widths, launch, rate = recall("snapshots", f"{name} 1", lambda: _measure(device), is_valid)
    return Speeds(tuple(widths), launch, rate)


def _measure(device: torch.device) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(_NODES * _NODES, (_EDGES,), generator=generator).unique()
    group = build_group([Factors(keys, None, None, None, None)], _NODES).to(device)
    empty = build_group([Factors(keys[:0], None, None, None, None)], _NODES).to(device)
    launch = _time(lambda: aggregate_snapshots(torch.zeros(_NODES, 1, 1, device=device), empty), device)
    widths = []
    for width in _WIDTHS:
        x = torch.zeros(_NODES, 1, width, device=device)
        widths.append(max(1e-13, _time(lambda x=x: aggregate_snapshots(x, group), device) / keys.numel()))
    if device.type != "cuda":
        return [widths, launch, 0.0]
    host = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True)
    return [widths, launch, host.numel() / _time(lambda: host.to(device, non_blocking=True), device)]


def _time(work: Any, device: torch.device) -> float:
    """Least of a few times; the first call compiles."""

    def run() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    run()
    return min(run() for _ in range(5))
