"""Any `MessagePassing` over edges of known order: PyG's own `propagate`, whose reductions go through offsets.

A layer that has no `ConvSpec` keeps all of its code. While its `propagate` or `edge_updater` runs, the targets of the
edges are known to the thread (`know`). Three steps then use them: `reduce` of its aggregations, PyG's `softmax` and
`scatter` that its methods call, and its gathers of rows. Each falls back to PyG's code if the index is another.

Methods that name PyG's functions are called with other globals. This dictionary replaces `softmax` and `scatter`, and
has the module's own names otherwise. PyG's modules and the program's stay unchanged.

A reduction asks `find` with its index: only the very memory of these targets is recognized. Rows stay in the given
order of the edges. If the edges of a whole graph are in another order, `order` leads to them.

On a CPU a reduction is accelerated only if it was measured to be faster. The table shows PyG's time divided by this
module's, forward and backward, on one core. There were 12,000 to 200,000 edges of 2,000 to 30,000 targets, and rows of
1 to 128 numbers.

| reduction | PyG / accelerated | accelerated for |
| --- | --- | --- |
| max, min | 1.2 to 17 | always |
| mul | 1.9 to 4.5 | always |
| softmax | 1.03 to 5.6 | always |
| mean | 1.02 to 1.8 | 64 numbers or fewer; 0.9 to 1.1 for 128 |
| sum | 1.1 to 1.9 | 8 to 32 numbers, 2**18 in all; 0.9 to 1.1 for others |
"""

from __future__ import annotations

import dis
import functools
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import scatter as pyg_scatter, softmax as pyg_softmax

from pyg_direct.nn import paths
from pyg_direct.nn.module_state import attach, copy_plain, detach, is_attached
from pyg_direct.nn.sorted_edges import SortedBatch, find_batch, is_plain_tensor
from pyg_direct.nn.weighted_rows import fuse, is_fused
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, may_find
from pyg_direct.ops.aggregate import operators
from pyg_direct.ops.aggregate.compute_softmax import softmax as fused_softmax
from pyg_direct.ops.aggregate.sum_rows import DTYPES
from pyg_direct.ops.run_kernel import is_asked_again, is_heard, is_ordinary, is_recorded, pull_by_torch, runs_on_gpu

# For sums on a CPU: least and most numbers in a row, and least numbers in all. For means: most numbers in a row.
_NARROWEST, _WIDEST, _LEAST = 8, 32, 1 << 18
_WIDEST_MEAN = 64
# Numbers of an edge up to which a GPU takes one kernel for their softmax, whose threads read them one by one.
_MOST_HEADS = 8
_NAMES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min", "mul": "mul"}


class KnownTargets:
    """Targets of the edges of a layer, in a known order.

    Attributes:
        index: Target of each edge, `[E]`, as layers receive it.
        source: Source of each edge, `[E]`.
        batch: The known edges, in the order of the offsets.
        indptr: Offsets of the targets, which may be longer.
        order: Positions of the edges by target, `[E]`; None if they are in order.
        max_degree: Upper bound of the edges of a target, -1 if it is not known.
        reason: Why a reduction was left to PyG, if one was.
    """

    __slots__ = ("_version", "batch", "edges", "index", "indptr", "least_targets", "max_degree", "order", "reason",
                 "served", "source")  # fmt: skip

    def __init__(self, batch: SortedBatch, edge_index: Tensor) -> None:
        self.batch, self.edges = batch, batch.view(edge_index)
        self.source, self.index = edge_index.unbind(0)
        self.indptr, self.least_targets = self.edges.indptr, self.edges.least_targets
        self.order = batch.order if isinstance(batch, WholeGraph) else None
        self.max_degree = -1 if self.edges.max_degree is None else self.edges.max_degree
        self._version = edge_index._version
        self.served = 0
        self.reason: str | None = None

    def is_index(self, index: Any) -> bool:
        """Report whether these are the targets, without a write since."""
        return _is_same(index, self.index) and index._version == self._version

    def is_source(self, index: Any) -> bool:
        """Report whether these are the sources, without a write since."""
        return _is_same(index, self.source) and index._version == self._version

    def offsets(self, num_targets: int) -> Tensor:
        """Return offsets of so many targets, none of which lies beyond the edges."""
        return self.indptr[: num_targets + 1].clamp(max=self.index.numel())

    def fits(self, num_sources: int, num_targets: int) -> bool:
        """Report whether the edges lie among so many nodes."""
        edges = self.edges
        return edges.least_sources <= num_sources and edges.least_targets <= num_targets < self.indptr.numel()

    def count_edges(self) -> Tensor:
        """Return the number of each edge, `[E]`."""
        index = self.index
        made: Tensor = self.batch.remember(
            ("numbers", index.numel()), lambda: torch.arange(index.numel(), dtype=index.dtype, device=index.device)
        )
        return made

    def gather_sources(self, rows: Tensor) -> Tensor:
        """Return the row of the source of each edge, as `gather` does, `[E, F]`."""
        with know(self):
            made = gather(rows, self.source)
        return rows.index_select(0, self.source) if made is None else made

    def scale(self, num_targets: int, like: Tensor) -> Tensor:
        """Return one over the number of edges of each target, one for none, `[T, 1]`."""
        dtype = torch.promote_types(like.dtype, torch.float32)

        def make() -> Tensor:
            return self.offsets(num_targets).diff().clamp_(min=1).to(dtype).reciprocal_().unsqueeze(1)

        made: Tensor = self.batch.remember(("one over degrees", self.index.numel(), num_targets, dtype), make)
        return made


def _is_same(index: Any, known: Tensor) -> bool:
    return (
        type(index) is Tensor
        and index.dim() == 1
        and index.numel() == known.numel()
        and index.dtype == known.dtype
        and index.device == known.device
        and index.data_ptr() == known.data_ptr()
        and index.stride() == known.stride()
    )


class _Thread(threading.local):
    known: KnownTargets | None = None


_THREAD = _Thread()


@contextmanager
def know(known: KnownTargets) -> Iterator[None]:
    """Let reductions of this thread find these targets."""
    before = _THREAD.known
    _THREAD.known = known
    try:
        yield
    finally:
        _THREAD.known = before


def is_known() -> bool:
    """Report whether this thread knows any targets."""
    return _THREAD.known is not None


def find(index: Any, rows: Any, dim: int, num_targets: int | None) -> KnownTargets | None:
    """Return the known targets for an index, if rows of them may be reduced; None if PyG's code must reduce."""
    known = _THREAD.known
    if (
        known is None
        or not isinstance(rows, Tensor)
        or not -rows.dim() <= dim < rows.dim()
        or rows.shape[dim] != known.index.numel()
        or rows.numel() == 0
        or num_targets is None
        or not known.is_index(index)
        or rows.device != index.device
        or is_heard(rows)
        or not known.least_targets <= num_targets < known.indptr.numel()
    ):
        return None
    if rows.dtype not in DTYPES or type(rows) not in (Tensor, torch.nn.Parameter):
        known.reason = "messages are of a dtype that has no operator"
        return None
    return known


def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """Reduce rows as `torch_geometric.utils.scatter` does, through the offsets of known targets.

    Args:
        src: Rows, `[E, ...]`.
        index: Target of each, `[E]`.
        reduce: See PyG.
    """
    made = reduce_known(src, index, dim, dim_size, reduce)
    return pyg_scatter(src, index, dim, dim_size, reduce) if made is None else made


def reduce_known(src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str) -> Tensor | None:
    """Compute `scatter` over known targets; None for all others."""
    known = find(index, src, dim, dim_size)
    if known is None or dim_size is None:
        return None
    name = _NAMES.get(reduce)
    reason = f"{reduce} has no operator" if name is None else _find_slow(src, dim, name)
    if name is None or reason is not None:
        known.reason = reason
        return None
    known.served += 1
    flat, rest = _flatten(src, dim)
    made: Tensor = _Reduce.apply(flat, known, dim_size, name)
    return _unflatten(made, rest, dim, src.dim())


def _flatten(rows: Tensor, dim: int) -> tuple[Tensor, torch.Size]:
    """Return rows of edges, which lie along a dimension, as `[E, F]`, and the sizes of the other dimensions."""
    first = rows if dim in (0, -rows.dim()) else rows.movedim(dim, 0)
    return first.reshape(first.shape[0], first.shape[1:].numel()), first.shape[1:]


def _unflatten(flat: Tensor, rest: torch.Size, dim: int, dims: int) -> Tensor:
    made = flat.reshape(flat.shape[0], *rest)
    return made if dim in (0, -dims) else made.movedim(0, dim)


def _find_slow(src: Tensor, dim: int, name: str) -> str | None:
    """Return why a reduction of these rows is as fast in PyG; None if it is not."""
    width = src.numel() // src.shape[dim]
    if runs_on_gpu(src) or name in ("max", "min", "mul") or _sums_on_cpu(src.shape[dim], width):
        return None
    if name == "mean" and width <= _WIDEST_MEAN:
        return None
    return f"the {name} of messages is as fast in PyG on a CPU"


def _sums_on_cpu(num_edges: int, width: int) -> bool:
    return _NARROWEST <= width <= _WIDEST and num_edges * width >= _LEAST


class _Reduce(Function):
    """A reduction of rows of edges, `[E, F]` to `[T, F]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, known: KnownTargets, num_targets: int, name: str) -> Tensor:
        ctx.known, ctx.num_targets, ctx.name, ctx.dtype = known, num_targets, name, rows.dtype
        if name in ("max", "min"):
            out = operators.extreme_rows(rows, known.indptr, known.order, num_targets, name == "max", known.max_degree)
            ctx.save_for_backward(rows, out, known.index)
        elif name == "mul":
            ordered = rows if known.order is None else rows.index_select(0, known.order)
            out = torch.segment_reduce(ordered, "prod", offsets=known.offsets(num_targets), axis=0, initial=1.0,
                                       unsafe=True)  # fmt: skip
            ctx.save_for_backward(rows, out, known.index)
        else:
            out = _sum(rows, known, num_targets, name == "mean")
            ctx.save_for_backward(known.index)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        known, num_targets, name = ctx.known, ctx.num_targets, ctx.name
        *saved, index = ctx.saved_tensors
        if name in ("sum", "mean"):
            # By functions that torch can differentiate again.
            if name == "mean":
                grad = (grad * known.scale(num_targets, grad)).to(ctx.dtype)
            return _spread(grad, index), None, None, None
        rows, out = saved
        if is_asked_again([grad]):
            return pull_by_torch(lambda given: [pyg_scatter(given, index, 0, num_targets, name)], [rows], [True],
                                 [grad])[0], None, None, None  # fmt: skip
        if name == "mul":
            return _pull_product(grad, rows, out, known, num_targets), None, None, None
        return _pull_extreme(grad, rows, out, known, num_targets), None, None, None


def _spread(rows: Tensor, index: Tensor) -> Tensor:
    """Copy rows of targets `[T, F]` to each edge; `index_select` takes a CPU three times as long."""
    if runs_on_gpu(rows):
        return rows.index_select(0, index)
    return rows.gather(0, index.view(-1, 1).expand(-1, rows.shape[1]).long())


def _sum(rows: Tensor, known: KnownTargets, num_targets: int, mean: bool) -> Tensor:
    if runs_on_gpu(rows) or _sums_on_cpu(*rows.shape):
        made: Tensor = operators.sum_rows(rows, known.indptr, known.order, None, num_targets, mean, known.max_degree)
        return made
    # By the same calls as PyG, which are the fastest there.
    added = rows.new_zeros(num_targets, rows.shape[1])
    added.scatter_add_(0, known.index.view(-1, 1).expand_as(rows), rows)
    return added.mul_(known.scale(num_targets, added)) if mean else added


def _pull_extreme(grad: Tensor, rows: Tensor, out: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
    """Return the gradient of a maximum, shared among equals; a maximum of zero has one more equal, as in torch."""
    # No two edges write to one row, so the order of additions is irrelevant.
    made: Tensor = operators.spread_extremes(grad.contiguous(), rows, out, known.indptr, known.order, False,
                                             known.max_degree)  # fmt: skip
    return made


def _pull_product(grad: Tensor, rows: Tensor, out: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
    """Return the gradient of a product: the product of the others times the gradient."""
    order, offsets = known.order, known.offsets(num_targets)
    ordered = rows if order is None else rows.index_select(0, order)
    with torch.enable_grad():
        given = ordered.detach().requires_grad_()
        again = torch.segment_reduce(given, "prod", offsets=offsets, axis=0, initial=1.0, unsafe=True)
        (made,) = torch.autograd.grad(again, given, grad)
    return made if order is None else torch.empty_like(made).index_copy_(0, order, made)


def softmax(src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None,
            dim: int = 0) -> Tensor:  # fmt: skip
    """Compute softmax as `torch_geometric.utils.softmax` does, through the offsets of known targets.

    Args:
        src: Scores, `[E, ...]`.
        index: Target of each, `[E]`.
        ptr, num_nodes, dim: See PyG.
    """
    # Under autocast PyG's result has another dtype.
    is_cast = src.dtype != torch.float32 and torch.is_autocast_enabled(src.device.type)
    known = None if ptr is not None or is_cast else find(index, src, dim, num_nodes)
    if known is None or num_nodes is None:
        return pyg_softmax(src, index, ptr, num_nodes, dim)
    known.served += 1
    flat, rest = _flatten(src, dim)
    is_fused = runs_on_gpu(flat) and flat.shape[1] <= _MOST_HEADS and flat.dtype in (torch.float32, torch.float64)
    made: Tensor = _attend(flat, known, num_nodes) if is_fused else _Softmax.apply(flat, known, num_nodes)
    return _unflatten(made, rest, dim, src.dim())


def _attend(scores: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
    """Compute softmax of scores `[E, H]` of few heads by one kernel, in the order of offsets."""
    order, degree = known.order, known.edges.max_degree
    ordered = scores if order is None else scores.index_select(0, order)
    made = fused_softmax(None, None, ordered, known.indptr, known.edges.row, num_targets=num_targets, max_degree=degree)
    return made if order is None else torch.empty_like(made).index_copy(0, order, made)


class _Softmax(Function):
    """Softmax of scores `[E, F]` over the edges of each target."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
        index = known.index
        work = scores.to(torch.promote_types(scores.dtype, torch.float32))
        top = _find_top(work, known, num_targets)
        out = (work - _spread(top, index)).exp_()
        out.div_(_spread(_add_up(out, known, num_targets).add_(1e-16), index))
        out = out.to(scores.dtype)
        ctx.known, ctx.num_targets = known, num_targets
        ctx.save_for_backward(scores, out, index)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, out, index = ctx.saved_tensors
        known, num_targets = ctx.known, ctx.num_targets
        if is_asked_again([grad]):
            return pull_by_torch(lambda given: [pyg_softmax(given, index, None, num_targets)], [scores], [True],
                                 [grad])[0], None, None  # fmt: skip
        work = torch.promote_types(out.dtype, torch.float32)
        alpha, shares = out.to(work), grad.to(work) * out
        total = _add_up(shares, known, num_targets)
        return shares.addcmul_(alpha, _spread(total, index), value=-1).to(out.dtype), None, None


def _find_top(rows: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
    """Return maxima of rows `[E, F]` of each target."""
    made: Tensor = operators.extreme_rows(rows, known.indptr, known.order, num_targets, True, known.max_degree)
    return made


def _add_up(rows: Tensor, known: KnownTargets, num_targets: int) -> Tensor:
    return _sum(rows, known, num_targets, False)


def gather(src: Tensor, index: Tensor) -> Tensor | None:
    """Gather rows of `src` `[N, ...]` for each edge, if `index` are the ends of known edges.

    Their gradients are added up in the order of edges, so that equal steps give equal bits on a GPU too.

    Returns:
        `[E, ...]`; None if PyG's code must gather.
    """
    known = _THREAD.known
    if (
        known is None
        or not runs_on_gpu(src)
        or not (src.requires_grad and torch.is_grad_enabled())
        or src.dtype not in DTYPES
        or type(src) not in (Tensor, torch.nn.Parameter)
        or src.dim() == 0
        or src.numel() == 0
        or src.device != known.index.device
        or is_heard(src)
    ):
        return None
    if known.is_index(index):
        if not known.least_targets <= src.shape[0] < known.indptr.numel():
            return None
        by_source = False
    elif known.is_source(index) and known.edges.least_sources <= src.shape[0]:
        by_source = True
    else:
        return None
    flat = src.reshape(src.shape[0], src.shape[1:].numel())
    made: Tensor = _Gather.apply(flat, index, known, by_source)
    return made.reshape(index.numel(), *src.shape[1:])


class _Gather(Function):
    """Rows of one end of each edge, `[N, F]` to `[E, F]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, known: KnownTargets, by_source: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.known, ctx.by_source, ctx.num_rows = known, by_source, rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        known, num_rows = ctx.known, ctx.num_rows
        if is_asked_again([grad]):
            return grad.new_zeros(num_rows, grad.shape[1]).index_add(0, index, grad), None, None, None
        grad = grad.contiguous()
        if not ctx.by_source:
            return _sum_all(grad, known, num_rows), None, None, None
        transposed = known.batch.transpose(known.edges, num_rows)
        # Positions among the sorted edges, which lead to the given order.
        edge = transposed.edge if known.order is None else known.order.index_select(0, transposed.edge)
        return operators.sum_rows(grad, transposed.indptr, edge, None, num_rows, False, -1), None, None, None


def _sum_all(grad: Tensor, known: KnownTargets, num_rows: int) -> Tensor:
    made: Tensor = operators.sum_rows(grad, known.indptr, known.order, None, num_rows, False, known.max_degree)
    return made


# Aggregations that reduce only by `reduce`, `scatter` or `softmax`.
_REDUCTIONS = (
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.MulAggregation,
    aggr.VarAggregation,
    aggr.StdAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
)
# Aggregations that hold others.
_HOLDERS = (aggr.MultiAggregation, aggr.DegreeScalerAggregation, FusedAggregation)
# Entry points of a layer, outside of which the targets of its edges are not known.
_OUTSIDE = ("forward", "propagate", "edge_updater", "reset_parameters")
# On a CPU a layer gains only by these, and only from so many edges on. Over 12,000 to 100,000 edges EdgeConv, PNAConv,
# GENConv and products are 1.0 to 2.5 times as fast. Sums, means, deviations and softmax of heads are 0.85 to 1.3 times
# as fast, which is no gain.
_GAIN_ON_CPU = (aggr.MaxAggregation, aggr.MinAggregation, aggr.MulAggregation, aggr.SoftmaxAggregation)
_FEW_EDGES = 1 << 13
_TOO_FEW = "so few edges take PyG no longer on a CPU"
_AS_FAST = "sums, means and softmax of messages are as fast in PyG on a CPU"
_REDUCE, _INDEX_SELECT = aggr.Aggregation.reduce, MessagePassing._index_select
_OURS = {id(pyg_softmax): softmax, id(pyg_scatter): scatter}


class _Globals(dict):  # type: ignore[type-arg]
    """Names of a module for a step: accelerated functions for some, otherwise the module's present names."""

    def __init__(self, names: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(names)
        self._own = own

    def __missing__(self, name: str) -> Any:
        return self._own[name]


@functools.cache
def route(step: FunctionType) -> FunctionType | None:
    """Return a method that calls accelerated functions for PyG's `softmax` or `scatter`; None if it names neither."""
    own = step.__globals__
    names = {name: _OURS[id(own[name])] for name in step.__code__.co_names if id(own.get(name)) in _OURS}
    # A step's writes to its module must reach it.
    if not names or any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in dis.get_instructions(step)):
        return None
    names["__builtins__"] = own.get("__builtins__", __builtins__)
    made = FunctionType(step.__code__, _Globals(names, own), step.__name__, step.__defaults__, step.__closure__)
    made.__kwdefaults__ = step.__kwdefaults__

    @functools.wraps(step)
    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_recorded() or not is_known():
            return getattr(type(self), step.__name__)(self, *args, **kwargs)
        return made(self, *args, **kwargs)

    _ROUTED.add(routed)
    return routed  # type: ignore[return-value]


# Methods that `route` made.
_ROUTED: set[Any] = set()


def is_routed(step: Any) -> bool:
    """Report whether a method of an instance is a routed step of its class."""
    return getattr(step, "__func__", None) in _ROUTED


@functools.cache
def list_routed(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class that name PyG's `softmax` or `scatter`, routed."""
    found: dict[str, FunctionType] = {}
    own: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(MessagePassing)]):
        own.update(vars(base))
    for name, method in own.items():
        if isinstance(method, FunctionType) and name not in _OUTSIDE and not name.startswith("__"):
            step = route(method)
            found.update({} if step is None else {name: step})
    return found


def accelerate_any(module: MessagePassing) -> None:
    """Let a layer find the targets of its edges while its `propagate` runs.

    Args:
        module: It is changed in place.
    """
    kind: Any = type(module)
    own = module.__dict__
    attach(module, **{name: step for name, step in list_routed(kind).items() if name not in own})
    if kind.edge_updater is not MessagePassing.edge_updater and "edge_updater" not in own:
        attach(module, edge_updater=edge_updater)
    if kind._index_select is _INDEX_SELECT and "_index_select" not in own:
        attach(module, _index_select=_index_select)


def watch_aggregation(module: MessagePassing) -> None:
    """Let the aggregation of a layer, and its parts, find known targets."""
    for part in [] if module.aggr_module is None else module.aggr_module.modules():
        _watch(part)


def _watch(part: Any) -> None:
    if not isinstance(part, (*_REDUCTIONS, *_HOLDERS)) or "reduce" in part.__dict__ or "forward" in part.__dict__:
        return
    kind: Any = type(part)
    if kind.reduce is _REDUCE:
        step = route(kind.forward)
        attach(part, reduce=reduce, __prepare_scriptable__=copy_plain, **({} if step is None else {"forward": step}))


def is_reduced(part: Any) -> bool:
    """Report whether `watch_aggregation` changed a part of an aggregation, and nothing since."""
    return is_attached(part, "reduce", reduce)


def forget_any(module: Module) -> None:
    """Undo `accelerate_any`, for a layer or a part of its aggregation."""
    for name in [name for name, value in module.__dict__.items() if is_routed(value)]:
        detach(module, name)
    for name, ours in (("edge_updater", edge_updater), ("_index_select", _index_select), ("reduce", reduce)):
        if is_attached(module, name, ours):
            detach(module, name)
    if isinstance(module, aggr.Aggregation):
        detach(module, "__prepare_scriptable__")


def find_left(module: Any) -> str | None:
    """Return why all calls of a layer in its present state are left to PyG; None if they are not."""
    if module.flow != "source_to_target":
        return f"messages flow {module.flow}"
    if module.explain:
        return "it is explained"
    if getattr(module, "add_self_loops", False):
        return paths.OWN_LOOPS
    if not _has_routed(module):
        if module.aggr_module is None:
            return "it has no aggregation"
        if not any(is_attached(part, "reduce", reduce) for part in module.aggr_module.modules()):
            return f"{type(module.aggr_module).__name__} has no operator"
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    on_gpu = runs_on_gpu(torch.empty(0, device="cpu") if tensor is None else tensor)
    return None if on_gpu or gains_on_cpu(module) else _AS_FAST


def _has_routed(module: Any) -> bool:
    own, kind = module.__dict__, type(module)
    return any(is_routed(own.get(name)) for name in list_routed(kind))  # type: ignore[arg-type]


def propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    """Override `propagate` of a layer that has no `ConvSpec`."""
    plain = type(self).propagate
    if is_recorded():
        return plain(self, edge_index, size=size, **kwargs)
    known = _TOO_FEW if is_short(edge_index) else find_known(self, edge_index, size, kwargs)
    if isinstance(known, str):
        self._paths.note_left(known)
        return plain(self, edge_index, size=size, **kwargs)
    # A program may have set the sum of its aggregation.
    own = "reduce" in self.aggr_module.__dict__ and not is_reduced(self.aggr_module) if self.aggr_module else False
    out = None if own else fuse(self, known, size, kwargs)
    if out is not None:
        self._paths.note()
        return out
    with know(known):
        out = plain(self, edge_index, size=size, **kwargs)
    if known.served:
        self._paths.note()
    else:
        self._paths.note_left(known.reason or find_left(self) or "its reductions have no operator")
    return out


def edge_updater(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    """Override `edge_updater` of an accelerated layer, whose call is counted when it propagates."""
    plain = type(self).edge_updater
    known = "" if is_recorded() or is_short(edge_index) else find_known(self, edge_index, size, kwargs)
    if isinstance(known, str):
        return plain(self, edge_index, size=size, **kwargs)
    with know(known):
        return plain(self, edge_index, size=size, **kwargs)


def is_short(edge_index: Any) -> bool:
    """Report whether a CPU would only lose time over these edges."""
    return type(edge_index) is Tensor and edge_index.shape[-1] < _FEW_EDGES and not runs_on_gpu(edge_index)


def find_known(self: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> KnownTargets | str:
    """Return the targets of edges in a known order, or the reason why they are not known."""
    if not is_ordinary():
        return "torch transforms what is called"
    if not is_plain_tensor(edge_index):
        return f"edges are a {type(edge_index).__name__} of another kind than a list"
    if self.flow != "source_to_target":
        return f"messages flow {self.flow}"
    if self.explain:
        return "it is explained"
    if not (runs_on_gpu(edge_index) or gains_on_cpu(self)):
        return _AS_FAST
    batch = find_batch(edge_index)
    if batch is None:
        num_targets, width = _read_targets(self, size, kwargs)
        saves_launches = is_fused(self)
        if num_targets is None or not may_find(edge_index, None, width, saves_launches=saves_launches):
            return paths.OWN_LOOPS if getattr(self, "add_self_loops", False) else paths.UNKNOWN
        batch = find_whole(edge_index, num_targets, width, saves_launches=saves_launches)
        if batch is None:
            return paths.NOT_YET
        if not batch.fits(edge_index, batch.view(edge_index).least_sources, num_targets):
            return paths.UNFIT
    return KnownTargets(batch, edge_index)


def gains_on_cpu(self: Any) -> bool:
    """Report whether a CPU gains in messages that are summed at once, or in a part of the aggregation of a layer."""
    parts = [] if self.aggr_module is None else self.aggr_module.modules()
    return any(isinstance(part, _GAIN_ON_CPU) for part in parts) or is_fused(self)


def _read_targets(self: Any, size: Any, kwargs: dict[str, Any]) -> tuple[int | None, int]:
    """Return (nodes that edges may lead to, numbers in a row of nodes), from the arguments of `propagate`."""
    count = None if size is None else size[1]
    for name in {arg[:-2] for arg in (*self._user_args, *self._edge_user_args) if arg[-2:] in ("_i", "_j")}:
        value = kwargs.get(name)
        pair = value if isinstance(value, (tuple, list)) else (value, value)
        if len(pair) != 2:
            continue
        rows = pair[1] if isinstance(pair[1], Tensor) else pair[0]
        if isinstance(rows, Tensor) and -rows.dim() <= self.node_dim < rows.dim():
            num_nodes = rows.shape[self.node_dim]
            return num_nodes if count is None else count, rows.numel() // max(1, num_nodes)
    return count, 1


def reduce(self: Any, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, dim_size: int | None = None,
           dim: int = -2, reduce: str = "sum") -> Tensor:  # fmt: skip
    """Override `reduce` of an aggregation."""
    # Only an eager thread knows any; this runs often, so it makes no other call.
    if torch.compiler.is_compiling() or not is_known() or ptr is not None or index is None:
        return _REDUCE(self, x, index, ptr, dim_size, dim, reduce)
    made = reduce_known(x, index, dim, dim_size, reduce)
    return _REDUCE(self, x, index, ptr, dim_size, dim, reduce) if made is None else made


def _index_select(self: Any, src: Tensor, index: Any) -> Tensor:
    """Override `_index_select` of an accelerated layer: rows of sources or of targets for each edge."""
    if torch.compiler.is_compiling() or not is_known():
        return _INDEX_SELECT(self, src, index)
    made = gather(src, index) if isinstance(index, Tensor) and self.node_dim in (0, -src.dim()) else None
    return _INDEX_SELECT(self, src, index) if made is None else made
