"""Overrides of `propagate` for accelerated convolutions: the accelerated operator if a batch allows it, otherwise PyG's
code.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pyg_direct.nn import any_convolution, paths
from pyg_direct.nn.any_convolution import is_routed
from pyg_direct.nn.conv.spec import ConvSpec, Message
from pyg_direct.nn.module_state import is_attached
from pyg_direct.nn.sorted_edges import SortedEdges, find_batch, is_plain_tensor, is_registered
from pyg_direct.nn.weighted_rows import REDUCES
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, may_find, wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, aggregate
from pyg_direct.ops.run_kernel import is_ordinary, is_recorded, runs_on_gpu

_TRANSFORMED = "torch transforms what is called"
# Dimension of nodes: the first of two, counted from either end.
_FIRST = (-2, 0)
# Methods that `propagate` calls, and that an instance may override; and methods that a reduction calls.
STEPS = frozenset(("message", "aggregate", "update", "edge_update", "message_and_aggregate"))
_REDUCTION = frozenset(("forward", "reduce"))


def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """Override `propagate` of an accelerated convolution."""
    if is_recorded():
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    if self._unknown.are(edge_index) or not _may_find(edge_index, kwargs):
        out: Tensor | str = find_why_unknown(self, edge_index)
    elif not is_plain(self, edge_index):
        out = find_why_not_plain(self)
    else:
        out = _aggregate(self, self._spec, edge_index, size, kwargs)
    if isinstance(out, str):
        if not reduces(self):
            return any_convolution.propagate(self, edge_index, size, **kwargs)  # type: ignore[no-any-return]
        self._paths.note_left(out)
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    self._paths.note()
    return out


def reduces(self: Any) -> bool:
    """Report whether the aggregation of a convolution is one of those known here; any other is PyG's own code."""
    return type(self.aggr_module) in REDUCES


def find_why_unknown(self: Any, edge_index: Any) -> str:
    """Return why the order of edges is not known."""
    if not is_ordinary():
        return _TRANSFORMED
    if not is_plain_tensor(edge_index):
        return f"edges are a {type(edge_index).__name__} of another kind than a list"
    if getattr(self, "add_self_loops", False):
        # Its options may be the reason why PyG's code adds the loops.
        return (self._spec.find_left(self) if reduces(self) else None) or paths.OWN_LOOPS
    return paths.UNKNOWN if is_registered(edge_index) else paths.SMALL


def has_own_reduction(aggregation: Any) -> bool:
    """Report whether an aggregation has the methods of its class, except those that find known targets."""
    own = aggregation.__dict__
    if own.keys().isdisjoint(_REDUCTION):
        return True
    return "forward" not in own and is_attached(aggregation, "reduce", any_convolution.reduce)


def has_own_steps(self: Any) -> bool:
    """Report whether an instance has the steps of its class, except those that find known targets."""
    own = self.__dict__
    return own.keys().isdisjoint(STEPS) or all(is_routed(own[name]) for name in STEPS & own.keys())


def find_why_not_plain(self: Any) -> str:
    """Return why PyG's code must process the messages; the reasons of `is_plain`."""
    if not is_ordinary():
        return _TRANSFORMED
    return find_obstacle(self) or paths.ARGUMENTS


def find_obstacle(self: Any) -> str | None:
    """Return the setting of a convolution that leaves it to PyG, in the order of `is_set_up`; None if there is none."""
    aggregation = self.aggr_module
    if type(aggregation) not in REDUCES:
        return f"{type(aggregation).__name__} has no operator"
    if not has_own_reduction(aggregation):
        return f"a program replaced a method of {type(aggregation).__name__}"
    if self.node_dim not in _FIRST:
        return f"nodes lie along dimension {self.node_dim}"
    if self.flow != "source_to_target":
        return f"messages flow {self.flow}"
    if self.explain:
        return "it is explained"
    if self.decomposed_layers != 1:
        return "its layers are decomposed"
    if not has_own_steps(self) or not self._spec.is_own(self.__class__):
        return "a program replaced one of its steps"
    return None if is_set_up(self) else "hooks look at its messages"


def _may_find(edge_index: Any, kwargs: dict[str, Any]) -> bool:
    """Report whether the edges may be known; edges with weights only in a batch."""
    if kwargs.get("edge_weight") is None and kwargs.get("alpha") is None:
        return may_find(edge_index, kwargs["x"])
    return is_plain_tensor(edge_index) and is_registered(edge_index)


def find_reduce(self: Any) -> str:
    """Return how an accelerated convolution reduces, in the words of `ops.aggregate.sum_rows`."""
    return REDUCES[type(self.aggr_module)]


def is_plain(self: Any, edge_index: Any) -> bool:
    """Report whether no hook reads the messages of these edges, and they flow as usual."""
    return is_ordinary() and isinstance(edge_index, Tensor) and is_set_up(self)


def is_set_up(self: Any) -> bool:
    """Report whether a convolution sums its own messages, without hooks on them, over nodes along the first
    dimension.
    """
    aggregation = self.aggr_module
    return type(aggregation) in REDUCES and has_own_reduction(aggregation) and has_plain_messages(self)


def has_plain_messages(self: Any) -> bool:
    """Report whether messages are those of the class, without hooks on them, over nodes along the first dimension."""
    aggregation = self.aggr_module
    return (
        self.node_dim in _FIRST
        and self.flow == "source_to_target"
        and not self.explain
        and self.decomposed_layers == 1
        # Also those that an instance was given since, as in the `__init__` of a subclass that runs unedited.
        and has_own_steps(self)
        # And those that its class was given.
        and self._spec.is_own(self.__class__)
        # Called several times a layer, so without a loop over their names.
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


def _aggregate(self: Any, spec: ConvSpec, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
               ) -> Tensor | str:  # fmt: skip
    """Return the result of `propagate`, or the reason why PyG's own code must compute or refuse it."""
    x = kwargs["x"]
    source, destination = x if isinstance(x, (tuple, list)) else (x, x)
    if not isinstance(source, Tensor) or source.dtype not in DTYPES:
        return paths.DTYPE
    num_sources = source.shape[0]
    num_targets = num_sources if destination is None else destination.shape[0]
    batch = find_batch(edge_index)
    if batch is None and spec.message in (copy_rows, weigh_rows) and kwargs.get("edge_weight") is None:
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
    if spec.sum is not None:
        summed = spec.sum(self, source, edges, num_targets, kwargs)
        return paths.ARGUMENTS if summed is None else summed
    assert spec.message is not None, "a convolution that is dispatched has messages"
    made = spec.message(self, source, edges, kwargs)
    if made is None:
        return paths.ARGUMENTS
    rows, weight = made
    tracked = torch.is_grad_enabled() and rows.requires_grad
    if rows.dtype not in DTYPES:
        return paths.DTYPE
    if weight is not None and reduce in ("max", "min"):
        return paths.NO_WEIGHTS.format(reduce)
    transposed = None
    sorts = torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows) or isinstance(batch, WholeGraph)
    if sorts and tracked and reduce in ("sum", "mean"):
        transposed = batch.transpose(edges, num_sources)
    return aggregate(rows, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                     num_targets=num_targets, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip


def find_why_unfound(self: Any, edge_index: Tensor) -> str:
    """Return why edges that may be known are not."""
    if is_registered(edge_index):
        return find_why_unknown(self, edge_index)
    return paths.NOT_YET


def copy_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> Message:
    """Return messages that are rows of sources."""
    return (x, None) if x.dim() == 2 else None


def weigh_rows(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> Message:
    """Return messages that are rows of sources, times the weights of edges if these are given."""
    weight = kwargs.get("edge_weight")
    if weight is None:
        return copy_rows(self, x, edges, kwargs)
    if x.dim() != 2 or weight.numel() != edges.row.numel():
        return None
    return promote(x, weight.view(-1))


def promote(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the dtype of their product."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def find_narrow(module: Any, width: int | None) -> str | None:
    """Return why rows of a width leave a convolution to PyG on a CPU; an unknown width counts as wide."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    if tensor is None or runs_on_gpu(tensor) or width is None or width <= 0 or wins_on_cpu(tensor.new_empty(0, width)):
        return None
    return paths.NARROW


def find_narrow_first(module: Any) -> str | None:
    """Compute `find_narrow` for the width that the first matrix of SAGEConv, GraphConv, GINConv or GINEConv takes."""
    first = getattr(module, "lin_l", getattr(module, "lin_rel", None))
    parts = [first] if first is not None else module.nn.modules() if isinstance(module.nn, torch.nn.Module) else []
    for part in parts:
        width = getattr(part, "in_channels", getattr(part, "in_features", None))
        if isinstance(width, int):
            return find_narrow(module, width)
    return None


def find_replaced(module: Any) -> str | None:
    """Return why a convolution that only overrides `forward` is left to PyG, although its edges are known to be
    sorted.
    """
    return None if is_attached(module, "forward", module._spec.forward) else "a program replaced its forward"
