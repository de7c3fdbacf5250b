"""The choice of groups beside the best of all: every group of eight snapshots, and of their halves, is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.dynamic import stream
from pyg_direct.dynamic.matrix_group import FORMS, GROUP_SIZES, build_group
from pyg_direct.dynamic.sequence_edges import GCN, Factors
from pyg_direct.dynamic.snapshot_plan import choose_form, choose_size
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices, aggregate_snapshots
from pyg_direct.ops.snapshots.slice_csr import MAX_GROUP, unite

WIDTHS = (2, 8, 32, 64)
# Seconds for which two plans take turns, and the limit of turns.
_SECONDS, _MOST = 0.25, 99
# Snapshots [first, last) and their form.
Group = tuple[int, int, str]


def measure_tuner(sets: Mapping[str, Sequence[Data]], widths: Sequence[int] = WIDTHS, rounds: int = 9,
                  device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Measure seconds of the chosen groups over the best groups, for the first eight snapshots of each set.

    Timed is one pass of a plan: features are joined, matrices are multiplied, and rows are separated. Matrices are sent
    to the device unless they are made there.
    """
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    ratios = []
    for name, signal in sets.items():
        signal = list(signal[:MAX_GROUP])
        plan = stream(signal, where, keep="host").plan
        assert plan is not None, "given snapshots of one node type"
        num_nodes = plan.num_nodes
        factors = [plan.factorise(GCN(), t) for t in range(len(signal))]
        built = _build(factors, num_nodes)
        for width in widths:
            x = list(torch.randn(len(signal), num_nodes, width, device=where))
            chosen = choose_groups(factors, num_nodes, width, where)
            seconds = _time_groups(x, built, rounds)
            best = find_best(seconds, 0, len(signal))
            # Measured again: the minimum of many equal groups is the luckiest one.
            ratio = compare_plans(x, built, chosen, best, rounds) if set(chosen) != set(best) else 1.0
            ratios.append(ratio)
            yield Row.of(f"tuner/{name}/F={width}", "chosen groups over the best", "x", [ratio],
                         note=f"chosen {_tell(chosen, seconds)}; best {_tell(best, seconds)}")  # fmt: skip
    share = sum(ratio <= 1.05 for ratio in ratios) / len(ratios)
    yield Row.of("tuner/all", "cells within 5 % of the best", "x", [share],
                 note=f"{len(ratios)} cells, farthest {max(ratios):.3f}")  # fmt: skip


def _build(factors: Sequence[Factors], num_nodes: int) -> dict[Group, SnapshotMatrices]:
    """Build the matrices of every group that the tuner may choose, if edges are sorted."""
    made = {}
    for size in GROUP_SIZES:
        for first in range(0, len(factors), size):
            part = factors[first : first + size]
            for form in FORMS if len(part) > 1 else ("mask",):
                made[first, first + len(part), form] = build_group(part, num_nodes, form)
    return made


def choose_groups(factors: Sequence[Factors], num_nodes: int, width: int, device: torch.device) -> list[Group]:
    """Choose the groups of snapshots as a plan does for rows of `width` numbers."""
    size, groups = choose_size(num_nodes, width, device), list[Group]()
    for first in range(0, len(factors), size):
        keys = [f.keys for f in factors[first : first + size]]
        form = choose_form(unite(keys), sum(map(len, keys)), device) if len(keys) > 1 else "mask"
        groups.append((first, first + len(keys), form))
    return groups


def _run(x: Sequence[Tensor], group: Group, matrices: SnapshotMatrices) -> None:
    """Do a plan's single aggregation of one group of several."""
    packed = torch.stack([*x[group[0] : group[1]]], 1)
    aggregate_snapshots(packed, matrices.to(packed.device, non_blocking=True)).transpose(0, 1).contiguous()


def _time_groups(x: Sequence[Tensor], built: Mapping[Group, SnapshotMatrices], rounds: int) -> dict[Group, float]:
    """Measure median seconds of each group; all take turns."""
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


def _time_plans(x: Sequence[Tensor], built: Mapping[Group, SnapshotMatrices],
                plans: Sequence[Sequence[Group]]) -> list[float]:  # fmt: skip
    """Measure seconds of each plan, one after the other."""
    out = []
    for plan in plans:
        wait_for_gpu()
        begin = time.perf_counter()
        for group in plan:
            _run(x, group, built[group])
        wait_for_gpu()
        out.append(time.perf_counter() - begin)
    return out


def compare_plans(x: Sequence[Tensor], built: Mapping[Group, SnapshotMatrices], one: Sequence[Group],
                  other: Sequence[Group], rounds: int) -> float:  # fmt: skip
    """Compare seconds of one plan with another's: the median ratio of rounds in which either comes first once.

    Short plans get more rounds, as disturbances of the machine last longer than they do.
    """
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < rounds or (time.perf_counter() - begin < _SECONDS and len(ratios) < _MOST):
        a, b, c, d = _time_plans(x, built, (one, other, other, one))
        ratios.append((a + d) / (b + c))
    return statistics.median(ratios)


def find_best(seconds: Mapping[Group, float], first: int, last: int) -> list[Group]:
    """Find the groups of snapshots [first, last) with the least total time, among all nested groups.

    Args:
        seconds: Seconds of every group of 1, 2, 4 and 8 snapshots that begins at a multiple of its size, cut off at
            `last`.
        first, last: Range of snapshots.
    """
    whole = min((group for group in seconds if group[:2] == (first, last)), key=lambda group: seconds[group])
    if last - first == 1:
        return [whole]
    half = 1
    while 2 * half < last - first:
        half *= 2
    apart = find_best(seconds, first, first + half) + find_best(seconds, first + half, last)
    return [whole] if seconds[whole] <= sum(seconds[group] for group in apart) else apart


def _tell(groups: Sequence[Group], seconds: Mapping[Group, float]) -> str:
    """Describe groups, and the time that they took one by one."""
    names = " ".join(f"{last - first}{'' if last - first == 1 else form[0]}" for first, last, form in groups)
    return f"{names}, took {1e6 * sum(seconds[group] for group in groups):.0f} us"
