"""Overlap of consecutive snapshots: bytes saved by sending only changes, and unchanged rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch_geometric.data import Data

from benchmarks.dynamic.delta_encoding import EdgeDelta, apply_delta, find_delta
from benchmarks.dynamic.epochs import Trained
from benchmarks.dynamic.ways import Model
from pyg_direct.bench.limits import time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots
from pyg_direct.dynamic import nn, stream
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.sequence_edges import GCN, Factors, Mean, Sum
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices

CHANGES = (0.01, 0.02, 0.05, 0.1, 0.2)


def measure_delta(shape: DynamicShape, name: str, count: int = 8) -> Iterator[Row]:
    """Measure bytes of `count` unweighted snapshots by the share of edges that change per step, and on a GPU seconds.

    Times are from page-locked memory to matrices on the GPU.
    """
    num_nodes, on_gpu = shape.num_nodes, torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    for change in CHANGES:
        drawn = draw_snapshots(shape._replace(num_snapshots=count, change=change))
        factors = [Sum().factorise(order_edges(e, None, num_nodes))._replace(weight=None) for e in drawn]
        whole = [build_group([f], num_nodes) for f in factors]
        united = build_group(factors, num_nodes, "mask")
        deltas = [find_delta(a, b, num_nodes) for a, b in pairwise(factors)]
        sent = {
            "each whole": sum(m.num_bytes for m in whole),
            "their union": united.num_bytes,
            "what changed": whole[0].num_bytes + sum(d.num_bytes for d in deltas),
        }
        case = f"snapshots/{name} x{count} to the device, {change:.0%} change"
        for way, num_bytes in sent.items():
            yield Row.of(case, f"{way}, sent", "MB", [num_bytes / 1e6])
        first = factors[0]._replace(keys=factors[0].keys.to(device))
        ways: dict[str, Callable[[], object]] = {"what changed": partial(_rebuild, first, _pin(deltas), num_nodes)}
        if on_gpu:
            ways["their union"] = partial(_move, [_pin_matrices(united)], device)
            ways["each whole"] = partial(_move, [_pin_matrices(m) for m in whole], device)
        for way, run in ways.items():
            seconds = time_on_clock(run, repeats=3, warm_up=1)
            yield Row.of(case, way, "ms", [1e3 * s for s in seconds])


def _rebuild(before: Factors, deltas: list[EdgeDelta], num_nodes: int) -> list[SnapshotMatrices]:
    made = [build_group([before], num_nodes)]
    for delta in deltas:
        here = delta.to(before.keys.device, non_blocking=True)
        keys, weight = apply_delta(before, here, num_nodes)
        before = before._replace(keys=keys, weight=weight)
        made.append(build_group([before], num_nodes))
    return made


def _move(matrices: list[SnapshotMatrices], device: torch.device) -> list[SnapshotMatrices]:
    return [m.to(device, non_blocking=True) for m in matrices]


def _pin(deltas: list[EdgeDelta]) -> list[EdgeDelta]:
    if not torch.cuda.is_available():
        return deltas
    return [EdgeDelta(*(None if p is None else p.pin_memory() for p in d)) for d in deltas]  # type: ignore[arg-type]


def _pin_matrices(matrices: SnapshotMatrices) -> SnapshotMatrices:
    pieces = []
    for piece in matrices.pieces:
        held = {name: value.pin_memory() for name, value in vars(piece).items() if isinstance(value, torch.Tensor)}
        pieces.append(replace(piece, **held))  # type: ignore[arg-type]
    return replace(matrices, pieces=tuple(pieces))


def measure_unchanged_rows(sets: Mapping[str, Sequence[Data]]) -> Iterator[Row]:
    """Measure the share of a first layer's aggregated rows that equal the previous snapshot's rows bit for bit.

    Reuse of rows could save at most this share of the first epoch's aggregation, which later epochs do not repeat. The
    share of ten epochs of T-GCN is reported too.
    """
    for name, signal in sets.items():
        seconds = _time_epochs(signal)
        plan = stream(list(signal), "cpu", group_size=1).plan
        assert plan is not None, "given snapshots of one node type"
        for operator in (GCN(), Mean()):
            begin = time.perf_counter()
            rows = [plan.aggregate_features(operator, t) for t in range(len(plan))]
            took = time.perf_counter() - begin
            shares = [float((a == b).all(1).float().mean()) for a, b in pairwise(rows)]
            edges = [plan.factorise(Sum(), t).keys for t in range(len(plan))]
            same = [float(torch.isin(b, a).float().mean()) for a, b in pairwise(edges)]
            note = f"median share of edges that were there before {median(same):.3f}"
            yield Row.of(f"dynamic/{name}", f"rows unchanged, {type(operator).__name__}", "x", shares, note=note)
            yield Row.of(f"dynamic/{name}", f"most that their reuse saves, {type(operator).__name__}", "%",
                         [100 * median(shares) * took / seconds], note="of ten epochs of T-GCN")  # fmt: skip


def _time_epochs(signal: Sequence[Data], count: int = 10) -> float:
    """Measure seconds of epochs of T-GCN by `FrameTrainer`, including preparing ones; kernels are compiled before."""
    num_nodes, num_features = signal[0].x.shape
    times = []
    for length in (min(2, len(signal)), len(signal)):
        model = Model("T-GCN", nn, num_features, num_nodes, 32)
        run = Trained(model, signal[:length], min(8, length), torch.device("cpu"))
        begin = time.perf_counter()
        for _ in range(1 if length < len(signal) else count):
            run.epoch()
        times.append(time.perf_counter() - begin)
    return times[-1]
