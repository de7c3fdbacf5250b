"""The choice of groups beside the best of all: every group of eight snapshots, and of their halves, is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import wait_for_gpu
from pyg_direct.dynamic.group import FORMS, GROUP_SIZES, build_group
from pyg_direct.dynamic.operator import GCN, Factors
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.dynamic.tuner import choose_groups, find_speeds, find_stacked
from pyg_direct.ops.overlap import MAX_GROUP
from pyg_direct.ops.snapshots import SnapshotMatrices, aggregate_snapshots

WIDTHS = (2, 8, 32, 64)
# Snapshots [first, last) and their form.
Group = tuple[int, int, str]


def measure_tuner(sets: Mapping[str, Sequence[Data]], widths: Sequence[int] = WIDTHS, rounds: int = 9,
                  device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Seconds of the chosen groups over those of the best ones, of the first eight snapshots of each set.

    What is timed is what a plan does once: matrices are sent to the device and multiplied with rows there.
    """
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    speeds = find_speeds(where)
    ratios = []
    for name, signal in sets.items():
        signal = signal[:MAX_GROUP]
        num_nodes = max(int(s.num_nodes or 0) for s in signal)
        # Structures of a GPU are equal, and made sooner.
        factors = [_factorise(s, num_nodes, where) for s in signal]
        weights = int(any(f.weight is not None for f in factors))
        built = _build(factors, num_nodes)
        for width in widths:
            x = torch.randn(num_nodes, len(signal), width, device=where)
            keys = [f.keys.cpu() for f in factors]
            options = choose_groups(keys, width, speeds, 0, weights, MAX_GROUP, num_nodes, find_stacked(factors))
            chosen = [(o.first, o.last, o.form if o.last - o.first > 1 else "mask") for o in options]
            seconds = _time_groups(x, built, rounds)
            best = find_best(seconds, 0, len(signal))
            # Measured again: of many that are alike the least is the luckiest.
            both = [_time_plans(x, built, (chosen, best)) for _ in range(rounds)]
            ratio = statistics.median(a / b for a, b in both) if set(chosen) != set(best) else 1.0
            ratios.append(ratio)
            yield Row.of(f"tuner/{name}/F={width}", "chosen groups over the best", "x", [ratio],
                         note=f"chosen {_tell(chosen)}; best {_tell(best)}")  # fmt: skip
    share = sum(ratio <= 1.05 for ratio in ratios) / len(ratios)
    yield Row.of("tuner/all", "cells within 5 % of the best", "x", [share],
                 note=f"{len(ratios)} cells, farthest {max(ratios):.3f}")  # fmt: skip


def _build(factors: Sequence[Factors], num_nodes: int) -> dict[Group, SnapshotMatrices]:
    """The matrices of every group that the tuner may choose, on the host."""
    made = {}
    for size in GROUP_SIZES:
        for first in range(0, len(factors), size):
            part = factors[first : first + size]
            for form in FORMS if len(part) > 1 else ("mask",):
                made[first, first + len(part), form] = build_group(part, num_nodes, form).to(torch.device("cpu"))
    return made


def _factorise(snapshot: Data, num_nodes: int, device: torch.device) -> Factors:
    weight = None if snapshot.edge_attr is None else snapshot.edge_attr.to(device)
    return GCN().factorise(order_edges(snapshot.edge_index.to(device), weight, num_nodes))


def _run(x: Tensor, group: Group, matrices: SnapshotMatrices) -> None:
    aggregate_snapshots(x[:, group[0] : group[1]].contiguous(), matrices.to(x.device, non_blocking=True))


def _time_groups(x: Tensor, built: Mapping[Group, SnapshotMatrices], rounds: int) -> dict[Group, float]:
    """Median seconds of each group; all take turns."""
    times: dict[Group, list[float]] = {group: [] for group in built}
    for number in range(rounds + 1):
        for group, matrices in built.items():
            wait_for_gpu()
            begin = time.perf_counter()
            _run(x, group, matrices)
            wait_for_gpu()
            if number > 0:
                times[group].append(time.perf_counter() - begin)
    return {group: statistics.median(seconds) for group, seconds in times.items()}


def _time_plans(x: Tensor, built: Mapping[Group, SnapshotMatrices], plans: Sequence[Sequence[Group]]) -> list[float]:
    """Seconds of each plan, one after the other."""
    out = []
    for plan in plans:
        wait_for_gpu()
        begin = time.perf_counter()
        for group in plan:
            _run(x, group, built[group])
        wait_for_gpu()
        out.append(time.perf_counter() - begin)
    return out


def find_best(seconds: Mapping[Group, float], first: int, last: int) -> list[Group]:
    """The groups of snapshots [first, last) that together take the least, of all that nest.

    Args:
        seconds: Of every group of 1, 2, 4 and 8 snapshots that begins at a multiple of its size, cut off at `last`.
        first, last: Of which snapshots.
    """
    whole = min((group for group in seconds if group[:2] == (first, last)), key=lambda group: seconds[group])
    if last - first == 1:
        return [whole]
    half = 1
    while 2 * half < last - first:
        half *= 2
    apart = find_best(seconds, first, first + half) + find_best(seconds, first + half, last)
    return [whole] if seconds[whole] <= sum(seconds[group] for group in apart) else apart


def _tell(groups: Sequence[Group]) -> str:
    return " ".join(f"{last - first}{'' if last - first == 1 else form[0]}" for first, last, form in groups)
