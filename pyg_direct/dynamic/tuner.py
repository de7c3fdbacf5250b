"""How many snapshots to aggregate at once, and in which form (PiPAD, section 4.4).

Speeds of the device are measured once and kept on disk; with them the seconds of every option are told from the edges
that snapshots share. Options nest: a group of eight stays whole or falls apart into two of four, and so on, so that the
best choice for each half is that of the whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.disk import recall
from pyg_direct.dynamic.group import build_group
from pyg_direct.dynamic.operator import Factors
from pyg_direct.kernels.jit import set_cpu_threads
from pyg_direct.ops.overlap import EdgeUnion, merge_unions
from pyg_direct.ops.sliced import SLICE, slice_keys
from pyg_direct.ops.snapshots import SMALL, SnapshotMatrices, aggregate_snapshots

_WIDTHS = (1, 4, 16, 64, 256)
# Bytes of the rows that edges are read from: in the nearest caches, in the next ones, and beyond.
_FOOTPRINTS = {"cpu": (2**17, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}
# Nodes at most; rows of few numbers stay below the largest of these sizes. Edges at least, and products of theirs: so
# many that all threads of a CPU take part, and that a launch is nothing beside them on a GPU.
_NODES = {"cpu": 10_000, "cuda": 1_000_000}
_EDGES = {"cpu": 20_000, "cuda": 1_000_000}
_PRODUCTS = {"cpu": SMALL, "cuda": 2**22}


@dataclass(frozen=True)
class Speeds:
    """What a device needs.

    Attributes:
        seconds_of_edge: Seconds of an edge whose row has 1, 4, 16, 64 and 256 numbers, and of the row that a slice is
            added to; for rows of so many bytes in all as `footprints` tells.
        test_seconds: Of asking whether a snapshot has an edge.
        call_seconds: Of an aggregation of a single edge, and of sending what it takes.
        launch_seconds: Of a second structure in one aggregation.
        bytes_per_second: From host memory to the device; 0 where these are one.
        few_factor: How much longer an edge takes where there is so little to do that one CPU thread does it.
        footprints: Bytes, ascending.
    """

    seconds_of_edge: tuple[tuple[float, ...], ...]
    test_seconds: float
    call_seconds: float
    launch_seconds: float
    bytes_per_second: float
    few_factor: float = 1.0
    footprints: tuple[int, ...] = _FOOTPRINTS["cpu"]

    def add_up(self, num_edges: int, width: float, footprint: int) -> float:
        """Seconds of so many edges in one structure."""
        factor = self.few_factor if num_edges * width < SMALL else 1.0
        return num_edges * self.per_edge(width, footprint) * factor

    def per_edge(self, width: float, footprint: int = 0) -> float:
        """Seconds of an edge with `width` numbers from rows of so many bytes; between those measured in proportion."""
        width = max(1.0, width)
        across = _interpolate(
            [self._at_width(known, width) for known in self.seconds_of_edge], self.footprints, footprint
        )
        return across * max(1.0, width / _WIDTHS[-1])

    def _at_width(self, known: Sequence[float], width: float) -> float:
        return _interpolate(known, _WIDTHS, width)


def _interpolate(values: Sequence[float], places: Sequence[float], at: float) -> float:
    """The value at a place between others on a line of logarithms; that of the nearest end beyond them."""
    at = min(max(at, places[0]), places[-1])
    high = next(number for number in range(1, len(places)) if at <= places[number])
    share = math.log(at / places[high - 1]) / math.log(places[high] / places[high - 1])
    return math.exp((1 - share) * math.log(values[high - 1]) + share * math.log(values[high]))


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
                   num_weights: int = 0, num_nodes: int = 0,
                   is_stacked: bool = False) -> list[Option]:  # fmt: skip
    """The options for one group; for a single snapshot both forms are one.

    Args:
        union: Edges of the group.
        num_edges: Edges of all its snapshots, each counted in each.
        channels: F.
        first: Its first snapshot.
        speeds: Of the device.
        num_weights: Weights of an edge in a snapshot, 0 or 1.
        num_nodes: N; 0 where rows are few.
        is_stacked: Whether edges have a weight of their own for each snapshot.
    """
    size = union.num_snapshots
    shared = int((union.presence == union.full).sum())
    rate = size * shared / num_edges if num_edges else 1.0
    footprint = 4 * num_nodes * size * channels
    all_edges = union.keys.numel()

    def sum_up(parts: Sequence[tuple[int, int, float]], num_tests: int, num_bytes: int) -> float:
        copied = num_bytes / speeds.bytes_per_second if speeds.bytes_per_second else 0.0
        # The row that a slice is added to takes as long as that of an edge.
        work = sum(speeds.add_up(count + slices, width, footprint) for count, slices, width in parts)
        launches = (sum(count > 0 for count, _, _ in parts) - 1) * speeds.launch_seconds
        return work + num_tests * speeds.test_seconds + speeds.call_seconds + max(0.0, launches) + copied

    rest = num_edges - size * shared
    slices, shared_slices, rest_slices = (
        _expect_slices(count, rows)
        for count, rows in ((all_edges, num_nodes), (shared, num_nodes), (rest, num_nodes * size))
    )
    edge_bytes = 4 + 4 * num_weights
    union_bytes = all_edges * (5 + 4 * num_weights * size) + 8 * slices
    # Rows of snapshots that have not an edge are not read.
    mean_width = channels * num_edges / max(1, all_edges)
    num_tests = all_edges * size if size > 1 else 0
    seconds = sum_up([(all_edges, slices, mean_width)], num_tests, union_bytes)
    mask = Option(first, first + size, "mask", seconds, rate)
    if size == 1:
        return [mask]
    split_bytes = shared * (4 + 4 * num_weights * size) + 8 * shared_slices + rest * edge_bytes + 9 * rest_slices
    # Edges that have a weight for each snapshot are added up snapshot by snapshot.
    num_tests = shared * size if is_stacked else 0
    parts = [(shared, shared_slices, size * channels), (rest, rest_slices, channels)]
    return [mask, Option(first, first + size, "split", sum_up(parts, num_tests, split_bytes), rate)]


def _expect_slices(num_edges: int, num_rows: int) -> int:
    """Slices of so many edges, if these were spread at random; 0 where rows are not told."""
    if num_rows == 0:
        return 0
    return round(num_rows * -math.expm1(-num_edges / num_rows) + num_edges / SLICE)


def choose_groups(keys: Sequence[Tensor], channels: int, speeds: Speeds, first: int = 0, num_weights: int = 0,
                  largest: int = 8, num_nodes: int = 0, is_stacked: bool = False) -> list[Option]:  # fmt: skip
    """The options that together take the least for consecutive snapshots.

    Args:
        keys: target * N + source of the edges of 1 to 8 snapshots, ascending and unique.
        channels: F.
        speeds: Of the device.
        first: Number of the first snapshot.
        num_weights: Weights of an edge in a snapshot, 0 or 1.
        largest: Snapshots of a group at most, where memory bounds it.
        num_nodes: N; 0 where rows are few.
        is_stacked: Whether edges have a weight of their own for each snapshot.
    """
    groups = []
    for offset, part in enumerate(keys):
        union = EdgeUnion.of(part)
        options = expect_options(
            union, part.numel(), channels, first + offset, speeds, num_weights, num_nodes, is_stacked
        )
        groups.append((union, part.numel(), options))
    while len(groups) > 1:
        merged = []
        for low in range(0, len(groups) - 1, 2):
            (left, left_edges, left_options), (right, right_edges, right_options) = groups[low : low + 2]
            union, num_edges = merge_unions(left, right), left_edges + right_edges
            apart = left_options + right_options
            options = expect_options(
                union, num_edges, channels, apart[0].first, speeds, num_weights, num_nodes, is_stacked
            )
            best = min(options, key=lambda option: option.seconds)
            whole = union.num_snapshots <= largest and best.seconds <= sum(option.seconds for option in apart)
            merged.append((union, num_edges, [best] if whole else apart))
        groups = merged + groups[2 * len(merged) :]
    return groups[0][2]


def find_stacked(factors: Sequence[Factors], most: int = 1024) -> bool:
    """Whether less than half of the edges that neighbors share weigh the same in both, by some of the edges."""
    same = known = 0
    for before, after in pairwise(factors):
        if before.weight is None and after.weight is None:
            continue
        chosen = torch.arange(0, after.keys.numel(), max(1, after.keys.numel() // most), device=after.keys.device)
        keys = after.keys[chosen]
        places = torch.searchsorted(before.keys, keys).clamp_(max=max(0, before.keys.numel() - 1))
        if before.keys.numel() == 0:
            continue
        is_shared = before.keys[places] == keys
        old, new = (torch.ones(keys.numel(), device=keys.device) if weight is None else weight[at]
                    for weight, at in ((before.weight, places), (after.weight, chosen)))  # fmt: skip
        known += int(is_shared.sum())
        same += int((is_shared & (old == new)).sum())
    return 2 * same < known


def find_speeds(device: torch.device) -> Speeds:
    """The speeds of a device, measured at the first call on this machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"

    def is_valid(kept: Any) -> bool:
        table = kept[0] if isinstance(kept, list) and len(kept) == 6 else None
        rows = len(_FOOTPRINTS[device.type])
        return isinstance(table, list) and [len(row) for row in table] == [len(_WIDTHS)] * rows

    table, test, call, launch, rate, few = recall("snapshots", f"{name} 4", lambda: _measure(device), is_valid)
    return Speeds(tuple(map(tuple, table)), test, call, launch, rate, few, _FOOTPRINTS[device.type])


def _measure(device: torch.device) -> list[Any]:
    footprints = _FOOTPRINTS[device.type]
    cells = [(width, footprint, False) for footprint in footprints for width in _WIDTHS]
    # Rows of 8 snapshots and 4 numbers in each, all of which each edge has, and as wide ones of one.
    cells += [(32, footprints[0], True), (32, footprints[0], False)]
    drawn = [_draw(*cell, device) for cell in cells]
    # The last once more, by one thread.
    runs: list[Callable[[], Any]] = [partial(aggregate_snapshots, x, group) for x, group in drawn]
    runs.append(partial(_run_alone, runs[-1]))
    rest: list[Callable[[], Any]] = [partial(aggregate_snapshots, x, _empty(group)) for x, group in drawn]
    rest.append(rest[-1])
    seconds = _subtract(runs, rest, device)
    pieces = [group.pieces[0] for _, group in drawn]
    *entries, masked, plain = (s / (p.num_edges + p.num_slices) for s, p in zip(seconds, pieces, strict=False))
    few = max(1.0, seconds[-1] / seconds[-2]) if device.type == "cpu" else 1.0
    table = level([entries[row : row + len(_WIDTHS)] for row in range(0, len(entries), len(_WIDTHS))])
    ones = torch.ones(2)
    alone, other = (Factors(torch.tensor([key]), None, ones, ones, ones) for key in (0, 1))
    call, split = (
        _time(partial(_send_and_run, torch.zeros(2, 8, 1, device=device), build_group(f, 2)), device)
        for f in ([alone], [alone._replace(keys=torch.arange(2)), other])
    )
    test, launch = max(0.0, masked - plain) / 8, max(0.0, split - call)
    if device.type != "cuda":
        return [table, test, call, launch, 0.0, few]
    host = torch.zeros(1 << 24, dtype=torch.uint8)
    return [table, test, call, launch, host.numel() / _time(partial(host.to, device), device), few]


def _send_and_run(x: Tensor, group: SnapshotMatrices) -> None:
    """What is done for one group of several."""
    aggregate_snapshots(x[:, : group.num_snapshots].contiguous(), group.to(x.device, non_blocking=True))


def _run_alone(run: Callable[[], Any]) -> None:
    before = set_cpu_threads(1)
    try:
        run()
    finally:
        set_cpu_threads(before)


def _empty(group: SnapshotMatrices) -> SnapshotMatrices:
    """A group of as many nodes and snapshots with a single edge."""
    piece = group.pieces[0]
    presence = None if piece.presence is None else piece.presence[:1]
    only = slice_keys(torch.zeros(1, dtype=torch.int64, device=group.device), piece.num_rows, None, presence,
                      piece.num_snapshots)  # fmt: skip
    return replace(group, pieces=(only,))


def _subtract(runs: Sequence[Callable[[], Any]], rest: Sequence[Callable[[], Any]],
              device: torch.device) -> list[float]:  # fmt: skip
    """Seconds of each run without those of its rest; at least a quarter of them, as other work of the machine may have
    been in the way of the rest alone.
    """
    all_of_it, less = [math.inf] * len(runs), [math.inf] * len(runs)
    # That work comes and goes: each is measured now and again.
    for _ in range(3):
        all_of_it = [min(known, _time(run, device)) for known, run in zip(all_of_it, runs, strict=True)]
        less = [min(known, _time(run, device)) for known, run in zip(less, rest, strict=True)]
    return [max(a - b, a / 4) for a, b in zip(all_of_it, less, strict=True)]


def level(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """The same where no entry is more than one below it, to the right of it, or both.

    Wider rows, and more bytes of them, take no less: an entry that is more was measured beside other work.
    """
    out = [[*row] for row in table]
    for row in reversed(range(len(out))):
        for column in reversed(range(len(out[row]))):
            below = out[row + 1][column] if row + 1 < len(out) else math.inf
            right = out[row][column + 1] if column + 1 < len(out[row]) else math.inf
            out[row][column] = min(out[row][column], below, right)
    return out


def _draw(width: int, footprint: int, is_masked: bool, device: torch.device) -> tuple[Tensor, SnapshotMatrices]:
    """Rows of at most `footprint` bytes in all, and a random graph of them."""
    num_nodes = min(_NODES[device.type], footprint // (4 * width))
    least = max(_EDGES[device.type], _PRODUCTS[device.type] // width, 10 * num_nodes)
    num_edges = min(least, num_nodes * num_nodes // 2)
    generator = torch.Generator(device).manual_seed(0)
    keys = torch.randint(num_nodes * num_nodes, (num_edges,), generator=generator, device=device).unique()
    size = 8 if is_masked else 1
    presence = torch.full_like(keys, 255, dtype=torch.uint8) if is_masked else None
    piece = slice_keys(keys, num_nodes, None, presence, size)
    x = torch.zeros(num_nodes, size, width // size, device=device)
    return x, SnapshotMatrices((piece,), None, None, None, num_nodes, size)


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
    times = [run() for _ in range(2)]
    # Short ones more often, as other work of the machine is in most of them.
    while len(times) < 9 and sum(times) < 0.02:
        times.append(run())
    return min(times)
