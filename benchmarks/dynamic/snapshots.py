"""Aggregation of several snapshots at once beside one snapshot after the other, and beside cuSPARSE and GE-SpMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.dynamic.ge_spmm import multiply_csr
from pyg_direct.bench.limits import device_copy_rate, random_read_rate, time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots
from pyg_direct.dynamic.matrix_group import FORMS, build_group
from pyg_direct.dynamic.sequence_edges import Factors, Sum
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices, aggregate_snapshots, choose_kernel
from pyg_direct.ops.snapshots.slice_csr import EdgeUnion, unite

WIDTHS = (2, 4, 8, 16, 64)


class OverlapStatistics(NamedTuple):
    """Overlap and change of consecutive snapshots.

    Attributes:
        overlap_rate: S * shared edges / edges of all snapshots, in [0, 1]; 1 if there are no edges.
        change_rate: For each snapshot but the first, the share of its edges that the one before lacks.
        num_shared, num_union: Edges that all snapshots have; edges that any snapshot has.
        num_edges: Edges of each snapshot.
    """

    overlap_rate: float
    change_rate: tuple[float, ...]
    num_shared: int
    num_union: int
    num_edges: tuple[int, ...]


def measure_overlap(union: EdgeUnion) -> OverlapStatistics:
    """Measure overlap and change of the snapshots of a union; waits for its device."""
    has = [union.has(t) for t in range(union.num_snapshots)]
    edges = [int(h.sum()) for h in has]
    shared = int((union.presence == union.full).sum())
    kept = [int((before & now).sum()) for before, now in pairwise(has)]
    change = tuple(1 - k / n if n else 0.0 for k, n in zip(kept, edges[1:], strict=True))
    rate = union.num_snapshots * shared / sum(edges) if sum(edges) else 1.0
    return OverlapStatistics(rate, change, shared, union.keys.numel(), tuple(edges))


def measure_snapshots(shape: DynamicShape, name: str, count: int = 4, widths: tuple[int, ...] = WIDTHS,
                      scattered: bool = True, backward: bool = True) -> Iterator[Row]:  # fmt: skip
    """Measure sums of `count` snapshots of each width, unweighted; the limit is the traffic with each row read once per
    edge.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measure = partial(time_on_gpu, repeats=5, queued=3) if device == "cuda" else partial(time_on_clock, repeats=3)
    shape = shape._replace(num_snapshots=count)
    factors = _factorise(shape, device)
    union = unite([f.keys for f in factors])
    rate = measure_overlap(union).overlap_rate
    groups = {form: build_group(factors, shape.num_nodes, form, union=union) for form in FORMS}
    alone = [build_group([f], shape.num_nodes) for f in factors]
    sparse = [to_csr(f, shape.num_nodes) for f in factors]
    case = f"snapshots/{name} x{count}, overlap {rate:.2f}"
    limit = device_copy_rate() / 1e12 if device == "cuda" else None
    for width in widths:
        x = torch.randn(shape.num_nodes, count, width, device=device)
        apart = [rows.contiguous() for rows in x.unbind(1)]
        expected = torch.stack([torch.sparse.mm(m, rows) for m, rows in zip(sparse, apart, strict=True)], 1)
        ways: dict[str, Callable[[], object]] = {
            form: partial(aggregate_snapshots, x, group) for form, group in groups.items()
        }
        ways["deterministic"] = partial(aggregate_snapshots, x, groups["mask"], deterministic=True)
        ways["one by one"] = partial(sum_apart, alone, apart)
        ways["cuSPARSE, one by one"] = partial(multiply_apart, sparse, apart)
        if device == "cuda":
            ways["GE-SpMM, one by one"] = partial(_multiply_rows, sparse, apart)
            torch.testing.assert_close(torch.stack(_multiply_rows(sparse, apart), 1), expected, rtol=1e-3, atol=1e-3)
        if rate == 1:
            ways["cuSPARSE, combined"] = partial(torch.sparse.mm, sparse[0], x.view(shape.num_nodes, -1))
        if scattered:
            ways["PyG's scatter, one by one"] = partial(_scatter, factors, apart, shape.num_nodes)
        seconds = {}
        for way, run in ways.items():
            if way in (*FORMS, "deterministic"):
                torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-3)
            # Hundred times slower than others, and as steady in one call as in three.
            is_slow = device == "cuda" and way.startswith("PyG")
            seconds[way] = time_on_gpu(run, repeats=5, warm_up=1, queued=1) if is_slow else measure(run)
        for way, times in seconds.items():
            yield Row.of(f"{case}/F={width}", way, "ms", [1e3 * s for s in times])
        form = min(FORMS, key=lambda form: median(seconds[form]))
        best, moved = seconds[form], count_bytes(groups[form], x)
        yield Row.of(f"{case}/F={width}", "best form, with ids", "TB/s", [moved / s / 1e12 for s in best], limit,
                     "device copy", "a row, an id and bits for each edge, and results, read and written")  # fmt: skip
        # Narrow rows: a read at a random position takes 32 bytes of memory, even if fewer are needed.
        read = sum(piece.num_edges for piece in groups[form].pieces)
        reads = random_read_rate("cuda", 8 * (x.numel() // 2)) / 1e9 if device == "cuda" else None
        yield Row.of(f"{case}/F={width}", "best form, rows read", "G/s", [read / s / 1e9 for s in best], reads,
                     "random reads of 8 bytes, in as large a table")  # fmt: skip
        moved = sum(f.keys.numel() for f in factors) * 4 * width + 2 * x.numel() * 4
        yield Row.of(f"{case}/F={width}", "best form, gathered", "TB/s", [moved / s / 1e12 for s in best], limit,
                     "device copy")  # fmt: skip
        for way in ("cuSPARSE, combined", "cuSPARSE, one by one", "GE-SpMM, one by one", "one by one",
                    "PyG's scatter, one by one"):  # fmt: skip
            if way in seconds:
                yield Row.of(f"{case}/F={width}", f"{way} over best form", "x",
                             [a / b for a, b in zip(sorted(seconds[way]), sorted(best), strict=True)])  # fmt: skip
        if backward:
            x.requires_grad_()
            grad = torch.ones_like(x)
            for form, group in groups.items():
                out = aggregate_snapshots(x, group)
                run = partial(torch.autograd.grad, out, x, grad, retain_graph=True)
                yield Row.of(f"{case}/F={width}", f"{form}, backward", "ms", [1e3 * s for s in measure(run)])


def count_bytes(group: SnapshotMatrices, x: Tensor) -> int:
    """Count the bytes that an aggregation of `x` moves if no cache holds a row.

    These are the numbers, id and bits of each edge, the description of a slice or a CSR row, and results, read and
    written.
    """
    count, width = x.shape[1:]
    total = 8 * x.numel()
    for piece in group.pieces:
        # Snapshots that have an edge, over all edges.
        had = piece.num_edges * (1 if piece.snapshot is not None else count)
        if piece.presence is not None:
            had = sum(int((piece.presence >> bit & 1).sum()) for bit in range(count))
        total += 4 * piece.num_edges + 4 * width * had
        of_one = piece.snapshot is not None
        if x.is_cuda and choose_kernel(x, piece, False) == "rows":
            # Bits are part of the ids.
            total += 4 * piece.num_rows * (count if of_one else 1)
        else:
            total += piece.num_edges * (piece.presence is not None) + piece.num_slices * (8 + of_one)
    return total


def _factorise(shape: DynamicShape, device: str) -> list[Factors]:
    """Make unweighted snapshots, with parallel edges merged."""
    out = []
    for edges in draw_snapshots(shape, device=device):
        factors = Sum().factorise(order_edges(edges, None, shape.num_nodes))
        out.append(factors._replace(weight=None))
    return out


def to_csr(factors: Factors, num_nodes: int) -> Tensor:
    """Convert a snapshot to torch's CSR matrix, with edges of ones."""
    indptr, cols = build_group([factors], num_nodes).pieces[0].to_csr()
    ones = torch.ones(cols.numel(), device=cols.device)
    return torch.sparse_csr_tensor(indptr.int(), cols, ones, (num_nodes, num_nodes))


def sum_apart(groups: list[SnapshotMatrices], rows: list[Tensor]) -> list[Tensor]:
    """Aggregate snapshots one after the other."""
    return [aggregate_snapshots(x.unsqueeze(1), group) for group, x in zip(groups, rows, strict=True)]


def multiply_apart(matrices: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
    """Aggregate snapshots one after the other by torch (cuSPARSE on a GPU)."""
    return [torch.sparse.mm(matrix, x) for matrix, x in zip(matrices, rows, strict=True)]


def _multiply_rows(matrices: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
    """Aggregate snapshots one after the other by GE-SpMM."""
    return [multiply_csr(m.crow_indices(), m.col_indices(), x) for m, x in zip(matrices, rows, strict=True)]


def _scatter(factors: list[Factors], rows: list[Tensor], num_nodes: int) -> list[Tensor]:
    out = []
    for f, x in zip(factors, rows, strict=True):
        target = f.keys // num_nodes
        out.append(scatter(x.index_select(0, f.keys - target * num_nodes), target, 0, num_nodes, "sum"))
    return out
