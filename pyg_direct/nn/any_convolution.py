"""Any `MessagePassing` over edges of known order: PyG's own `propagate`, whose reductions go through offsets.

A layer that has no `ConvSpec` keeps all of its code. While its `propagate` or `edge_updater` runs, the targets of the
edges are known (`known_targets.py`). Three steps then use them: `reduce` of its aggregations, PyG's `softmax` and
`scatter` that its methods call, and its gathers of rows. Each falls back to PyG's code if the index is another.

Methods that name PyG's functions are called with other globals. This dictionary replaces `softmax` and `scatter`, and
has the module's own names otherwise. PyG's modules and the program's stay unchanged.
"""

from __future__ import annotations

import dis
import functools
import itertools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import scatter as pyg_scatter, softmax as pyg_softmax

from pyg_direct.nn import known_targets, paths
from pyg_direct.nn.known_targets import KnownTargets, gather, is_known, know, reduce_known
from pyg_direct.nn.module_state import attach, copy_plain, detach, is_attached
from pyg_direct.nn.sorted_edges import find_batch, is_plain_tensor
from pyg_direct.nn.whole_graphs import find_whole, may_find
from pyg_direct.ops.run_kernel import is_ordinary, is_recorded, runs_on_gpu

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
_OURS = {id(pyg_softmax): known_targets.softmax, id(pyg_scatter): known_targets.scatter}


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
    known = _TOO_FEW if _is_short(edge_index) else find_known(self, edge_index, size, kwargs)
    if isinstance(known, str):
        self._paths.note_left(known)
        return plain(self, edge_index, size=size, **kwargs)
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
    known = "" if is_recorded() or _is_short(edge_index) else find_known(self, edge_index, size, kwargs)
    if isinstance(known, str):
        return plain(self, edge_index, size=size, **kwargs)
    with know(known):
        return plain(self, edge_index, size=size, **kwargs)


def _is_short(edge_index: Any) -> bool:
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
        if num_targets is None or not may_find(edge_index, None, width):
            return paths.OWN_LOOPS if getattr(self, "add_self_loops", False) else paths.UNKNOWN
        batch = find_whole(edge_index, num_targets, width)
        if batch is None:
            return paths.NOT_YET
        if not batch.fits(edge_index, batch.view(edge_index).least_sources, num_targets):
            return paths.UNFIT
    return KnownTargets(batch, edge_index)


def gains_on_cpu(self: Any) -> bool:
    """Report whether a CPU gains in a part of the aggregation of a layer."""
    return self.aggr_module is not None and any(isinstance(part, _GAIN_ON_CPU) for part in self.aggr_module.modules())


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
