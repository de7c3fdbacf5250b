"""Aggregation over sorted edges beside other implementations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import scatter, spmm

from pyg_direct.bench.limits import device_copy_rate, time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.nn.sorted_edges import SortedEdges, find_sorted
from pyg_direct.ops.aggregate.sum_rows import aggregate
from pyg_direct.runtime.cuda.graph_capture import waits_refused

WIDTHS = (1, 8, 32, 64, 100, 128, 256, 512)
# Measured reduces and widths by dtype, None for all requested widths. A minimum is a maximum with another sign, and
# float16 as wide as bfloat16.
_MEASURED: tuple[tuple[torch.dtype, tuple[str, ...], tuple[int, ...] | None], ...] = (
    (torch.float32, ("sum", "mean", "max"), None),
    (torch.float32, ("min", "weighted sum"), (64, 256)),
    (torch.bfloat16, ("sum", "mean", "max"), (64, 128, 256)),
    (torch.float16, ("sum", "max"), (64, 256)),
)
_OTHERS = ("PyG's scatter", "torch.sparse.mm")


def measure_aggregation(batch: Data, name: str, widths: tuple[int, ...] = WIDTHS) -> Iterator[Row]:
    """Measure forward, and forward with backward, of each reduce, width and dtype over the edges of a sampled batch.

    On a GPU it is GPU time, of calls replayed as a CUDA graph. The rate counts the rows of all edges and targets once,
    and the ids. Rows shared by several edges may be in the GPU's cache. The compulsory share of the bytes, each row of
    `x` once, is the bound of this effect.
    """
    edges = read_batch(batch)
    num_nodes, num_edges = int(batch.num_nodes), edges.row.numel()
    on_gpu = edges.row.is_cuda
    limit = device_copy_rate() / 1e12 if on_gpu else None
    for dtype, reduces, of_widths in _MEASURED:
        for width in widths if of_widths is None else sorted({*of_widths} & {*widths}):
            row_bytes = width * dtype.itemsize
            id_bytes = (num_edges + num_nodes) * edges.row.element_size()
            moved = ((num_edges + num_nodes) * row_bytes + id_bytes) / 1e12
            compulsory = (2 * num_nodes * row_bytes + id_bytes) / 1e12
            x = torch.randn(num_nodes, width, dtype=dtype, device=edges.row.device, requires_grad=True)
            grad = torch.randn_like(x)
            for reduce in reduces:
                case = f"aggregate/{name}/{reduce}/{width} {str(dtype).removeprefix('torch.')}"
                ways = _ways(edges, num_nodes, reduce, dtype)
                medians: dict[str, dict[str, float]] = {"": {}, ", with backward": {}}
                with torch.no_grad():
                    expected = ways["PyG's scatter"](x.detach().float())
                for way, compute in ways.items():
                    if way != "fused" and not _takes(compute, x):
                        continue
                    with torch.no_grad():
                        # Other ways accumulate 16-bit values in 16 bits.
                        if way == "fused" or dtype == torch.float32:
                            torch.testing.assert_close(compute(x).float(), expected, rtol=2e-2, atol=2e-2)
                        seconds = _measure(partial(compute, x), on_gpu)
                    medians[""][way] = median(seconds)
                    yield Row.of(case, way, "TB/s", [moved / s for s in seconds], limit, "device copy",
                                 f"{compulsory / moved:.2f} of the bytes are compulsory")  # fmt: skip
                    if way == "fused" or way in _OTHERS:
                        seconds = _measure(partial(_run_both, compute, x, grad), on_gpu)
                        medians[", with backward"][way] = median(seconds)
                        yield Row.of(case, f"{way}, with backward", "ms", [1e3 * s for s in seconds])
                for what, found in medians.items():
                    best = min((way for way in found if way != "fused"), key=found.__getitem__)
                    ratio = found[best] / found["fused"]
                    yield Row.of(case, f"fastest of the others over fused{what}", "x", [ratio], note=best)


@torch.no_grad()
def _takes(compute: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Check if another way supports the dtype of `x` on its device."""
    try:
        compute(x)
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


def _measure(work: Callable[[], object], on_gpu: bool) -> list[float]:
    if not on_gpu:
        return time_on_clock(work, repeats=5, warm_up=1)
    replay = capture(work)
    # Otherwise the first measurement would run before the GPU's clock has risen.
    return time_on_gpu(work if replay is None else replay, repeats=10, warm_up=20, queued=3)


def capture(work: Callable[[], object]) -> Callable[[], object] | None:
    """Capture the work as a CUDA graph; None if it waits for the GPU, which cannot be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with waits_refused(), torch.cuda.stream(side):
            work()
    except RuntimeError:
        return None
    finally:
        torch.cuda.synchronize()
    # Any GPU work of the collector, or of a compiler's thread, would end the capture.
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    finally:
        if collects:
            gc.enable()
    return graph.replay


def read_batch(batch: Data) -> SortedEdges:
    """Read the sorted edges of a batch of our loader."""
    edges = find_sorted(batch.edge_index)
    assert edges is not None, "the loader has not told of the edges"
    return edges


def _run_both(compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(compute(x), x, grad)


def _ways(edges: SortedEdges, num_nodes: int, reduce: str, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """List the ways to aggregate, by name."""
    weight = None
    if reduce == "weighted sum":
        reduce, weight = "sum", torch.rand(edges.row.numel(), device=edges.row.device).to(dtype)

    def ours(x: Tensor) -> Tensor:
        return aggregate(x, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                         max_degree=edges.max_degree)  # fmt: skip

    def bring(x: Tensor) -> Tensor:
        rows = x.index_select(0, edges.row)
        return rows if weight is None else rows * weight[:, None]

    def pyg(x: Tensor) -> Tensor:
        return scatter(bring(x), edges.target, 0, num_nodes, reduce)

    def segment(x: Tensor) -> Tensor:
        out = torch.segment_reduce(bring(x), reduce, offsets=edges.indptr)
        # Without edges a mean is undefined, and a maximum minus infinity.
        return out if reduce == "sum" else out.masked_fill(has_none, 0)

    ways = {"fused": ours, "PyG's scatter": pyg}
    if dtype == torch.float32:
        has_none = (edges.indptr.diff() == 0)[:, None]
        ways["torch.segment_reduce"] = segment
    if reduce in ("sum", "mean"):
        values = torch.ones(edges.row.numel(), dtype=dtype, device=edges.row.device) if weight is None else weight
        if reduce == "mean":
            values /= edges.indptr.diff().clamp(min=1).to(dtype)[edges.target]
        matrix = torch.sparse_csr_tensor(edges.indptr, edges.row, values, (num_nodes, num_nodes))
        ways["torch.sparse.mm"] = partial(torch.sparse.mm, matrix)
        index = EdgeIndex(torch.stack([edges.row, edges.target]), sparse_size=(num_nodes, num_nodes), sort_order="col")
        ways["PyG's EdgeIndex"] = lambda x: index.matmul(x, input_value=weight, reduce=reduce, transpose=True)
        if WITH_TORCH_SPARSE and (torch.ops.torch_sparse.cuda_version() > 0 or not edges.row.is_cuda):
            adj_t = SparseTensor(row=edges.target, col=edges.row, value=weight, sparse_sizes=(num_nodes, num_nodes),
                                 is_sorted=False)  # fmt: skip
            ways["PyG's SparseTensor"] = lambda x: spmm(adj_t, x, reduce)
    return ways
