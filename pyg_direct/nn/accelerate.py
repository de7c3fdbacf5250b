"""`accelerate`: PyG's convolutions aggregate through `ops.aggregate` where a batch is known to be sorted.

A convolution keeps its class, parameters and hooks; its instance gets a `propagate` (and where PyG rebuilds the edges
in `forward`, a `forward`) of its own, bound to it and named alike, so that it can be copied and pickled. Whatever is
out of the ordinary goes PyG's own way.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn.sorted import SortedEdges, add_loops, find_batch
from pyg_direct.ops.aggregate import aggregate
from pyg_direct.ops.launch import runs_on_gpu

_REDUCES = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NARROW = 8
_HOOKS = ("_propagate_forward_pre_hooks", "_propagate_forward_hooks", "_message_forward_pre_hooks",
          "_message_forward_hooks", "_aggregate_forward_pre_hooks", "_aggregate_forward_hooks")  # fmt: skip


class Acceleration:
    """What `accelerate` changed.

    Attributes:
        convolutions: Class of each accelerated convolution, by its name in the model.
    """

    def __init__(self, model: torch.nn.Module, convolutions: dict[str, str]) -> None:
        self._model, self.convolutions = model, convolutions

    def undo(self) -> None:
        """Give the convolutions of the model their own code back."""
        for module in self._model.modules():
            _strip(module)

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}: {kind}" for name, kind in self.convolutions.items())
        return f"Acceleration({listed})"


def accelerate(model: torch.nn.Module) -> Acceleration:
    """Let the convolutions of a PyG model aggregate batches of our loaders with one fused kernel each.

    SAGEConv, GraphConv, GCNConv, GINConv, GINEConv, GATConv and GATv2Conv are found; subclasses only where they leave
    the messages alone. Results are those of PyG up to rounding. Batches of other loaders, weights or options that are
    not covered, explanations, hooks on messages and compiled or traced models take PyG's own code, unchanged. The
    model can be saved, copied and scripted as before.

    Args:
        model: Any module; it is changed in place.

    Returns:
        What was accelerated, with `undo()`.
    """
    found = {}
    for name, module in model.named_modules():
        kind = next((kind for kind in _MESSAGES if isinstance(module, kind)), None)
        if kind is None or not _is_untouched(module, kind):
            continue
        module.__dict__["propagate"] = MethodType(propagate, module)
        if kind in _FORWARDS and type(module).forward is kind.__dict__["forward"]:
            module.__dict__["forward"] = MethodType(_FORWARDS[kind], module)
            # TorchScript compiles the `forward` of the instance.
            module.__dict__["__prepare_scriptable__"] = functools.partial(_make_plain, module)
        found[name] = type(module).__name__
    return Acceleration(model, found)


def _is_untouched(module: Any, kind: type) -> bool:
    """Whether a subclass and the instance do with messages what PyG's class does."""
    _strip(module)
    own = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
    # PyG writes a `propagate` for each class, and puts it on instances that were explained.
    written = type(module).propagate
    is_written = written is conv.MessagePassing.propagate or written.__module__.endswith("_propagate")
    instance = getattr(module.__dict__.get("propagate", written), "__func__", written)
    return (
        is_written
        and instance is written
        and all(getattr(type(module), name, None) is getattr(kind, name, None) for name in own)
        and not any(name in module.__dict__ for name in (*own, "forward"))
    )


def _strip(module: torch.nn.Module) -> None:
    for name, own in (("propagate", (propagate,)), ("forward", tuple(_FORWARDS.values()))):
        if getattr(module.__dict__.get(name), "__func__", None) in own:
            del module.__dict__[name]
            module.__dict__.pop("__prepare_scriptable__", None)


def _make_plain(module: torch.nn.Module) -> torch.nn.Module:
    plain = copy.copy(module)
    _strip(plain)
    return plain


def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """What replaces `propagate` of an accelerated convolution."""
    kind = next(kind for kind in _MESSAGES if isinstance(self, kind))
    out = None
    if _is_plain(self, edge_index):
        out = _aggregate(self, _MESSAGES[kind], edge_index, size, kwargs)
    return type(self).propagate(self, edge_index, size=size, **kwargs) if out is None else out


def _is_plain(self: Any, edge_index: Any) -> bool:
    """Whether nothing looks at the messages, and they flow as usual."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and isinstance(edge_index, Tensor)
        and type(self.aggr_module) in _REDUCES
        and self.flow == "source_to_target"
        and not self.explain
        and self.decomposed_layers == 1
        and not any(getattr(self, name) for name in _HOOKS)
        and not self.aggr_module._forward_hooks
        and not self.aggr_module._forward_pre_hooks
    )


def _aggregate(self: Any, make: Callable[..., Any], edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Any:
    """The result of `propagate`; None where PyG's own code must find it, or must refuse."""
    batch = find_batch(edge_index)
    x = kwargs["x"]
    source, destination = x if isinstance(x, (tuple, list)) else (x, x)
    if batch is None or not isinstance(source, Tensor) or source.dtype not in _DTYPES:
        return None
    num_sources = source.shape[0]
    num_targets = num_sources if destination is None else destination.shape[0]
    edges = batch.view(edge_index)
    if (
        source.device != edge_index.device
        or num_sources < edges.least_sources
        or not edges.least_targets <= num_targets < edges.indptr.numel()
        or (size is not None and tuple(size) != (num_sources, num_targets))
    ):
        return None
    reduce = _REDUCES[type(self.aggr_module)]
    made = make(self, source, edges, kwargs)
    if made is None:
        return None
    rows, weight, of_edges = made
    tracked = torch.is_grad_enabled() and rows.requires_grad
    if rows.dtype not in _DTYPES or (weight is not None and reduce in ("max", "min")):
        return None
    if not runs_on_gpu(rows) and not _wins_on_cpu(rows, reduce, tracked):
        return None
    if of_edges:
        return aggregate(rows, edges.indptr, reduce=reduce, weight=weight, target=edges.target,
                         num_targets=num_targets, max_degree=edges.max_degree)  # fmt: skip
    transposed = None
    sorts = torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows)
    if sorts and tracked and reduce in ("sum", "mean"):
        transposed = batch.transpose(edges, num_sources)
    return aggregate(rows, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                     num_targets=num_targets, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip


def _wins_on_cpu(rows: Tensor, reduce: str, tracked: bool) -> bool:
    """Whether the loops of a CPU are faster than torch's: not at narrow rows, nor at extremes without a gradient."""
    return rows.shape[1:].numel() >= _NARROW and (tracked or reduce in ("sum", "mean"))


# What each class sends along an edge: (rows, weights of edges, whether rows belong to edges instead of nodes).
_Message = tuple[Tensor, Tensor | None, bool] | None


def _copy_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    return (x, None, False) if x.dim() == 2 else None


def _weigh_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    weight = kwargs.get("edge_weight")
    if weight is None:
        return _copy_rows(self, x, edges, kwargs)
    if x.dim() != 2 or weight.numel() != edges.row.numel():
        return None
    return *_promote(x, weight.view(-1)), False


def _attend(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    alpha = kwargs["alpha"]
    if x.dim() != 3 or tuple(alpha.shape) != (edges.row.numel(), x.shape[1]):
        return None
    return *_promote(x, alpha), False


def _promote(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of their product."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def _add_edge_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    attribute = kwargs.get("edge_attr")
    if x.dim() != 2 or not isinstance(attribute, Tensor) or attribute.shape[0] != edges.row.numel():
        return None
    return self.message(x.index_select(0, edges.row), attribute), None, True


_MESSAGES: dict[type, Callable[..., _Message]] = {
    conv.SAGEConv: _copy_rows,
    conv.GINConv: _copy_rows,
    conv.GraphConv: _weigh_rows,
    conv.GCNConv: _weigh_rows,
    conv.GINEConv: _add_edge_rows,
    conv.GATConv: _attend,
    conv.GATv2Conv: _attend,
}


def _forward_gcn() -> Callable[..., Tensor]:
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """GCNConv's own forward over edges that are normalised in their order."""
        plain = type(self).forward
        if not (self.normalize and not self.cached and edge_weight is None and isinstance(x, Tensor) and x.dim() == 2
                and _is_plain(self, edge_index) and _fits(edge_index, x.shape[0])):  # fmt: skip
            return plain(self, x, edge_index, edge_weight)
        # PyG's forward takes normalised edges from where a cached convolution keeps them.
        self._cached_edge_index = _normalise(edge_index, x.shape[0], self.add_self_loops, x.dtype)
        try:
            return plain(self, x, edge_index, edge_weight)
        finally:
            self._cached_edge_index = None

    return forward


def _forward_gat() -> Callable[..., Any]:
    def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The own forward of GATConv and GATv2Conv over edges that hold their loops already."""
        plain = type(self).forward
        asked = args or any(value is not None for value in (edge_attr, *kwargs.values()))
        if (
            asked
            or not self.add_self_loops
            or not isinstance(x, Tensor)
            or not _is_plain(self, edge_index)
            or not _fits(edge_index, x.shape[0])
            or _has_loops(edge_index)
        ):
            return plain(self, x, edge_index, edge_attr, *args, **kwargs)
        looped = add_loops(edge_index, x.shape[0])
        self.add_self_loops = False
        try:
            return plain(self, x, looped)
        finally:
            self.add_self_loops = True

    return forward


_FORWARDS: dict[type, Callable[..., Any]] = {conv.GCNConv: _forward_gcn(), conv.GATConv: _forward_gat()}
_FORWARDS[conv.GATv2Conv] = _FORWARDS[conv.GATConv]


def _fits(edge_index: Tensor, num_nodes: int) -> bool:
    """Whether these edges are known to be sorted and lie among so many nodes."""
    batch = find_batch(edge_index)
    if batch is None:
        return False
    edges = batch.view(edge_index)
    return edges.least_sources <= num_nodes < edges.indptr.numel()


def _has_loops(edge_index: Tensor) -> bool:
    batch = find_batch(edge_index)
    assert batch is not None, "edges are not known to be sorted"
    return batch.has_loops(edge_index)


def _normalise(edge_index: Tensor, num_nodes: int, loops: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Edges with one loop a node, if asked for, and their symmetric weights; other loops then weigh nothing."""
    edges = add_loops(edge_index, num_nodes) if loops else edge_index
    batch = find_batch(edges)
    assert batch is not None, "edges are not known to be sorted"
    indptr, row, target, *_ = batch.view(edges)
    work = torch.promote_types(dtype, torch.float32)
    weight = torch.ones(row.numel(), dtype=work, device=row.device)
    if loops:
        # The loop of a target is the last of its edges.
        weight = (row != target).to(work)
        weight.index_fill_(0, indptr[1 : num_nodes + 1].clamp(max=row.numel()).long() - 1, 1)
    degree = aggregate(weight.view(-1, 1), indptr, num_targets=num_nodes, max_degree=batch.max_degree).view(-1)
    scale = degree.pow_(-0.5)
    scale.masked_fill_(scale == float("inf"), 0)
    return edges, (scale[row] * weight * scale[target]).to(dtype)
