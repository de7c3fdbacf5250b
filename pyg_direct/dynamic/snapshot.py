"""Snapshots' edges in order: by target, then source, with parallel edges added up, as PyG's sums treat them.

`join_edges` treats the edges of several snapshots as one graph. They are sorted in as many operations as one snapshot
takes.

Tensors of a snapshot carry their origin, and may be copied to the GPU only when read. A layer that gets them asks
`find_tag` for their snapshot, and then needs neither edges nor features itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.local_ids.build_csr import compress_ids, repeat_each
from pyg_direct.runtime.host.tensor_views import ordinary_tensors


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Edges of one snapshot.

    Attributes:
        keys: target * N + source of each edge, int64 `[E]`, ascending and unique.
        weight: Sum of the weights of the edges of a key, `[E]`, fp32 or float64 as all numbers here; None if all are
            one.
        loop_nodes: Nodes with a loop, int64 `[L]`.
        loop_weight: Weight of the last given loop of each of them, `[L]`; None if no weights were given.
        num_in: Edges given to each target, parallel ones counted, `[N]`.
        apart: Keys, ascending, and weights of all edges as they were given, `[M]`, if some are parallel and some
            weights below zero; otherwise None.
        given: (source, target) int64 `[2, E]` and weights `[E]` or None in the given order, for the operators that
            request it; otherwise None.
    """

    keys: Tensor
    weight: Tensor | None
    num_nodes: int
    loop_nodes: Tensor
    loop_weight: Tensor | None
    num_in: Tensor
    apart: tuple[Tensor, Tensor] | None = None
    given: tuple[Tensor, Tensor | None] | None = None

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.keys.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and sums."""
        return self.num_in.dtype

    @property
    def targets(self) -> Tensor:
        """Target of each edge, int64 `[E]`."""
        return torch.div(self.keys, max(1, self.num_nodes), rounding_mode="floor")

    @property
    def sources(self) -> Tensor:
        """Source of each edge, int64 `[E]`."""
        return self.keys - self.targets * self.num_nodes

    def sum_in(self) -> Tensor:
        """Sum of the weights of the edges into each node, `[N]`."""
        if self.weight is None:
            # Targets ascend.
            return compress_ids(self.targets, self.num_nodes).diff().to(self.dtype)
        return _add_up(self.targets, self.weight, self.num_nodes)

    def sum_out(self) -> Tensor:
        """Sum of the weights of the edges out of each node, `[N]`."""
        sources = self.sources
        weight = self.num_in.new_ones(sources.numel()) if self.weight is None else self.weight
        return _add_up(sources, weight, self.num_nodes)

    def without_loops(self) -> Snapshot:
        """Return the snapshot without edges from a node to itself; `apart` stays unchanged."""
        if self.loop_nodes.numel() == 0:
            return self
        kept = self.targets != self.sources
        weight = None if self.weight is None else self.weight[kept]
        # If only loops were parallel, the remaining edges have weight one.
        if weight is not None and self.loop_weight is None and bool((weight == 1).all()):
            weight = None
        none = self.loop_nodes[:0]
        return Snapshot(self.keys[kept], weight, self.num_nodes, none,
                        None if self.loop_weight is None else self.loop_weight[:0], self.num_in, self.apart
                        )  # fmt: skip


def order_edges(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, own: int | None = None,
                dtype: torch.dtype = torch.float32) -> Snapshot:  # fmt: skip
    """Sort the edges of one snapshot.

    Args:
        edge_index: (source, target), int64 or int32 `[2, E]`, in any order, on the device that does the work.
        edge_weight: One weight an edge, `[E]` or `[E, 1]` of any floating dtype; None for ones.
        own: Number of the nodes, the first ones, that the snapshot has, between which its edges lie; None for all.
    """
    sources, targets = check_edges([edge_index], num_nodes if own is None else own)
    return order_checked(sources, targets, check_weights([edge_weight], [edge_index], dtype), num_nodes, dtype)


def order_checked(sources: Tensor, targets: Tensor, weight: Tensor | None, num_nodes: int,
                  dtype: torch.dtype) -> Snapshot:  # fmt: skip
    """Sort checked edges.

    Args:
        sources, targets: int64 `[E]` each, in [0, N).
        weight: `[E]` of `dtype`, or None for ones.
        num_nodes: N, whose square is less than 2**63.
    """
    total = sources.numel()
    loop_nodes, loop_weight = _last_loops(sources == targets, targets, weight, num_nodes)
    ones = torch.ones(total, dtype=dtype, device=sources.device)
    num_in = ones.new_zeros(num_nodes).index_add_(0, targets, ones)
    keys, apart = targets * num_nodes + sources, None
    if total > 1 and not bool((keys[1:] > keys[:-1]).all()):
        keys, order = torch.sort(keys, stable=True)
        weight = None if weight is None else weight[order]
        if bool((keys[1:] == keys[:-1]).any()):
            unique, place, repeats = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
            if weight is not None and bool((weight < 0).any()):
                apart = keys, weight
            weight = repeats.to(dtype) if weight is None else _add_up(place, weight, unique.numel())
            keys = unique
    return Snapshot(keys, weight, num_nodes, loop_nodes, loop_weight, num_in, apart)


def check_edges(edges: Sequence[Tensor], num_nodes: int) -> tuple[Tensor, Tensor]:
    """Check and return sources and targets of the edges of several snapshots, concatenated, int64 `[E]`."""
    given = [_check_edges(part, num_nodes) for part in edges]
    sources, targets = (torch.cat(side) if len(edges) > 1 else side[0] for side in zip(*given, strict=True))
    if sources.is_cuda and sources.numel() > 0:
        ends = torch.stack([*torch.aminmax(sources), *torch.aminmax(targets)]).tolist()
        wrong = next((end for end in ends if not 0 <= end < num_nodes), None)
        if wrong is not None:
            raise IdError(f"edge_index must lie in [0, {num_nodes}), got {wrong}")
    return sources, targets


def check_weights(weights: Sequence[Tensor | None], edges: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Check and return weights of the edges of several snapshots, concatenated, `[E]`; None if no snapshot has any."""
    given = [_check_weight(w, part, dtype) for w, part in zip(weights, edges, strict=True) if w is not None]
    return None if not given else torch.cat(given) if len(given) > 1 else given[0]


def _check_edges(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Check and return sources and targets, int64 `[E]`; on a GPU they are not read."""
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        shape = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ArgumentError(f"edge_index must have shape [2, E], got {shape}")
    if edge_index.dtype not in INDEX_DTYPES:
        raise ArgumentTypeError(f"edge_index must have dtype int64 or int32, got {edge_index.dtype}")
    sources, targets = (check_ids("edge_index", ids, num_nodes).long() for ids in edge_index.unbind(0))
    return sources, targets


def _check_weight(edge_weight: Tensor, edge_index: Tensor, dtype: torch.dtype) -> Tensor:
    """Check and return weights as `[E]` of a dtype."""
    num_edges = edge_index.shape[1]
    check_same_device("edge_weight", edge_weight, "edge_index", edge_index)
    if edge_weight.numel() != num_edges or edge_weight.shape[:1] != (num_edges,):
        raise ArgumentError(f"edge_weight must have shape [{num_edges}], got {tuple(edge_weight.shape)}")
    if not edge_weight.is_floating_point():
        raise ArgumentTypeError(f"edge_weight must have a floating dtype, got {edge_weight.dtype}")
    return edge_weight.detach().reshape(-1).to(dtype)


def _add_up(places: Tensor, weight: Tensor, count: int) -> Tensor:
    """Sum the weights at each of `count` places; equal calls give equal sums to the last bit."""
    out = weight.new_zeros(count)
    # Atomics of a GPU would add in any order; this sorts there, and CPU threads would add in any order here.
    return out.index_put_((places,), weight, accumulate=True) if weight.is_cuda else out.index_add_(0, places, weight)


def _last_loops(is_loop: Tensor, nodes: Tensor, weight: Tensor | None,
                num_nodes: int) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return nodes with loops, ascending, and the weight of the last loop of each."""
    loops = is_loop.nonzero().view(-1)
    if weight is None or loops.numel() == 0:
        return torch.unique(nodes[loops]), None if weight is None else weight[:0]
    last = loops.new_full((num_nodes,), -1).scatter_reduce_(0, nodes[loops], loops, "amax")
    looped = (last >= 0).nonzero().view(-1)
    return looped, weight[last[looped]]


@dataclass(frozen=True, eq=False)
class Joined:
    """Edges of T snapshots of N nodes each: node i of snapshot t is t * N + i.

    Attributes:
        graph: All of them in order, T * N nodes.
        counts: Number of given edges of each snapshot.
        is_weighted: True if weights were given.
    """

    graph: Snapshot
    counts: tuple[int, ...]
    is_weighted: bool

    def split(self) -> list[Snapshot]:
        """Return the snapshots, each as from `order_edges`."""
        graph, num_parts = self.graph, len(self.counts)
        num_nodes = graph.num_nodes // num_parts
        bounds = _find_bounds(graph.keys, num_nodes * graph.num_nodes, num_parts)
        loop_bounds = _find_bounds(graph.loop_nodes, num_nodes, num_parts)
        given_bounds = accumulate(self.counts, initial=0)
        keys = self._localise(graph.keys)
        apart = None if graph.apart is None else (self._localise(graph.apart[0]), graph.apart[1])
        out = []
        spans = zip(pairwise(bounds), pairwise(loop_bounds), pairwise(given_bounds), strict=True)
        for t, (part, loops, given) in enumerate(spans):
            mine, looped, each = slice(*part), slice(*loops), slice(*given)
            # If no edge occurred twice, each has weight one.
            is_repeated = part[1] - part[0] < self.counts[t]
            weight = graph.weight if self.is_weighted or is_repeated else None
            out.append(Snapshot(
                keys[mine], None if weight is None else weight[mine], num_nodes,
                graph.loop_nodes[looped] - t * num_nodes,
                None if graph.loop_weight is None else graph.loop_weight[looped],
                graph.num_in[t * num_nodes : (t + 1) * num_nodes],
                (apart[0][each], apart[1][each]) if apart is not None and is_repeated else None,
            ))  # fmt: skip
        return out

    def _localise(self, keys: Tensor) -> Tensor:
        """Return keys of all edges within their snapshots, target * N + source."""
        size = max(1, self.graph.num_nodes)
        num_nodes = max(1, size // len(self.counts))
        targets = torch.div(keys, size, rounding_mode="floor")
        # Both ends belong to one snapshot.
        first = torch.div(targets, num_nodes, rounding_mode="floor") * num_nodes
        return (targets - first) * num_nodes + keys - targets * size - first


def join_edges(edges: Sequence[Tensor], weights: Sequence[Tensor | None], num_nodes: int,
               dtype: torch.dtype = torch.float32) -> Joined:  # fmt: skip
    """Sort the edges of several snapshots as one graph.

    Args:
        edges: Edges of each snapshot, int64 or int32 `[2, E]`, on one device.
        weights: Weights of each, `[E]` or `[E, 1]` of any floating dtype, or None for all of them.
        num_nodes: N; the square of N times the number of snapshots must be less than 2**63.
    """
    sources, targets = check_edges(edges, num_nodes)
    weight, counts = check_weights(weights, edges, dtype), tuple(part.shape[1] for part in edges)
    if len(edges) > 1:
        begins = torch.tensor([[t * num_nodes for t in range(len(edges))], counts], device=targets.device)
        shift = repeat_each(begins[0], begins[1], targets.numel())
        sources, targets = sources + shift, targets + shift
    graph = order_checked(sources, targets, weight, len(edges) * num_nodes, dtype)
    return Joined(graph, counts, weight is not None)


def _find_bounds(ascending: Tensor, step: int, count: int) -> list[int]:
    """Return the first positions of the numbers in each of `count` ranges of length `step`, and the end of the last."""
    if count == 1 or ascending.numel() == 0:
        return [0] * count + [ascending.numel()]
    bounds = torch.arange(1, count, device=ascending.device) * step
    return [0, *torch.searchsorted(ascending, bounds).tolist(), ascending.numel()]


_NAME = "_pyg_direct_tag"


class Tag:
    """Origin of a tensor: snapshot `time` of `plan`, as `role` "x", "edge_index" or "edge_weight"."""

    def __init__(self, plan: Any, time: int, role: str, version: int) -> None:
        self.plan, self.time, self.role, self.version = plan, time, role, version

    def __deepcopy__(self, memo: Any) -> Tag:
        # A copy is a separate tensor, which may be written to.
        return Tag(None, -1, "", -1)

    def __reduce__(self) -> tuple[Any, ...]:
        # A type that `torch.load` reads by default, also in programs without this package.
        return OrderedDict, ()


def tag(tensor: Tensor, plan: Any, time: int, role: str) -> Tensor:
    """Mark a tensor as part of a snapshot, as long as it is not written to."""
    setattr(tensor, _NAME, Tag(plan, time, role, tensor._version))
    return tensor


def find_tag(tensor: Any, role: str) -> Tag | None:
    """Return the origin of a tensor; None for any other, and for one that was written to or requires gradients."""
    found = getattr(tensor, _NAME, None)
    # Saved tensors come back as other objects.
    if not isinstance(found, Tag) or found.plan is None or found.role != role:
        return None
    return None if tensor.requires_grad or was_written(tensor) else found


def was_written(tensor: Any) -> bool:
    """Report whether a tensor was written to since it was marked."""
    found: Tag = getattr(tensor, _NAME)
    return bool(tensor._version != found.version or getattr(tensor, "is_written", False))


class LazyTensor(Tensor):
    """A tensor of known shape whose numbers are fetched when an operation reads them, then kept while it lives.

    It has no memory of its own. A request for its storage raises an error of torch, and a request for its address gives
    the address of the fetched tensor. Results of operations are ordinary tensors.
    """

    _written: bool
    _load: Callable[[], Tensor]
    _loaded: Tensor | None
    _version_loaded: int

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, load: Callable[[], Tensor]) -> LazyTensor:  # noqa: D102
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=device
        )
        made._load, made._loaded, made._written, made._version_loaded = load, None, False, 0
        return made

    def __init__(self, like: Tensor, device: torch.device, load: Callable[[], Tensor]) -> None:
        pass

    # Operations reach `__torch_dispatch__`, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def load(self) -> Tensor:
        """Return the ordinary tensor; fetched once."""
        if self._loaded is None:
            # Tensors of `torch.inference_mode` do not count writes.
            with ordinary_tensors():
                self._loaded = self._load()
            self._version_loaded = self._loaded._version
        return self._loaded

    @ordinary_tensors()
    def renew(self) -> LazyTensor:
        """Return another tensor of the same numbers and origin, which has fetched nothing."""
        made = LazyTensor(self, self.device, self._load)
        known = getattr(self, _NAME, None)
        if isinstance(known, Tag):
            tag(made, known.plan, known.time, known.role)
        return made

    @property
    def is_written(self) -> bool:
        """Report whether it was written to."""
        return self._written or (self._loaded is not None and self._loaded._version != self._version_loaded)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (),  # type: ignore[override]
                           kwargs: Any = None) -> Any:  # fmt: skip
        """Run the operation on the fetched tensor."""
        if func._schema.is_mutable:
            for value in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(value, LazyTensor):
                    value._written = True
        fetch = lambda value: value.load() if isinstance(value, LazyTensor) else value  # noqa: E731
        args, kwargs = pytree.tree_map(fetch, (args, kwargs or {}))
        return func(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the list of the ordinary tensor."""
        return self.load().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the array of the ordinary tensor."""
        return self.load().numpy(force=force)

    # Code of torch below its operations would find no memory.

    def share_memory_(self) -> Tensor:
        """Return the ordinary tensor, moved to shared memory."""
        return self.load().share_memory_()

    def apply_(self, function: Callable[[Any], Any]) -> LazyTensor:
        """Apply a function to the ordinary tensor."""
        self.load().apply_(function)  # type: ignore[no-untyped-call]
        self._written = True
        return self

    def data_ptr(self) -> int:
        """Return the address of the ordinary tensor."""
        return self.load().data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        return self.load().__dlpack__(**options)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.load().__cuda_array_interface__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.load().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)
