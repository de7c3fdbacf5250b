"""Padded batches of many small graphs: their tensors keep their addresses and sizes (`PaddedGraphs`).

Nodes after those of the batch belong to one more graph, and edges after those of the batch are loops of them. Edges are
sorted by target, as a sampled batch has them, so that both take one layout (`padded_batch.py`). `masked_norms` lets
batch normalization leave the padding out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import BatchNorm1d
from torch_geometric.data import Batch, Data
from torch_geometric.nn.norm import BatchNorm

from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay.guards import find_norm_over_nodes
from pyg_direct.nn.replay.padded_batch import PaddedEdges, Sizes

Masks: TypeAlias = Mapping[int, tuple[Tensor, Tensor]]
# Attributes that places have in any case, or that are made anew.
_OWN = frozenset(("edge_index", "batch", "ptr", "num_nodes"))


class GraphSizes(NamedTuple):
    """Nodes, edges and graphs of a batch; of the largest batches known, nodes and edges."""

    nodes: int
    edges: int
    graphs: int

    def is_like(self, other: Any) -> bool:
        """Report whether both have as many graphs."""
        return isinstance(other, GraphSizes) and self.graphs == other.graphs

    def join(self, other: GraphSizes) -> GraphSizes:
        """Return the larger of both."""
        return GraphSizes(*map(max, self, other))


def read_graph_sizes(batch: Any) -> GraphSizes | None:
    """Read the sizes of a batch of graphs without types, as `DataLoader` makes it; None for any other."""
    # Attributes of other classes may hold numbers of edges, whose order changes, or of graphs.
    if not isinstance(batch, Batch) or Data not in type(batch).__bases__:
        return None
    mapping = batch._store._mapping
    if not all(type(mapping.get(name)) is Tensor for name in ("edge_index", "batch", "ptr")):
        return None
    if mapping["edge_index"].dim() != 2 or "adj_t" in mapping:
        return None
    if any(name.endswith(("_batch", "_ptr")) for name in mapping):
        return None
    return GraphSizes(int(mapping["batch"].numel()), int(mapping["edge_index"].shape[1]), batch.num_graphs)


class PaddedGraphs:
    """Places for batches of as many graphs, of up to some size.

    Args:
        batch: A batch like those to come.
        names: Attributes to copy, each with a row for each node or edge, or with as many rows in every batch; None for
            all tensors of the batch.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory. It has one graph more than a batch has,
            the last one, which holds the padding.
        masks: See `masked_norms`.
    """

    def __init__(self, batch: Any, largest: GraphSizes, margin: float, names: Sequence[str] | None) -> None:
        self._graphs = largest.graphs
        room = largest.nodes + math.ceil(largest.nodes * margin)
        while True:
            # Nodes of one hop, to which all edges lead.
            self._edges = PaddedEdges(batch.edge_index, Sizes((largest.nodes, 0), (largest.edges,)), margin, room, None)
            self.places = places = GraphSizes(sum(self._edges.places.nodes), sum(self._edges.places.edges),
                                              largest.graphs + 1)  # fmt: skip
            if places.nodes not in places[1:]:
                break
            # Rows are told apart by their number.
            room += 1
        if names is None:
            names = [name for name, value in batch._store.items() if type(value) is Tensor and name not in _OWN]
        self.data, self._kinds = Batch(_base_cls=Data), dict[str, str]()
        for name in names:
            rows = getattr(batch, name, None)
            if not isinstance(rows, Tensor) or rows.dim() == 0 or name in _OWN:
                raise ArgumentError(f"names must be of tensors with rows of nodes, edges or graphs, got {name!r}")
            kind = "node" if batch.is_node_attr(name) else "edge" if batch.is_edge_attr(name) else "graph"
            self._kinds[name] = kind
            count = {"node": places.nodes, "edge": places.edges, "graph": len(rows)}[kind]
            # Padding holds values that a model is made for, such as numbers of atoms.
            self.data[name] = rows.detach()[:1].expand(count, *rows.shape[1:]).clone()
        self.data.edge_index = self._edges.edge_index
        self.data.batch, self.data.ptr = batch.batch.new_empty(places.nodes), batch.ptr.new_empty(places.graphs + 1)
        self.data.num_nodes = places.nodes
        self.data._store.__dict__["_num_graphs"] = places.graphs
        device = batch.edge_index.device
        self.masks: Masks = {rows: (torch.zeros(rows, 1, device=device), torch.zeros((), device=device))
                             for rows in places}  # fmt: skip
        # Sizes that the masks are of.
        self._counted = GraphSizes(0, 0, 0)

    def fill(self, batch: Any) -> bool:
        """Copy a batch; False if it does not fit, or is of another kind."""
        sizes = read_graph_sizes(batch)
        if sizes is None or sizes.graphs != self._graphs:
            return False
        # At least one node is left over for the last graph.
        if sizes.nodes >= self.places.nodes or not all(self._matches(name, batch, sizes) for name in self._kinds):
            return False
        targets, order = batch.edge_index[1].sort(stable=True)
        edges = torch.stack([batch.edge_index[0][order], targets])
        if not self._edges.fill(edges, Sizes((sizes.nodes, 0), (sizes.edges,))):
            return False
        self._edges.register()
        data = self.data
        data.batch.fill_(self._graphs)[: sizes.nodes].copy_(batch.batch)
        data.ptr.fill_(self.places.nodes)[:-1].copy_(batch.ptr)
        for name, kind in self._kinds.items():
            rows = batch[name]
            data[name][: len(rows)].copy_(rows[order] if kind == "edge" else rows)
        for (mask, total), count, before in zip(self.masks.values(), sizes, self._counted, strict=True):
            if count != before:
                mask.zero_()[:count].fill_(1)
                total.fill_(count)
        self._counted = sizes
        return True

    def find_varying(self, batch: Any) -> str | None:
        """Return an attribute of a batch of as many graphs that has no place, as its shape or dtype differs from batch
        to batch; None without one.
        """
        sizes = read_graph_sizes(batch)
        if sizes is None or sizes.graphs != self._graphs:
            return None
        return next((name for name in self._kinds if not self._matches(name, batch, sizes)), None)

    def _matches(self, name: str, batch: Any, sizes: GraphSizes) -> bool:
        given, own, kind = batch._store._mapping.get(name), self.data[name], self._kinds[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        count = {"node": sizes.nodes, "edge": sizes.edges, "graph": len(own)}[kind]
        return given.shape == (count, *own.shape[1:])


def find_other_norm(model: torch.nn.Module) -> str | None:
    """Return the first norm over all nodes that `masked_norms` does not serve, and its name; None without one."""
    served: set[torch.nn.Module] = {part for part in model.modules()
                                    if type(part) is BatchNorm1d and "forward" not in part.__dict__}  # fmt: skip
    served |= {part for part in model.modules() if type(part) is BatchNorm and part.module in served}
    return find_norm_over_nodes(model, served)


@contextmanager
def masked_norms(model: torch.nn.Module, masks: Masks | None) -> Iterator[None]:
    """Let batch normalization of a model take its statistics from rows of the batch, without the padding.

    Args:
        model: The model; nothing of it stays changed.
        masks: By number of rows: 1 for rows of the batch and 0 for the others, float32 `[rows, 1]`; and their sum.
            None for no change.
    """
    if masks is None:
        yield
        return
    norms: list[Any] = [part for part in model.modules() if type(part) is BatchNorm1d]
    for part in norms:
        part.forward = partial(_normalise, part, masks)
    try:
        yield
    finally:
        for part in norms:
            del part.forward


def _normalise(self: BatchNorm1d, masks: Masks, rows: Tensor) -> Tensor:
    """Compute `BatchNorm1d.forward` for rows of which some are padding."""
    if not self.training and self.running_mean is not None:
        return BatchNorm1d.forward(self, rows)
    if rows.dim() != 2 or len(rows) not in masks:
        raise RuntimeError(f"batch normalization of rows of shape {tuple(rows.shape)}, which are neither of nodes nor "
                           "of edges or graphs, would read padding")  # fmt: skip
    mask, count = masks[len(rows)]
    given = rows.float() if rows.itemsize < 4 else rows
    # Padding may hold any number.
    kept = given.where(mask > 0, 0)
    mean = kept.sum(0) / count
    apart = (given - mean).where(mask > 0, 0)
    variance = apart.square().sum(0) / count
    if self.training and self.running_mean is not None and self.running_var is not None:
        with torch.no_grad():
            assert self.num_batches_tracked is not None, "kept with the means"
            self.num_batches_tracked += 1
            share = 1.0 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
            self.running_mean += (mean - self.running_mean) * share
            self.running_var += (variance * count / (count - 1) - self.running_var) * share
    out = (given - mean) * (variance + self.eps).rsqrt()
    if self.weight is not None:
        out = out * self.weight + self.bias
    return out.to(rows.dtype)
