"""How many snapshots to aggregate at once, and in which form (PiPAD, section 4.4).

The speeds of the device and the edges that snapshots share give the expected seconds of every option. Options nest: a
group of eight stays whole or splits into two of four, and so on. So the best choice for the whole contains the best
choice for each half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.conv_operators import Factors
from pyg_direct.dynamic.device_speeds import Speeds
from pyg_direct.kernels.snapshots.sliced_csr import SLICE
from pyg_direct.ops.snapshots.aggregate import is_summed_over_csr, leaves_bits
from pyg_direct.ops.snapshots.slice_csr import EdgeUnion, merge_unions


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
