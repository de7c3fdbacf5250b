"""What replaces `propagate` of accelerated convolutions: our operator where a batch allows it, else PyG's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import paths
from pyg_direct.nn.conv.gine import sum_messages
from pyg_direct.nn.sorted_edges import (
    SortedEdges,
    WholeGraph,
    find_batch,
    find_whole,
    is_plain_tensor,
    is_registered,
    may_find,
)
from pyg_direct.ops.aggregate.sum import DTYPES, aggregate
from pyg_direct.ops.run_kernel import is_ordinary, is_recorded, runs_on_gpu

_REDUCES = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
}
_NARROW = 8
_TRANSFORMED = "torch transforms what is called"
# Where nodes stand: the first of two dimensions, counted from either end.
_FIRST = (-2, 0)
# What `propagate` calls on the way, and an instance may have of its own; and what a reduction calls.
STEPS = frozenset(("message", "aggregate", "update", "edge_update", "message_and_aggregate"))
_REDUCTION = frozenset(("forward", "reduce"))


def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """What replaces `propagate` of an accelerated convolution."""
    if is_recorded():
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    if self._unknown.are(edge_index) or not _may_find(edge_index, kwargs):
        out: Tensor | str = find_why_unknown(self, edge_index)
    elif not is_plain(self, edge_index):
        out = find_why_not_plain(self)
    else:
        out = _aggregate(self, _find_message(self.__class__), edge_index, size, kwargs)
    if isinstance(out, str):
        self._paths.note_left(out)
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    self._paths.note()
    return out


def find_why_unknown(self: Any, edge_index: Any) -> str:
    """Why the order of edges is not known."""
    if not is_ordinary():
        return _TRANSFORMED
    if not is_plain_tensor(edge_index):
        return f"edges are a {type(edge_index).__name__} of another kind than a list"
    if getattr(self, "add_self_loops", False):
        return paths.OWN_LOOPS
    return paths.UNKNOWN if is_registered(edge_index) else paths.SMALL


def find_why_not_plain(self: Any) -> str:
    """Why PyG's code must do with messages what it does; the words of `is_plain`."""
    if not is_ordinary():
        return _TRANSFORMED
    return find_obstacle(self) or paths.ARGUMENTS


def find_obstacle(self: Any) -> str | None:
    """What of the set-up of a convolution leaves it to PyG, in the order of `is_set_up`; None where nothing does."""
    aggregation = self.aggr_module
    if type(aggregation) not in _REDUCES:
        return f"{type(aggregation).__name__} has no operator"
    if not aggregation.__dict__.keys().isdisjoint(_REDUCTION):
        return f"a program replaced a method of {type(aggregation).__name__}"
    if self.node_dim not in _FIRST:
        return f"nodes lie along dimension {self.node_dim}"
    if self.flow != "source_to_target":
        return f"messages flow {self.flow}"
    if self.explain:
        return "it is explained"
    if self.decomposed_layers != 1:
        return "its layers are decomposed"
    if not self.__dict__.keys().isdisjoint(STEPS) or not is_own(self.__class__):
        return "a program replaced one of its steps"
    return None if is_set_up(self) else "hooks look at its messages"


def _may_find(edge_index: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the edges may be known; those with weights only as a batch's."""
    if kwargs.get("edge_weight") is None and kwargs.get("alpha") is None:
        return may_find(edge_index, kwargs["x"])
    return is_plain_tensor(edge_index) and is_registered(edge_index)


def find_reduce(self: Any) -> str:
    """How an accelerated convolution reduces, in the words of `ops.aggregate.sum`."""
    return _REDUCES[type(self.aggr_module)]


def is_plain(self: Any, edge_index: Any) -> bool:
    """Whether nothing looks at the messages of these edges, and they flow as usual."""
    return is_ordinary() and isinstance(edge_index, Tensor) and is_set_up(self)


def is_set_up(self: Any) -> bool:
    """Whether a convolution sums messages of its own, which nothing looks at, over nodes along the first dimension."""
    aggregation = self.aggr_module
    return (
        type(aggregation) in _REDUCES
        and aggregation.__dict__.keys().isdisjoint(_REDUCTION)
        and self.node_dim in _FIRST
        and self.flow == "source_to_target"
        and not self.explain
        and self.decomposed_layers == 1
        # Also those that an instance was given since, as in the `__init__` of a subclass that runs unedited.
        and self.__dict__.keys().isdisjoint(STEPS)
        # And those that its class was given.
        and is_own(self.__class__)
        # Asked for several times a layer, so without a loop over their names.
        and not (
            self._propagate_forward_pre_hooks
            or self._propagate_forward_hooks
            or self._message_forward_pre_hooks
            or self._message_forward_hooks
            or self._aggregate_forward_pre_hooks
            or self._aggregate_forward_hooks
            or aggregation._forward_hooks
            or aggregation._forward_pre_hooks
        )
    )


def _aggregate(self: Any, make: Callable[..., Any], edge_index: Tensor, size: Any, kwargs: dict[str, Any]
               ) -> Tensor | str:  # fmt: skip
    """The result of `propagate`; the reason where PyG's own code must find it, or must refuse."""
    x = kwargs["x"]
    source, destination = x if isinstance(x, (tuple, list)) else (x, x)
    if not isinstance(source, Tensor) or source.dtype not in DTYPES:
        return paths.DTYPE
    num_sources = source.shape[0]
    num_targets = num_sources if destination is None else destination.shape[0]
    batch = find_batch(edge_index)
    if batch is None and (make is _copy_rows or (make is _weigh_rows and kwargs.get("edge_weight") is None)):
        batch = find_whole(edge_index, num_targets, source.shape[-1])
    if batch is None:
        return find_why_unfound(self, edge_index)
    edges = batch.view(edge_index)
    if (
        source.device != edge_index.device
        or num_sources < edges.least_sources
        or not edges.least_targets <= num_targets < edges.indptr.numel()
        or (size is not None and tuple(size) != (num_sources, num_targets))
    ):
        return paths.UNFIT
    reduce = find_reduce(self)
    if not (runs_on_gpu(source) or wins_on_cpu(source)):
        return paths.NARROW
    if make is _add_edge_rows:
        summed = _sum_messages(self, source, edges, num_targets, kwargs.get("edge_attr"))
        return paths.ARGUMENTS if summed is None else summed
    made = make(self, source, edges, kwargs)
    if made is None:
        return paths.ARGUMENTS
    rows, weight = made
    tracked = torch.is_grad_enabled() and rows.requires_grad
    if rows.dtype not in DTYPES:
        return paths.DTYPE
    if weight is not None and reduce in ("max", "min"):
        return f"{reduce} of rows with weights has no operator"
    transposed = None
    sorts = torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows) or isinstance(batch, WholeGraph)
    if sorts and tracked and reduce in ("sum", "mean"):
        transposed = batch.transpose(edges, num_sources)
    return aggregate(rows, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                     num_targets=num_targets, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip


def find_why_unfound(self: Any, edge_index: Tensor) -> str:
    """Why edges that may be known are not."""
    if is_registered(edge_index):
        return find_why_unknown(self, edge_index)
    return paths.NOT_YET


def wins_on_cpu(rows: Tensor) -> bool:
    """Whether the loops of a CPU are faster than torch's: not at narrow rows."""
    return rows.shape[1:].numel() >= _NARROW


def _sum_messages(self: Any, x: Tensor, edges: SortedEdges, num_targets: int, attribute: Any) -> Tensor | None:
    """What a GINEConv makes of rows of sources and of edges."""
    num_edges, matrix = edges.row.numel(), self.lin
    if (
        x.dim() != 2
        or not isinstance(attribute, Tensor)
        or attribute.dim() != 2
        or attribute.shape[0] != num_edges
        or attribute.device != x.device
        or (matrix is None and attribute.shape[1] != x.shape[1])
    ):
        return None
    edge_rows = attribute if matrix is None else matrix(attribute)
    x, edge_rows = promote(x, edge_rows)
    return sum_messages(x, edge_rows, edges.indptr, edges.row, edges.target, num_targets, reduce=find_reduce(self),
                        max_degree=edges.max_degree)  # fmt: skip


# What each class sends along an edge: (rows of nodes, weights of edges).
_Message = tuple[Tensor, Tensor | None] | None


def _copy_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    return (x, None) if x.dim() == 2 else None


def _weigh_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    weight = kwargs.get("edge_weight")
    if weight is None:
        return _copy_rows(self, x, edges, kwargs)
    if x.dim() != 2 or weight.numel() != edges.row.numel():
        return None
    return promote(x, weight.view(-1))


def _attend(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    alpha = kwargs["alpha"]
    if x.dim() != 3 or tuple(alpha.shape) != (edges.row.numel(), x.shape[1]):
        return None
    return promote(x, alpha)


def promote(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of their product."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def _add_edge_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> _Message:
    """Rows of edges are summed apart, see `_sum_messages`."""
    return None


MESSAGES: dict[type, Callable[..., _Message]] = {
    conv.SAGEConv: _copy_rows,
    conv.GINConv: _copy_rows,
    conv.GraphConv: _weigh_rows,
    conv.GCNConv: _weigh_rows,
    conv.GINEConv: _add_edge_rows,
    conv.GATConv: _attend,
    conv.GATv2Conv: _attend,
}


def _read_steps(kind: Any) -> tuple[Any, ...]:
    return kind.message, kind.aggregate, kind.update, kind.edge_update, kind.message_and_aggregate


# As PyG has them: programs may put others in their place.
_OWN_STEPS = {kind: _read_steps(kind) for kind in (*MESSAGES, conv.RGCNConv, conv.HGTConv)}


def is_own(kind: type) -> bool:
    """Whether a class, or one that is made of it, does with messages what PyG's class does."""
    return _read_steps(kind) == _find_steps(kind)


@functools.cache
def _find_steps(kind: type) -> tuple[Any, ...]:
    return next(steps for known, steps in _OWN_STEPS.items() if issubclass(kind, known))


@functools.cache
def _find_message(kind: type) -> Callable[..., _Message]:
    """What a class, or the one of PyG's that it is made of, sends along an edge."""
    return next(message for known, message in MESSAGES.items() if issubclass(kind, known))
