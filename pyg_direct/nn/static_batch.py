"""Static graphs: convolutions of a batch of signals `[B, N, F]` over one structure.

PyG's code makes a row for each edge of each signal. Here the rows of a node stand side by side, `[N, B, F]` in memory,
and one pass over the sorted edges sums all signals. Results are views `[B, N, F]` of such memory, so the next
convolution copies nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear

from pyg_direct.nn.dispatch import find_reduce, is_plain
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, find_batch, is_plain_tensor
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, is_static
from pyg_direct.ops.aggregate.sum_rows import DTYPES, aggregate
from pyg_direct.ops.run_kernel import runs_on_gpu

# Layers that process each row on its own, wherever the dimensions of nodes and signals are.
_BY_ROW = (nn.Linear, Linear, nn.Identity, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh,
           nn.Sigmoid, nn.Softplus)  # fmt: skip


class Signals(NamedTuple):
    """Signals of a layer over edges that are known to fit.

    Attributes:
        rows: Rows of each node side by side, `[N, B, F]`, contiguous.
        batch, edges: The structure, and its edges sorted by target.
        weight: Weights in the order of the sorted edges, `[E]`; None without weights.
    """

    rows: Tensor
    batch: SortedBatch
    edges: SortedEdges
    weight: Tensor | None

    def sum(self, self_: Any, rows: Tensor, edges: SortedEdges | None = None, weight: Tensor | None = None) -> Tensor:
        """Reduce rows `[N, B, C]` over edges, as the layer `self_` does, by default over its own edges."""
        edges, num_nodes = self.edges if edges is None else edges, rows.shape[0]
        transposed = None
        reduce = find_reduce(self_)
        sorts = torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows) or isinstance(
            self.batch, WholeGraph)  # fmt: skip
        if sorts and torch.is_grad_enabled() and rows.requires_grad and reduce in ("sum", "mean"):
            transposed = self.batch.transpose(edges, num_nodes)
        if weight is not None:
            # Under autocast matrices return another dtype.
            dtype = torch.promote_types(rows.dtype, weight.dtype)
            rows, weight = rows.to(dtype), weight.to(dtype)
        return aggregate(rows, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                         num_targets=num_nodes, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip


def open_signals(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Signals | None:
    """Return the signals of an accelerated layer; None if PyG's own code must compute or refuse them.

    Args:
        x: Rows `[B, N, F]`.
        edge_index: Edges that a loader registered, or that came back often enough.
        edge_weight: Weights `[E]`, or None.
    """
    if (
        type(x) is not Tensor
        or x.dim() != 3
        or x.dtype not in DTYPES
        or x.numel() == 0
        or self.node_dim != -2
        or not is_plain_tensor(edge_index)
        or edge_index.device != x.device
        or not is_plain(self, edge_index)
    ):
        return None
    num_signals, num_nodes, width = x.shape
    weighted = isinstance(edge_weight, Tensor)
    if edge_weight is not None and not (weighted and edge_weight.is_floating_point()
                                        and edge_weight.shape == edge_index.shape[1:]):  # fmt: skip
        return None
    # Conservative, as this has not run on a GPU yet: there only over edges that a loader keeps for signals.
    if runs_on_gpu(x) and not is_static(edge_index):
        return None
    batch = find_batch(edge_index)
    if batch is None:
        batch = find_whole(edge_index, num_nodes, num_signals * width, saves_launches=True)
    if batch is None or not batch.fits(edge_index, num_nodes, num_nodes):
        return None
    if weighted and find_reduce(self) not in ("sum", "mean"):
        return None
    weight = edge_weight.index_select(0, batch.order) if weighted and isinstance(batch, WholeGraph) else edge_weight
    return Signals(x.transpose(0, 1).contiguous(), batch, batch.view(edge_index), weight)


def works_by_row(network: Any) -> bool:
    """Report whether a network of a layer processes each row on its own."""
    parts: Any = network.modules() if isinstance(network, nn.Module) else [None]
    return all(type(part) in (*_BY_ROW, nn.Sequential) and not part._forward_hooks and not part._forward_pre_hooks
               for part in parts)  # fmt: skip
