"""Receptive field of a model's layer: a node's neighbors, degrees of the whole graph, or all nodes.

A batch with all neighbors covers only the first. Degrees are counted once, on the whole graph. A layer that depends on
more is computed for all nodes at once, by the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric.nn import aggr, conv, norm
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct.nn.conv.table import SPECS

# Convolutions that depend only on a node, its in-neighbors and the edges between.
_OF_NEIGHBORS = tuple(spec.kind for spec in SPECS if spec.sees_neighbors_only)
# Modules that compute each row separately, with the exceptions below.
_BY_ROW = ("torch.nn.modules.activation", "torch.nn.modules.batchnorm", "torch.nn.modules.container",
           "torch.nn.modules.dropout", "torch.nn.modules.linear", "torch.nn.modules.normalization",
           "torch_geometric.nn.aggr", "torch_geometric.nn.dense.linear", "torch_geometric.nn.models.mlp",
           "torch_geometric.nn.norm")  # fmt: skip
_OVER_ROWS = (torch.nn.GLU, torch.nn.LogSoftmax, torch.nn.MultiheadAttention, torch.nn.Softmax, torch.nn.Softmin,
              norm.GraphNorm, norm.GraphSizeNorm, norm.MeanSubtractionNorm, norm.PairNorm)  # fmt: skip
# PyG's aggregations that depend on the largest degree, or on all nodes.
_OF_ALL = (aggr.EquilibriumAggregation, aggr.GraphMultisetTransformer, aggr.GRUAggregation, aggr.LSTMAggregation,
           aggr.SetTransformerAggregation)  # fmt: skip
# Edges counted at a time.
_EDGES_AT_ONCE = 1 << 24
# Nodes for a test of a layer, edges from which their targets are taken, other edges and nodes around them.
_TRIED, _LOOKED_AT, _AROUND, _APART = 16, 1 << 12, 1 << 16, 64
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUGH = 2e-2

# (features of nodes, edges, number of wanted nodes) -> their rows.
Run = Callable[[Tensor, Any, int], Tensor]


@dataclass(frozen=True)
class Reach:
    """Method to compute a layer.

    Attributes:
        convolve: (batch, features of its nodes) -> rows of its seeds; None if all nodes are needed at once.
        finish: Function applied to these rows afterwards; None for none.
        is_by_row: True if `finish` is known to compute each row separately, so that it may be called with rows of a
            batch.
    """

    convolve: Callable[[Any, Tensor], Tensor] | None
    finish: Callable[[Tensor], Tensor] | None = None
    is_by_row: bool = True


class Graph:
    """Graph for layers that depend on more than neighbors.

    Args:
        data: A graph with `edge_index` or `adj_t`.
    """

    def __init__(self, data: Any, device: torch.device) -> None:
        self.is_list = "edge_index" in data
        self.num_nodes, self.device = int(data.num_nodes), device
        edges = data.edge_index if self.is_list else data.adj_t
        # PyG's `EdgeIndex` stores its order, which slices of it need not have.
        self._edges = edges.as_tensor() if hasattr(edges, "as_tensor") else edges
        self._whole: Any = None
        self._scales: dict[tuple[bool, torch.dtype], Tensor] = {}

    def place(self) -> Any:
        """Move all edges to the device."""
        if self._whole is None:
            edges = self._edges.to(self.device)
            self._whole = edges.long() if self.is_list else edges
        return self._whole

    def scale(self, has_loops: bool, dtype: torch.dtype) -> Tensor:
        """Compute 1 / sqrt(in-degree) of all nodes, `[N]`; with a self loop at each in place of existing ones. Counted
        once.
        """
        key = has_loops, dtype
        if key not in self._scales:
            degree = torch.zeros(self.num_nodes, dtype=torch.int64, device=self._edges.device)
            for piece in self._edges.split(max(_EDGES_AT_ONCE, self.num_nodes), 1):
                targets = piece[1][piece[0] != piece[1]] if has_loops else piece[1]
                degree += torch.bincount(targets.long(), minlength=self.num_nodes)
            scale = (degree + int(has_loops)).to(self.device).to(dtype).pow(-0.5)
            self._scales[key] = scale.masked_fill_(scale == float("inf"), 0)
        return self._scales[key]

    def sees_neighbors_only(self, run: Run, read: Callable[[Tensor], Tensor]) -> bool:
        """Test if a layer depends on in-neighbors only.

        Some nodes must get the same rows with only their in-neighbors, in another order with more nodes around, and
        when fewer nodes are wanted.
        """
        if not self.is_list or not self._edges.shape[1]:
            return False
        count, (alone, edges), (within, more) = self._tried
        half = -(-count // 2)
        try:
            rows = run(read(alone), edges, count)
            return (_is_close(run(read(within), more, count), rows.flip(0))
                    and _is_close(run(read(alone), edges, half), rows[:half]))  # fmt: skip
        except Exception:
            # A layer that cannot run on so few nodes may raise anything.
            return False

    @cached_property
    def _tried(self) -> tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(number of test nodes, these with their in-neighbors, the same in reverse order with more nodes around)."""
        source, target = self._edges
        targets = self._choose_targets()
        is_near = _mark(targets, self.num_nodes)[target]
        known = _mark(torch.cat([targets, source[is_near]]), self.num_nodes)
        around = ((known[source] | known[target]) & ~is_near).nonzero().view(-1)
        around = around[:: -(-around.numel() // _AROUND) or 1]
        near, apart = is_near.nonzero().view(-1), _draw(self.num_nodes, _APART).to(source.device)
        alone = self._join(targets, near, apart[:0])
        # In another order, which also detects a layer that depends on the positions of nodes.
        return targets.numel(), alone, self._join(targets.flip(0), torch.cat([near, around]), apart)

    def _choose_targets(self) -> Tensor:
        """Choose nodes with few edges, whose neighbors have other edges."""
        source, target = self._edges[:, _draw(self._edges.shape[1], _LOOKED_AT).to(self._edges.device)].long()
        sizes = [torch.bincount(end.long(), minlength=self.num_nodes) for end in self._edges]
        is_alone = sizes[0][source] + sizes[1][source] <= 1
        order = (sizes[1][target] // _TRIED + is_alone * (self._edges.shape[1] + 1)).sort(stable=True).indices
        chosen = target[order][: 4 * _TRIED].unique()
        return chosen[_draw(chosen.numel(), _TRIED).to(chosen.device).unique()]

    def _join(self, targets: Tensor, edges: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Join (nodes of these edges and others, `targets` first; the edges among their positions), on the device."""
        chosen = self._edges[:, edges].long()
        is_other = _mark(torch.cat([chosen.view(-1), others]), self.num_nodes)
        is_other[targets] = False
        nodes = torch.cat([targets, is_other.nonzero().view(-1)])
        places = torch.empty(self.num_nodes, dtype=torch.int64, device=nodes.device)
        places[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        return nodes.to(self.device), places[chosen].to(self.device)


def find_reach(model: Any, layer: int, graph: Graph, read: Callable[[Tensor], Tensor]) -> Reach:
    """Find how to compute a layer of a model in evaluation mode, so that the result does not depend on batches.

    Args:
        model: A model with `convs` and `inference_per_layer`, as `BasicGNN`.
    """
    run: Run = partial(model.inference_per_layer, layer)
    # PyG's quantiles and medians fail with fewer than two edges, or if the first node has no neighbors.
    needs_edges = any(isinstance(part, aggr.QuantileAggregation) for part in model.modules())
    if needs_edges:
        run = partial(_run_after_edges, run)
    whole, by_batch = Reach(None), Reach(lambda batch, x: run(x, edges_of(batch), batch.batch_size))
    module = _find_convolution(model, layer)
    # Modules that learn from their inputs, or cache edges, are computed once on the whole graph.
    if any(part.training or _keeps_edges(part) or isinstance(part, _OF_ALL) for part in model.modules()):
        return whole
    if needs_edges and not graph.is_list:
        return whole
    if module is not None and _is_gcn(module) and graph.is_list:
        return Reach(partial(_convolve_gcn, module, graph), partial(_finish, model, layer), _ends_by_row(model, layer))
    if module is None or type(module) not in _OF_NEIGHBORS or not _is_plain(module):
        return by_batch if graph.sees_neighbors_only(run, read) else whole
    if _ends_by_row(model, layer):
        return by_batch
    convolve: Run = lambda x, edges, count: module(x, edges)[:count]  # noqa: E731
    if needs_edges:
        convolve = partial(_run_after_edges, convolve)
    return Reach(lambda batch, x: convolve(x, edges_of(batch), batch.batch_size), partial(_finish, model, layer), False)


def gives_each_row(finish: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Test if `finish` returns equal rows with other rows in the input and without them."""
    count = min(_APART, rows.shape[0])
    if count < 2 or not rows.is_floating_point():
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    some = torch.randn(count, *rows.shape[1:], generator=generator, device="cpu").to(rows)
    return _is_close(finish(some[: count // 2].clone()), finish(some.clone())[: count // 2])


def edges_of(batch: Any) -> Any:
    """Return the edges of a batch in the form of its graph."""
    return batch.adj_t if "adj_t" in batch else batch.edge_index


def _run_after_edges(run: Run, x: Tensor, edges: Tensor, count: int) -> Tensor:
    """Run a layer with two more nodes, and two edges to the first, before the nodes of a batch."""
    nodes, more = x.new_zeros(2, *x.shape[1:]), edges.new_zeros(2, 2)
    more[0] = 1
    return run(torch.cat([nodes, x]), torch.cat([more, edges + 2], 1), count + 2)[2:]


def _find_convolution(model: Any, layer: int) -> Any:
    """Find the convolution of a layer with `BasicGNN`'s other steps; None if they may differ."""
    method = getattr(model.inference_per_layer, "__func__", None)
    is_known = isinstance(model, BasicGNN) and method is BasicGNN.inference_per_layer and not _has_hooks(model)
    return model.convs[layer] if is_known else None


def _is_gcn(module: Any) -> bool:
    """Check if a convolution is GCN's with its normalisation."""
    return (type(module) is conv.GCNConv and module.normalize and type(module.aggr_module) is aggr.SumAggregation
            and module.lin.bias is None and _is_plain(module))  # fmt: skip


def _is_plain(module: Any) -> bool:
    """Check if a convolution is unmodified PyG: along edges, without hooks, with parts that compute each row
    separately.
    """
    return (module.flow == "source_to_target" and not module.explain and not _has_hooks(module)
            and all(_is_by_row(part) for part in module.modules() if part is not module))  # fmt: skip


def _keeps_edges(module: Any) -> bool:
    """Check if a convolution caches the edges of its first call."""
    is_cached = getattr(module, "cached", False)
    return isinstance(is_cached, (bool, int)) and bool(is_cached)


def _has_hooks(module: Any) -> bool:
    return any(value for name, value in module.__dict__.items() if name.endswith("_hooks") and "state_dict" not in name)


def _is_by_row(module: Any) -> bool:
    if _has_hooks(module) or not type(module).__module__.startswith(_BY_ROW) or isinstance(module, _OVER_ROWS):
        return False
    if isinstance(module, norm.LayerNorm):
        return bool(module.mode == "node")
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    return isinstance(getattr(module, "act", None), (torch.nn.Module, type(None)))


def _ends_by_row(model: Any, layer: int) -> bool:
    """Check if activation, norm and the following steps compute each row separately."""
    parts = [model.act, None if model.norms is None else model.norms[layer], getattr(model, "lin", None)]
    if layer == model.num_layers - 1 and model.jk_mode is None:
        return True
    return all(isinstance(part, torch.nn.Module) and all(map(_is_by_row, part.modules()))
               for part in parts if part is not None)  # fmt: skip


class _Given(torch.nn.Module):
    """Placeholder for a convolution that was computed already."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def _finish(model: Any, layer: int, rows: Tensor) -> Tensor:
    """Apply the model's steps after a convolution to its rows."""
    shown = object.__new__(type(model))
    shown.__dict__.update(model.__dict__)
    given = _Given()
    shown.__dict__["_modules"] = {**model._modules, "convs": torch.nn.ModuleList([given] * model.num_layers)}
    return BasicGNN.inference_per_layer(shown, layer, rows, None, rows.shape[0])  # type: ignore[no-any-return]


def _convolve_gcn(module: Any, graph: Graph, batch: Any, x: Tensor) -> Tensor:
    """Compute GCNConv of the seeds of a batch, with degrees of the whole graph."""
    count, (row, col) = batch.batch_size, batch.edge_index
    scale = graph.scale(module.add_self_loops, x.dtype)[batch.n_id]
    weight = scale[row] * scale[col]
    if module.add_self_loops:
        weight = weight.masked_fill(row == col, 0)
    # The matrix may be applied before or after the sum: on narrower, or fewer, rows.
    is_late = x.shape[1] <= module.out_channels or 2 * count <= x.shape[0]
    rows = x if is_late else module.lin(x)
    out = module.propagate(batch.edge_index, x=rows, edge_weight=weight)[:count]
    if module.add_self_loops:
        out = out + rows[:count] * scale[:count].square().view(-1, 1)
    out = module.lin(out) if is_late else out
    return out if module.bias is None else out + module.bias


def _draw(size: int, count: int) -> Tensor:
    """Draw numbers below `size`, with a fixed seed."""
    return torch.randint(size, (count,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _mark(ids: Tensor, size: int) -> Tensor:
    """Mark the ids among the numbers below `size`."""
    marks = torch.zeros(size, dtype=torch.bool, device=ids.device)
    marks[ids.long()] = True
    return marks


def _is_close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    bound = _TOLERANCE.get(expected.dtype, _ROUGH) * float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((got - expected).abs() <= bound).all())
