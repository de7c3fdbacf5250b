"""How many snapshots to aggregate at once, and in which form (PiPAD, section 4.4).

`Speeds` of the device and the edges that snapshots share give the expected seconds of every option. Options nest: a
group of eight stays whole or splits into two of four, and so on. So the best choice for the whole contains the best
choice for each half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.conv_operators import Factors
from pyg_direct.kernels.snapshots.sliced_csr import SLICE
from pyg_direct.ops.snapshots.aggregate import SMALL, is_summed_over_csr, leaves_bits
from pyg_direct.ops.snapshots.slice_csr import EdgeUnion, merge_unions

# Numbers of a row, and numbers read under a mask by slices and over CSR, for which seconds are known.
WIDTHS = (1, 4, 16, 64, 256, 1024)
SCANNED, SCANNED_CSR = (16, 64), (16, 64, 256, 1024)
# Number of eight snapshots that lack an edge that is read under a mask.
LACKING = (1, 7)
# Numbers of a snapshot for which eight snapshots of a drawn sequence were aggregated in groups of every size and form.
# Sizes are 1, 2, 4 and 8 for "mask", and 2, 4 and 8 for "split". Then the modes of their weights.
TRIED = (2, 8, 32, 64, 128)
TRIED_VALUES = ("ones", "shared", "stacked")
# Share of all edges that some snapshot lacks, from which on their neighbors in a slice wait for nearly all of them.
_WAITING = 1 / 64
# Share of the host's time that is added if a GPU works in parallel. The host has other work at times, and is then
# slower than measured. Of 72 cells on an H200, in two runs, 0.94 and 0.93 came within 5 % of the best; 0.89 and 0.90
# without it.
_HIDDEN = 0.2
# Bytes of the rows that edges are read from, for which speeds are known. They fit the nearest caches, the next ones, a
# part of these, or none.
FOOTPRINTS = {"cpu": (2**17, 2**20, 2**24), "cuda": (2**20, 2**24, 2**26, 2**28)}


@dataclass(frozen=True)
class Speeds:
    """Speeds of a device.

    Attributes:
        seconds_of_edge: Seconds of an edge whose row has 1, 4, 16, 64, 256 and 1024 numbers, and of the row that a
            slice is added to; for rows of so many bytes in all as in `footprints`.
        test_seconds: For the test whether a snapshot has an edge.
        call_seconds: For an aggregation of a single edge; on a GPU for one of many that are queued without a wait, as
            in a sequence.
        launch_seconds: For a second structure in one aggregation.
        floor_seconds: For an aggregation of a single edge on a GPU that need not wait for the host.
        floor_more_seconds: For a second structure there.
        bytes_per_second: From host memory to the device; 0 if both are one, or if structures are made on the device.
        few_factor: Factor of the time of an edge if there is so little work that one CPU thread does it.
        footprints: Bytes, ascending.
        send_seconds: For sending the structure of a single edge.
        send_more_seconds: For sending a second structure of a single edge.
        threads_seconds: For starting all threads of a CPU on a structure.
        seconds_of_number: For a number of the features, whatever the edges: moved beside the numbers of other
            snapshots, scaled, and moved back; for sizes as in `footprints`.
        is_queued: True if the device works while the host queues the next work.
        again_seconds: For a number of the results to which a second structure adds, beyond the time of its edges.
        scan_seconds: For an edge that seven of eight snapshots have, and for one that one has, beyond the time of its
            row. The union is read under a mask, slice by slice, at 16 and 64 numbers of all snapshots.
        scan_csr_seconds: For such edges if the union is read over CSR; at 16, 64, 256 and 1024 numbers.
        convert_seconds: For making CSR of a structure that was sent.
        csr_seconds: Host time of a sum over CSR, beyond the time of slices.
        factors: Factor of the time of whole groups over the sum of all these parts. It is given without weights, with
            weights of edges, and with weights of edges in snapshots. Each has a row for each size and form, at 2, 8,
            32, 64 and 128 numbers of a snapshot. Empty if none were tried.
    """

    seconds_of_edge: tuple[tuple[float, ...], ...]
    test_seconds: float
    call_seconds: float
    launch_seconds: float
    bytes_per_second: float
    few_factor: float = 1.0
    footprints: tuple[int, ...] = FOOTPRINTS["cpu"]
    send_seconds: float = 0.0
    send_more_seconds: float = 0.0
    threads_seconds: float = 0.0
    seconds_of_number: tuple[float, ...] = (0.0, 0.0, 0.0)
    is_queued: bool = False
    again_seconds: float = 0.0
    scan_seconds: tuple[tuple[float, ...], ...] = ()
    scan_csr_seconds: tuple[tuple[float, ...], ...] = ()
    convert_seconds: float = 0.0
    floor_seconds: float = 0.0
    floor_more_seconds: float = 0.0
    csr_seconds: float = 0.0
    factors: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def together(self, host: float, device: float) -> float:
        """Return the seconds that one group of a sequence adds, from the times of the host and of the device."""
        return max(host, device) + _HIDDEN * host if self.is_queued else host + device

    def add_up(self, num_edges: int, width: float, footprint: int) -> float:
        """Return the seconds of so many edges in one structure."""
        if num_edges * width < SMALL:
            return num_edges * self.per_edge(width, footprint) * self.few_factor
        return num_edges * self.per_edge(width, footprint) + self.threads_seconds

    def per_edge(self, width: float, footprint: int = 0) -> float:
        """Return the seconds of an edge with `width` numbers from rows of so many bytes; interpolated between measured
        ones.
        """
        width = max(1.0, width)
        across = _interpolate(
            [_interpolate(known, WIDTHS, width) for known in self.seconds_of_edge], self.footprints, footprint
        )
        return across * max(1.0, width / WIDTHS[-1])

    def per_number(self, footprint: int) -> float:
        """Return the seconds of a number of the features, of so many bytes in all."""
        if min(self.seconds_of_number) <= 0:
            return max(0.0, *self.seconds_of_number)
        return _interpolate(self.seconds_of_number, self.footprints, footprint)

    def scan(self, width: int, share: float, is_csr: bool = False) -> float:
        """Return the seconds of an edge for the numbers of snapshots that lack it; a `share` of them has it."""
        tables, places = (self.scan_csr_seconds, SCANNED_CSR) if is_csr else (self.scan_seconds, SCANNED)
        if not tables:
            return 0.0
        few, most = (_interpolate(known, places, width) for known in tables)
        # Rows wider than any measured take longer in proportion, and narrower ones less.
        scale = max(1.0, width / places[-1]) * min(1.0, width / places[0])
        lacking = max(0.0, 1 - share)
        low, high = (count / 8 for count in LACKING)
        across = few + (most - few) * min(1.0, max(0.0, lacking - low) / (high - low))
        return scale * across * min(1.0, lacking / _WAITING)

    def factor(self, form: str, size: int, channels: int, values: str) -> float:
        """Return the factor of the time of groups of so many snapshots over the sum of their parts."""
        if not self.factors:
            return 1.0
        power = (size - 1).bit_length()
        row = power if form == "mask" or power == 0 else power + 3
        return _interpolate(self.factors[TRIED_VALUES.index(values)][row], TRIED, channels)


def _interpolate(values: Sequence[float], places: Sequence[float], at: float) -> float:
    """Return the value at a place between others on a logarithmic scale; beyond them, the value of the nearest end."""
    at = min(max(at, places[0]), places[-1])
    high = next(number for number in range(1, len(places)) if at <= places[number])
    share = math.log(at / places[high - 1]) / math.log(places[high] / places[high - 1])
    return math.exp((1 - share) * math.log(values[high - 1]) + share * math.log(values[high]))


class Option(NamedTuple):
    """A group of snapshots and its expected cost.

    Attributes:
        first, last: Snapshots [first, last).
        form: "split" or "mask".
        seconds: Seconds of its aggregation, including the transfer of its structure.
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


def expect_options(union: EdgeUnion, num_edges: int, channels: int, first: int, speeds: Speeds, values: str = "ones",
                   num_nodes: int = 0) -> list[Option]:  # fmt: skip
    """Return the options for one group; for a single snapshot both forms are one.

    Args:
        union: Edges of the group.
        num_edges: Edges of all its snapshots, each counted in each.
        channels: F.
        first: Its first snapshot.
        speeds: Speeds of the device.
        values: Value mode of the edges, as from `find_values`.
        num_nodes: N; 0 if rows are few.
    """
    size = union.num_snapshots
    shared = int((union.presence == union.full).sum())
    rate = size * shared / num_edges if num_edges else 1.0
    footprint = 4 * num_nodes * size * channels
    all_edges = union.keys.numel()

    numbers = num_nodes * size * channels
    # A union has a weight an edge only if all snapshots agree on it; other edges can go to the exclusives.
    modes = {"mask": "stacked" if values == "move" else values, "split": "shared" if values == "move" else values}
    weights = {form: {"ones": 0, "shared": 1, "stacked": size}[mode] for form, mode in modes.items()}

    def sum_up(form: str, parts: Sequence[tuple[int, int, float]], scanned: float, num_bytes: int,
               num_csr: int) -> float:  # fmt: skip
        others = max(0, sum(count > 0 for count, _, _ in parts) - 1)
        copied = 0.0
        if speeds.bytes_per_second:
            copied = speeds.send_seconds + others * speeds.send_more_seconds + num_bytes / speeds.bytes_per_second
            copied += num_csr * speeds.convert_seconds
        # The row that a slice is added to takes as long as the row of an edge.
        work = sum(speeds.add_up(count + slices, width, footprint) for count, slices, width in parts) + scanned
        work += numbers * (speeds.per_number(footprint) + others * speeds.again_seconds)
        work += speeds.floor_seconds + others * speeds.floor_more_seconds
        work *= speeds.factor(form, size, channels, modes[form])
        host = speeds.call_seconds + others * speeds.launch_seconds + num_csr * speeds.csr_seconds + copied
        return speeds.together(host, work)

    rest = num_edges - size * shared
    slices, shared_slices, rest_slices = (
        _expect_slices(count, rows)
        for count, rows in ((all_edges, num_nodes), (shared, num_nodes), (rest, num_nodes * size))
    )
    weighted = values != "ones"
    edge_bytes = 4 + 4 * weighted
    union_bytes = all_edges * (5 + 4 * weights["mask"]) + 8 * slices
    # Rows of snapshots that lack an edge are not read.
    mean_width = channels * num_edges / max(1, all_edges)
    is_csr = is_summed_over_csr("mask" if size > 1 else "all", all_edges, num_nodes, size * channels, weighted)
    is_csr = is_csr and (size == 1 or leaves_bits(num_nodes, size))
    scanned = 0.0
    if size > 1:
        present = num_edges / (all_edges * size) if all_edges else 1.0
        scanned = all_edges * (size * speeds.test_seconds + speeds.scan(size * channels, present, is_csr))
    seconds = sum_up("mask", [(all_edges, slices, mean_width)], scanned, union_bytes, int(is_csr))
    mask = Option(first, first + size, "mask", seconds, rate)
    if size == 1:
        return [mask]
    split_bytes = shared * (4 + 4 * weights["split"]) + 8 * shared_slices + rest * edge_bytes + 9 * rest_slices
    # Edges that have a weight for each snapshot are added up snapshot by snapshot.
    scanned = shared * size * speeds.test_seconds if modes["split"] == "stacked" else 0.0
    parts = [(shared, shared_slices, size * channels), (rest, rest_slices, channels)]
    num_csr = int(is_summed_over_csr("all", shared, num_nodes, size * channels, weighted))
    num_csr += is_summed_over_csr("one", rest, size * num_nodes, channels, weighted)
    seconds = sum_up("split", parts, scanned, split_bytes, num_csr)
    return [mask, Option(first, first + size, "split", seconds, rate)]


def _expect_slices(num_edges: int, num_rows: int) -> int:
    """Return the slices of so many edges, if these were spread at random; 0 without a number of rows."""
    if num_rows == 0:
        return 0
    return round(num_rows * -math.expm1(-num_edges / num_rows) + num_edges / SLICE)


def choose_groups(keys: Sequence[Tensor], channels: int, speeds: Speeds, first: int = 0, values: str = "ones",
                  num_nodes: int = 0) -> list[Option]:  # fmt: skip
    """Choose the options that together take the least time for consecutive snapshots.

    Args:
        keys: target * N + source of the edges of 1 to 8 snapshots, ascending and unique.
        channels: F.
        speeds: Speeds of the device.
        first: Number of the first snapshot.
        values: Value mode of the edges, as from `find_values`.
        num_nodes: N; 0 if rows are few.
    """
    groups = []
    for offset, part in enumerate(keys):
        union = EdgeUnion.of(part)
        options = expect_options(union, part.numel(), channels, first + offset, speeds, values, num_nodes)
        groups.append((union, part.numel(), options))
    while len(groups) > 1:
        merged = []
        for low in range(0, len(groups) - 1, 2):
            (left, left_edges, left_options), (right, right_edges, right_options) = groups[low : low + 2]
            union, num_edges = merge_unions(left, right), left_edges + right_edges
            apart = left_options + right_options
            options = expect_options(union, num_edges, channels, apart[0].first, speeds, values, num_nodes)
            best = min(options, key=lambda option: option.seconds)
            whole = best.seconds <= sum(option.seconds for option in apart)
            merged.append((union, num_edges, [best] if whole else apart))
        groups = merged + groups[2 * len(merged) :]
    return groups[0][2]


def find_values(factors: Sequence[Factors], most: int = 1024) -> str:
    """Return the value mode of snapshots' edges, from edges that neighbors share; on a CPU from at most so many.

    Returns:
        "ones" without weights; "shared" if neighbors agree on all; "stacked" if they agree on less than half, and
        "move" otherwise, as in `group.choose_values`.
    """
    if all(f.weight is None for f in factors):
        return "ones"
    same = known = 0
    for before, after in pairwise(factors):
        if before.keys.numel() == 0 or (before.weight is None and after.weight is None):
            continue
        step = 1 if after.keys.is_cuda else max(1, after.keys.numel() // most)
        chosen = torch.arange(0, after.keys.numel(), step, device=after.keys.device)
        keys = after.keys[chosen]
        places = torch.searchsorted(before.keys, keys).clamp_(max=before.keys.numel() - 1)
        is_shared = before.keys[places] == keys
        old, new = (torch.ones(keys.numel(), device=keys.device) if weight is None else weight[at]
                    for weight, at in ((before.weight, places), (after.weight, chosen)))  # fmt: skip
        known += int(is_shared.sum())
        same += int((is_shared & (old == new)).sum())
    if 2 * same < known:
        return "stacked"
    return "move" if same < known else "shared"
