"""Convolutions one by one, forward and backward over the edges of a sampled batch, beside PyG's implementations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import (
    EdgeConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GINEConv,
    GraphConv,
    LGConv,
    NNConv,
    PNAConv,
    ResGatedGraphConv,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from benchmarks.nn.aggregation import capture
from pyg_direct.bench.limits import time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.nn.sorted_edges import find_batch, register_sorted

OURS = "accelerated"


def _make_network(width: int) -> torch.nn.Module:
    return Sequential(Linear(2 * width, width), ReLU(), Linear(width, width))


# Square weights, so that products take the same share of the time.
KINDS: dict[str, Callable[[int], torch.nn.Module]] = {
    "SAGE mean": lambda width: SAGEConv(width, width),
    "SAGE max": lambda width: SAGEConv(width, width, aggr="max"),
    "Graph sum": lambda width: GraphConv(width, width),
    "GCN": lambda width: GCNConv(width, width),
    "GIN": lambda width: GINConv(torch.nn.Linear(width, width)),
    "GINE": lambda width: GINEConv(torch.nn.Linear(width, width)),
    "GAT": lambda width: GATConv(width, width // 4, heads=4),
    "GATv2": lambda width: GATv2Conv(width, width // 4, heads=4),
    "LG": lambda width: LGConv(),
    "Transformer": lambda width: TransformerConv(width, width // 4, heads=4),
    "PNA": lambda width: PNAConv(
        width, width, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], torch.arange(64)
    ),
    "Edge max": lambda width: EdgeConv(_make_network(width)),
    "Edge sum": lambda width: EdgeConv(_make_network(width), aggr="sum"),
    # Few results, because PyG makes a matrix for each edge.
    "NN": lambda width: NNConv(width, 8, Linear(_EDGE_WIDTH, 8 * width)),
    "GEN softmax": lambda width: GENConv(width, width, learn_t=True, num_layers=1),
    "ResGated": lambda width: ResGatedGraphConv(width, width),
    "FiLM": lambda width: FiLMConv(width, width),
    # Without the loss of attention, which is PyG's in both.
    "SuperGAT": lambda width: SuperGATConv(width, width // 4, heads=4).eval(),
}
# Numbers of an edge that NNConv is given.
_EDGE_WIDTH = 4
# `torch.compile` takes many seconds for each, so it is measured for one width and dtype.
_COMPILED = "torch.compile(dynamic=True)"


def measure_convolutions(batch: Data, name: str, widths: Sequence[int] = (64, 256),
                         dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16), *, compiles: bool = True,
                         kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Row]:  # fmt: skip
    """Measure forward and backward of each convolution, of plain PyG and accelerated.

    On a GPU it is GPU time of calls replayed as a CUDA graph if nothing in them waits, otherwise wall time. Edges are
    new to each call, as a batch's edges are to its first layer: preparation of edges is included.

    Args:
        batch: A batch of our loader.
        compiles: Also measure `torch.compile` of PyG's code, for the first width and dtype.
    """
    edge_index, num_nodes = batch.edge_index, int(batch.num_nodes)
    known = find_batch(edge_index)
    if known is None:
        raise ArgumentError("batch must be one of our loader's, got one whose edges are not known to be sorted")
    renew = partial(register_sorted, edge_index, batch.num_sampled_nodes, batch.num_sampled_edges, known.max_degree)
    for dtype in dtypes:
        for width in widths:
            x = torch.randn(num_nodes, width, dtype=dtype, device=edge_index.device, requires_grad=True)
            for kind in kinds:
                conv = KINDS[kind](width).to(edge_index.device, dtype)
                case = f"convolutions/{name}/{kind}/{width} {str(dtype).removeprefix('torch.')}"
                has_compiled = compiles and (width, dtype) == (widths[0], dtypes[0])
                # Edge attributes get no gradient, as given attributes get none.
                wide = width if isinstance(conv, GINEConv) else _EDGE_WIDTH if isinstance(conv, NNConv) else 0
                rows = [torch.randn(edge_index.shape[1], wide).to(x)] if wide else []
                yield from _compare(case, _ways(conv, edge_index, num_nodes, renew, has_compiled, rows), x)


def _ways(conv: Any, edge_index: Tensor, num_nodes: int, renew: Callable[[], None], compiles: bool,
          rows: list[Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:  # fmt: skip
    """List the ways to compute a convolution, by name; the first is the reference."""
    plain, size = edge_index.clone(), (num_nodes, num_nodes)

    def make_edge_index() -> EdgeIndex:
        return EdgeIndex(plain, sparse_size=size, sort_order="col")

    def make_sparse() -> SparseTensor:
        return SparseTensor(row=plain[1], col=plain[0], sparse_sizes=size)

    def make_batch() -> Tensor:
        renew()
        return edge_index

    fast = copy.deepcopy(conv)
    accelerate(fast, replay=False)
    ways = {"PyG's edge_index": _call(conv, lambda: plain, rows), "PyG's EdgeIndex": _call(conv, make_edge_index, rows)}
    # Rows of edges would be values of the matrix, and sorted with it.
    if not rows and WITH_TORCH_SPARSE and (torch.ops.torch_sparse.cuda_version() > 0 or not plain.is_cuda):
        ways["PyG's SparseTensor"] = _call(conv, make_sparse, rows)
    if compiles:
        ways[_COMPILED] = _call(torch.compile(copy.deepcopy(conv), dynamic=True), lambda: plain, rows)
    return {**ways, OURS: _call(fast, make_batch, rows)}


def _call(conv: Any, make_edges: Callable[[], Any], rows: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        out: Tensor = conv(x, make_edges(), *rows)
        return out

    return compute


def _compare(case: str, ways: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> Iterator[Row]:
    medians: dict[str, float] = {}
    expected: Tensor | None = None
    for way, compute in ways.items():
        try:
            out = compute(x).detach()
            work = partial(_run_both, compute, x, torch.ones_like(out))
            # `torch.compile` compiles the backward pass at its first run.
            work()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            # A peer that does not support this dtype or kind of edges is reported, and not timed.
            if way in (OURS, next(iter(ways))):
                raise
            print(f"{case}: {way} refuses: {(str(error).splitlines() or [type(error).__name__])[0]}", flush=True)
            continue
        expected = out if expected is None else expected
        tolerance = 1e-3 if x.dtype == torch.float32 else 1e-1
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * max(1, float(expected.abs().max())))
        seconds, clock = _measure(work, x.is_cuda, way != _COMPILED)
        medians[way] = median(seconds)
        yield Row.of(case, way, "ms", [1e3 * s for s in seconds], note=clock)
    best = min((way for way in medians if way != OURS), key=medians.__getitem__)
    yield Row.of(case, "fastest of the others over accelerated", "x", [medians[best] / medians[OURS]], note=best)


def _run_both(compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(compute(x), x, grad)


def _measure(work: Callable[[], object], on_gpu: bool, captures: bool) -> tuple[list[float], str]:
    """Measure (seconds, method of measurement)."""
    if not on_gpu:
        return time_on_clock(work, repeats=5, warm_up=1), "by the clock"
    if not captures:
        return time_on_gpu(work, repeats=10, warm_up=10, queued=3), "of the GPU, launched one by one"
    replay = capture(work)
    if replay is None:
        return time_on_clock(work, repeats=10, warm_up=3), "by the clock, as it waits for the GPU"
    return time_on_gpu(replay, repeats=10, warm_up=10, queued=3), "of the GPU"
