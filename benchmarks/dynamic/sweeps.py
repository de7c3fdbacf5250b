"""Sweeps of PiPAD's figures: overlap, snapshots at once and width (Fig. 9), reads (Fig. 11), slices beside CSR (Fig.
12).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.dynamic.kernel_reads import Reads, count_reads
from benchmarks.dynamic.snapshots import measure_overlap, multiply_apart, sum_apart, to_csr
from pyg_direct.bench.limits import time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots
from pyg_direct.dynamic.matrix_group import FORMS, build_group
from pyg_direct.dynamic.sequence_edges import Factors, Sum
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices, aggregate_snapshots, choose_kernel, multiply_slices
from pyg_direct.ops.snapshots.slice_csr import unite

RATES = (0.5, 0.7, 0.9, 1.0)
COUNTS = (2, 4, 8)
WIDTHS = (2, 4, 8, 16, 64)


def draw_overlapping(shape: DynamicShape, count: int, rate: float, device: str = "cpu") -> list[Factors]:
    """Draw unweighted snapshots with about a share `rate` of the edges in all of them, and the others in one each."""
    shared = int(rate * shape.num_edges)
    own = shape.num_edges - shared
    edges = draw_snapshots(shape._replace(num_edges=shared + count * own, num_snapshots=1), device=device)[0]
    out = []
    for t in range(count):
        part = edges[:, shared + t * own : shared + (t + 1) * own]
        ordered = order_edges(torch.cat([edges[:, :shared], part], 1), None, shape.num_nodes)
        # Parallel edges are merged.
        out.append(Sum().factorise(ordered)._replace(weight=None))
    return out


def _measure(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    if torch.cuda.is_available():
        return {way: time_on_gpu(run, repeats=5, warm_up=2, queued=2) for way, run in ways.items()}
    return {way: time_on_clock(run, repeats=3, warm_up=1) for way, run in ways.items()}


def measure_overlap_sweep(shape: DynamicShape, name: str, rates: Sequence[float] = RATES,
                          counts: Sequence[int] = COUNTS, widths: Sequence[int] = WIDTHS) -> Iterator[Row]:  # fmt: skip
    """Measure Fig. 9: seconds of snapshots one after the other over seconds of all at once, by the shared edges."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for count in counts:
        for rate in rates:
            factors = draw_overlapping(shape, count, rate, device)
            union = unite([f.keys for f in factors])
            found = measure_overlap(union).overlap_rate
            groups = {form: build_group(factors, shape.num_nodes, form, union=union) for form in FORMS}
            alone = [build_group([f], shape.num_nodes) for f in factors]
            sparse = [to_csr(f, shape.num_nodes) for f in factors]
            for width in widths:
                x = torch.randn(shape.num_nodes, count, width, device=device)
                apart = [rows.contiguous() for rows in x.unbind(1)]
                ways: dict[str, Callable[[], object]] = {f: partial(aggregate_snapshots, x, groups[f]) for f in FORMS}
                ways |= {
                    "ours": partial(sum_apart, alone, apart),
                    "torch.sparse": partial(multiply_apart, sparse, apart),
                }
                seconds = _measure(ways)
                best = min(FORMS, key=lambda form: statistics.median(seconds[form]))
                for way in ("ours", "torch.sparse"):
                    values = [a / b for a, b in zip(sorted(seconds[way]), sorted(seconds[best]), strict=True)]
                    yield Row.of(f"sweeps/{name}/overlap {rate:g}/F={width}", f"S={count}, over {way} one by one", "x",
                                 values, note=f"overlap {found:.3f}, best form {best}", curve=f"fig 9 width {width}",
                                 at=rate, at_name="share of the edges in all snapshots")  # fmt: skip


def measure_reads(shape: DynamicShape, name: str, count: int = 4, rate: float = 0.7,
                  widths: Sequence[int] = WIDTHS) -> Iterator[Row]:  # fmt: skip
    """Measure Fig. 11: requests and sectors per edge of a snapshot, and active threads, by counting."""
    factors = draw_overlapping(shape, count, rate)
    alone = [build_group([f], shape.num_nodes) for f in factors]
    ways: dict[str, tuple[list[SnapshotMatrices], bool]] = {"one by one": (alone, False)}
    ways |= {f"{form}, S={count}": ([build_group(factors, shape.num_nodes, form)], False) for form in FORMS}
    ways["one by one, CSR"] = alone, True
    edges = sum(f.keys.numel() for f in factors)
    for width in widths:
        for way, (groups, whole) in ways.items():
            total = Reads(0, 0, 0, 0)
            for group in groups:
                z = torch.empty(1, group.num_snapshots, width)
                for piece in group.pieces:
                    if piece.num_edges > 0:
                        kernel = choose_kernel(z, piece, whole)
                        total += count_reads(piece, group.num_snapshots, width, kernel, whole)
            counted = {"requests an edge": total.requests / edges, "sectors an edge": total.sectors / edges,
                       "threads at work": total.numbers / total.places}  # fmt: skip
            for what, value in counted.items():
                yield Row.of(f"sweeps/{name}/overlap {rate:g}/F={width}/{what}", way, "x", [value],
                             note="counted, not measured", curve=f"fig 11 {name} {what}", at=width,
                             at_name="numbers a row of a snapshot")  # fmt: skip


def measure_slices(shapes: Mapping[str, DynamicShape], count: int = 4, rate: float = 0.7,
                   widths: Sequence[int] = WIDTHS) -> Iterator[Row]:  # fmt: skip
    """Measure Fig. 12: seconds with one group of threads for all edges of a row, as with CSR, over seconds of
    slices.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes.items():
        (union,) = build_group(draw_overlapping(shape, count, rate, device), shape.num_nodes, "mask").pieces
        for width in widths:
            x = torch.randn(shape.num_nodes, count, width, device=device)
            seconds = _measure({str(whole): partial(multiply_slices, x, union, deterministic=whole)
                                for whole in (False, True)})  # fmt: skip
            values = [a / b for a, b in zip(sorted(seconds["True"]), sorted(seconds["False"]), strict=True)]
            yield Row.of(f"sweeps/{name}/F={width}", "rows of CSR over slices", "x", values, curve="fig 12",
                         at=width, at_name="numbers a row of a snapshot")  # fmt: skip


def check_forms(shape: DynamicShape, count: int = 4, width: int = 4) -> None:
    """Compare the timed results with torch's products.

    Raises:
        AssertionError: they differ.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    factors = draw_overlapping(shape, count, 0.7, device)
    x = torch.randn(shape.num_nodes, count, width, device=device)
    rows: list[Tensor] = [part.contiguous() for part in x.unbind(1)]
    expected = torch.stack(multiply_apart([to_csr(f, shape.num_nodes) for f in factors], rows), 1)
    for form in FORMS:
        got = aggregate_snapshots(x, build_group(factors, shape.num_nodes, form))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
