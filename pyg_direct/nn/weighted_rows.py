"""Layers whose message is the row of the source, or a weight times this row: summed without a row for each edge.

Many of PyG's layers have this message (TAGConv, SGConv, APPNP, LGConv, ChebConv, GatedGraphConv, SignedConv, ...), and
so have layers of programs. It is recognized by its code, which must equal the code of one of `_MESSAGES`.
"""

from __future__ import annotations

import functools
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing

from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges
from pyg_direct.ops.aggregate.sum_rows import DTYPES, aggregate
from pyg_direct.ops.run_kernel import is_heard

if TYPE_CHECKING:
    from pyg_direct.nn.any_convolution import KnownTargets

# Reductions that operators take, by PyG's aggregations.
REDUCES = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
}
# Steps of a layer that an instance may override, and hooks that read what they compute.
_STEPS = frozenset(("message", "aggregate", "update", "message_and_aggregate"))
_HOOKS = tuple(f"_{step}_forward{before}_hooks" for before in ("", "_pre")
               for step in ("propagate", "message", "aggregate"))  # fmt: skip

_HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Their first argument is the row, unless they are listed as the other way round.
def _copy(self: Any, x_j: Any) -> Any:
    return x_j


def _weigh(self: Any, x_j: Any, w: Any) -> Any:
    return w.view(-1, 1) * x_j


def _weigh_late(self: Any, x_j: Any, w: Any) -> Any:
    return x_j * w.view(-1, 1)


def _weigh_if_given(self: Any, x_j: Any, w: Any) -> Any:
    return x_j if w is None else w.view(-1, 1) * x_j


def _weigh_weight_first(self: Any, w: Any, x_j: Any) -> Any:
    return w.view(-1, 1) * x_j


def _weigh_late_weight_first(self: Any, w: Any, x_j: Any) -> Any:
    return x_j * w.view(-1, 1)


def _weigh_if_given_weight_first(self: Any, w: Any, x_j: Any) -> Any:
    return x_j if w is None else w.view(-1, 1) * x_j


_MESSAGES = (_copy, _weigh, _weigh_late, _weigh_if_given, _weigh_weight_first, _weigh_late_weight_first,
             _weigh_if_given_weight_first)  # fmt: skip


class Weighted(NamedTuple):
    """Arguments of `propagate` that a message reads.

    Attributes:
        rows, weight: Their names; None without a weight.
        may_lack: True if the weight may be None.
    """

    rows: str
    weight: str | None
    may_lack: bool


def _read(code: CodeType) -> tuple[Any, ...]:
    # The first constant is the docstring, or None.
    return code.co_code, code.co_names, code.co_consts[1:], code.co_argcount, code.co_kwonlyargcount


_KNOWN = {_read(message.__code__): message for message in _MESSAGES}


@functools.cache
def read_message(message: Any) -> Weighted | None:
    """Return what a message reads; None if it is none of `_MESSAGES`."""
    if not isinstance(message, FunctionType) or message.__code__.co_freevars or message.__code__.co_flags & _VARIABLE:
        return None
    known = _KNOWN.get(_read(message.__code__))
    if known is None:
        return None
    names = dict(zip(known.__code__.co_varnames, message.__code__.co_varnames, strict=False))
    rows, weight = names["x_j"], names.get("w")
    if not rows.endswith("_j") or (weight is not None and weight[-2:] in ("_i", "_j")):
        return None
    # PyG gives these names, whatever the program gives; a default may stand for what it does not give.
    if weight in _GIVEN_BY_PYG or message.__defaults__ not in (None, (None,)):
        return None
    return Weighted(rows[:-2], weight, known in (_copy, _weigh_if_given, _weigh_if_given_weight_first))


_GIVEN_BY_PYG = frozenset(("index", "ptr", "edge_index", "dim_size", "size", "adj_t"))


# Flags of code with *args or **kwargs.
_VARIABLE = 0x04 | 0x08


def find_weighted(self: Any) -> Weighted | None:
    """Return what the messages of a layer read, if they are plainly reduced, without hooks; None otherwise."""
    kind, aggregation = type(self), self.aggr_module
    if (
        kind.aggregate is not MessagePassing.aggregate
        or kind.update is not MessagePassing.update
        or type(aggregation) not in REDUCES
        or kind._index_select is not MessagePassing._index_select
        or "forward" in aggregation.__dict__
        or not _STEPS.isdisjoint(self.__dict__)
        or any(getattr(self, name) for name in _HOOKS)
        or any(getattr(aggregation, name) for name in _HOOKS_OF_MODULES)
        or self.node_dim not in (-2, 0)
        or self.decomposed_layers != 1
    ):
        return None
    return read_message(kind.message)


def sum_weighted(self: Any, batch: SortedBatch, edges: SortedEdges, order: Tensor | None, size: Any,
                 kwargs: dict[str, Any]) -> Tensor | None:  # fmt: skip
    """Return the result of `propagate` over known edges; None if PyG's code must make it.

    Args:
        order: Positions of the edges among the given ones, `[E]`; None if they are in order.
        size, kwargs: Arguments of `propagate`.
    """
    read = find_weighted(self)
    if read is None:
        return None
    given: Any = kwargs.get(read.rows)
    rows: Any
    targets: Any
    rows, targets = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, given)
    if type(rows) not in (Tensor, torch.nn.Parameter) or rows.dim() not in (2, 3):
        return None
    stacks = 0
    if rows.dim() == 3:
        # Stacks of rows, `[K, N, F]`, as in ARMAConv, become one row for each node.
        if self.node_dim != -2 or targets is not rows or rows.numel() == 0:
            return None
        stacks = rows.shape[0]
        rows = targets = rows.transpose(0, 1).flatten(1)
    num_sources, num_targets = rows.shape[0], rows.shape[0] if targets is None else targets.shape[0]
    if isinstance(size, (tuple, list)) and len(size) == 2 and targets is None:
        num_targets = size[1]
    weight, reduce = None if read.weight is None else kwargs.get(read.weight), REDUCES[type(self.aggr_module)]
    if weight is None and not read.may_lack:
        return None
    if (
        rows.dtype not in DTYPES
        or rows.device != edges.row.device
        or num_targets is None
        or num_sources < edges.least_sources
        or not edges.least_targets <= num_targets < edges.indptr.numel()
        or (size is not None and tuple(size) not in ((num_sources, num_targets), (None, None)))
    ):
        return None
    if weight is not None:
        if not isinstance(weight, Tensor) or weight.numel() != edges.row.numel() or reduce in ("max", "min"):
            return None
        dtype = torch.promote_types(rows.dtype, weight.dtype)
        if dtype not in DTYPES:
            return None
        weight, rows = weight.reshape(-1).to(dtype), rows.to(dtype)
        weight = weight if order is None else weight.index_select(0, order)
    transposed = None
    if torch.is_grad_enabled() and rows.requires_grad and reduce in ("sum", "mean"):
        transposed = batch.transpose(edges, num_sources)
    made: Tensor = aggregate(rows, edges.indptr, edges.row, reduce=reduce, weight=weight, target=edges.target,
                             num_targets=num_targets, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip
    return made if stacks == 0 else made.view(num_targets, stacks, rows.shape[1] // stacks).transpose(0, 1)


def fuse(self: Any, known: KnownTargets, size: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of `propagate` as the `ConvSpec` of a layer computes it, or as `sum_weighted` does; None if the
    layer's own messages must be aggregated.
    """
    if not is_fused(self):
        return sum_weighted(self, known.batch, known.edges, known.order, size, kwargs)
    # Modes see only torch's operators.
    if size is not None or is_heard(known.index):
        return None
    return self._spec.fuse(self, known, kwargs)  # type: ignore[no-any-return]


def is_fused(self: Any) -> bool:
    """Report whether the `ConvSpec` of a layer computes the result of `propagate`, in its present state."""
    spec = self.__dict__.get("_spec")
    return spec is not None and spec.fuse is not None and spec.find_left(self) is None
