"""Aggregation over sorted edges beside other ways to do it, and training steps of accelerated models beside PyG's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.utils import scatter

from pyg_direct.bench.limits import device_copy_rate
from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import time_on_clock, time_on_gpu
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.nn.sorted import SortedEdges, find_sorted
from pyg_direct.ops.aggregate import REDUCES, aggregate

WIDTHS = (1, 8, 16, 32, 64, 100, 128, 256, 512)
_MODELS = {"SAGE": GraphSAGE, "GCN": GCN, "GIN": GIN, "GAT": GAT}


def measure_aggregation(
    batch: Data,
    name: str,
    widths: tuple[int, ...] = WIDTHS,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Iterator[Row]:
    """Forward, and forward with backward, of each reduce, width and dtype over the edges of a sampled batch.

    The rate counts the rows of all edges and targets once, and the ids. Rows that several edges share may be found in
    the GPU's cache, and the compulsory share of the bytes, each row of `x` once, says how far that may go.
    """
    edges = read_batch(batch)
    num_nodes, num_edges = int(batch.num_nodes), edges.row.numel()
    on_gpu = edges.row.is_cuda
    measure = partial(time_on_gpu, repeats=10) if on_gpu else partial(time_on_clock, repeats=5, warm_up=1)
    limit = device_copy_rate() / 1e12 if on_gpu else None
    for dtype in dtypes:
        for width in widths:
            row_bytes = width * dtype.itemsize
            id_bytes = (num_edges + num_nodes) * edges.row.element_size()
            moved = ((num_edges + num_nodes) * row_bytes + id_bytes) / 1e12
            compulsory = (2 * num_nodes * row_bytes + id_bytes) / 1e12
            x = torch.randn(num_nodes, width, dtype=dtype, device=edges.row.device, requires_grad=True)
            grad = torch.randn_like(x)
            for reduce in REDUCES:
                case = f"aggregate/{name}/{reduce}/{width} {str(dtype).removeprefix('torch.')}"
                ways = _ways(edges, num_nodes, reduce, dtype)
                expected = ways["PyG's scatter"](x.detach().float())
                for way, compute in ways.items():
                    with torch.no_grad():
                        # Others add 16-bit items up in 16 bits.
                        if way == "fused" or dtype == torch.float32:
                            torch.testing.assert_close(compute(x).float(), expected, rtol=2e-2, atol=2e-2)
                        seconds = measure(partial(compute, x))
                    yield Row.of(case, way, "TB/s", [moved / s for s in seconds], limit, "device copy",
                                 f"{compulsory / moved:.2f} of the bytes are compulsory")  # fmt: skip
                    if way == "torch.segment_reduce":
                        continue
                    seconds = measure(partial(_run_both, compute, x, grad))
                    yield Row.of(case, f"{way}, with backward", "ms", [1e3 * s for s in seconds])


def read_batch(batch: Data) -> SortedEdges:
    """The sorted edges of a batch of our loader."""
    edges = find_sorted(batch.edge_index)
    assert edges is not None, "the loader has not told of the edges"
    return edges


def _run_both(compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(compute(x), x, grad)


def _ways(edges: SortedEdges, num_nodes: int, reduce: str, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """The ways to aggregate, by name."""

    def ours(x: Tensor) -> Tensor:
        return aggregate(x, edges.indptr, edges.row, reduce=reduce, target=edges.target, max_degree=edges.max_degree)

    def pyg(x: Tensor) -> Tensor:
        return scatter(x.index_select(0, edges.row), edges.target, 0, num_nodes, reduce)

    def segment(x: Tensor) -> Tensor:
        initial = 0 if reduce in ("max", "min") else None
        out = torch.segment_reduce(x.index_select(0, edges.row), reduce, offsets=edges.indptr, initial=initial)
        return out.nan_to_num(0) if reduce == "mean" else out

    ways = {"fused": ours, "PyG's scatter": pyg}
    if reduce in ("sum", "mean"):
        if dtype == torch.float32:
            ways["torch.segment_reduce"] = segment
        values = torch.ones(edges.row.numel(), dtype=dtype, device=edges.row.device)
        if reduce == "mean":
            values /= edges.indptr.diff().clamp(min=1).to(dtype)[edges.target]
        matrix = torch.sparse_csr_tensor(edges.indptr, edges.row, values, (num_nodes, num_nodes))
        ways["torch.sparse.mm"] = partial(torch.sparse.mm, matrix)
    return ways


def measure_accelerated_steps(batch: Data, num_classes: int, name: str, hidden: int = 256) -> Iterator[Row]:
    """Training steps of trimmed models of as many layers as hops: as they are and accelerated.

    GPU time is that of a step replayed as a CUDA graph, wall time that of a step launched from Python.
    """
    read_batch(batch)
    device = batch.x.device
    for kind, model_class in _MODELS.items():
        plain = model_class(batch.x.shape[1], hidden, len(batch.num_sampled_edges), num_classes).to(device)
        fast = copy.deepcopy(plain)
        accelerate(fast)
        wall, alone = {}, {}
        for way, model in (("PyG", plain), ("accelerated", fast)):
            step = _make_step(model, batch)
            wall[way] = time_on_clock(step, 20 if device.type == "cuda" else 3, 5 if device.type == "cuda" else 1)
            if device.type == "cuda":
                alone[way] = _time_graph(step)
        case = f"aggregate/{name}/{kind} step"
        for metric, times in (("wall", wall), ("GPU", alone)):
            for way, seconds in times.items():
                if seconds:
                    yield Row.of(case, f"{way}, {metric}", "ms", [1e3 * s for s in seconds])
            if times and all(times.values()):
                ratios = [a / b for a, b in zip(sorted(times["PyG"]), sorted(times["accelerated"]), strict=True)]
                yield Row.of(case, f"PyG over accelerated, {metric}", "x", ratios)


def _make_step(model: torch.nn.Module, batch: Data) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                    num_sampled_edges_per_hop=batch.num_sampled_edges)[: batch.batch_size]  # fmt: skip
        F.cross_entropy(out, batch.y[: batch.batch_size].long()).backward()

    return step


def _time_graph(step: Callable[[], Any]) -> list[float]:
    """Seconds of each replay of a step; empty where it waits for the GPU and so cannot be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        torch.cuda.synchronize()
        return []
    return time_on_gpu(graph.replay, 20)
