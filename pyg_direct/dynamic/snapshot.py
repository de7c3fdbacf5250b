"""One snapshot's edges in order: by target, then source, parallel edges added up, as PyG's sums treat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.check import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.offsets import repeat_each


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Edges of one snapshot.

    Attributes:
        keys: target * N + source of each edge, int64 `[E]`, ascending and unique.
        weight: Sum of the weights of the edges of a key, fp32 `[E]`; None where all are one.
        num_nodes: N.
        loop_nodes: Nodes with a loop, int64 `[L]`.
        loop_weight: Weight of the last loop given of each of them, fp32 `[L]`; None where no weights were given.
        num_in: Edges given to each target, parallel ones counted, fp32 `[N]`.
        apart: Keys, ascending, and weights of all edges as they were given, `[M]`, where some are parallel and some
            weights below zero; else None.
        given: (source, target) int64 `[2, E]` and weights `[E]` or None in the order in which they were given, for the
            operators that ask for it; else None.
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
        """Where its tensors live."""
        return self.keys.device

    @property
    def targets(self) -> Tensor:
        """Target of each edge, int64 `[E]`."""
        return torch.div(self.keys, max(1, self.num_nodes), rounding_mode="floor")

    @property
    def sources(self) -> Tensor:
        """Source of each edge, int64 `[E]`."""
        return self.keys - self.targets * self.num_nodes

    def add_to(self, nodes: Tensor) -> Tensor:
        """Sum of the weights of the edges of each of `nodes`, which are targets or sources: fp32 `[N]`."""
        weight = torch.ones(nodes.numel(), device=nodes.device) if self.weight is None else self.weight
        return _add_up(nodes, weight, self.num_nodes)

    def without_loops(self) -> Snapshot:
        """The same without edges from a node to itself; `apart` stays as it is."""
        if self.loop_nodes.numel() == 0:
            return self
        kept = self.targets != self.sources
        weight = None if self.weight is None else self.weight[kept]
        # Where only loops were parallel, what is left weighs one.
        if weight is not None and self.loop_weight is None and bool((weight == 1).all()):
            weight = None
        none = self.loop_nodes[:0]
        return Snapshot(self.keys[kept], weight, self.num_nodes, none,
                        None if self.loop_weight is None else self.loop_weight[:0], self.num_in, self.apart
                        )  # fmt: skip


def order_edges(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, own: int | None = None) -> Snapshot:
    """The edges of one snapshot in order.

    Args:
        edge_index: (source, target), int64 or int32 `[2, E]`, in any order, on the device that does the work.
        edge_weight: One weight an edge, `[E]` or `[E, 1]` of any floating dtype; None for ones.
        num_nodes: N.
        own: Of these the snapshot has the first so many, between which its edges lie; None for all.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    return order_together([edge_index], [edge_weight], num_nodes, own)[0]


def order_together(edges: Sequence[Tensor], weights: Sequence[Tensor | None], num_nodes: int,
                   own: int | None = None) -> list[Snapshot]:  # fmt: skip
    """The edges of several snapshots in order, each as `order_edges` has it, in as many operations as those of one.

    Args:
        edges: Of each snapshot, on one device.
        weights: Of each, or None for all of them.
        num_nodes: N; its square times the number of snapshots must be less than 2**63.
        own: As of `order_edges`, of each snapshot.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    own = num_nodes if own is None else own
    given = [_check_edges(part, own) for part in edges]
    weighed = [_check_weight(w, part) for w, part in zip(weights, edges, strict=True) if w is not None]
    counts = [part.shape[1] for part in edges]
    total, several = sum(counts), len(edges) > 1
    sources, targets = (torch.cat(side) if several else side[0] for side in zip(*given, strict=True))
    if sources.is_cuda and total > 0:
        ends = torch.stack([*torch.aminmax(sources), *torch.aminmax(targets)]).tolist()
        wrong = next((end for end in ends if not 0 <= end < own), None)
        if wrong is not None:
            raise IdError(f"edge_index must lie in [0, {own}), got {wrong}")
    weight = None if not weighed else torch.cat(weighed) if several else weighed[0]
    rows = targets
    if several:
        # Node i of snapshot t is t * N + i.
        begins = torch.tensor([[t * num_nodes for t in range(len(edges))], counts], device=targets.device)
        rows = targets + repeat_each(begins[0], begins[1], total)
    loop_nodes, loop_weight = _last_loops(sources == targets, rows, weight, len(edges) * num_nodes)
    num_in = torch.zeros(len(edges) * num_nodes, device=sources.device).index_add_(
        0, rows, torch.ones(total, device=sources.device)
    )
    keys, bounds, apart = rows * num_nodes + sources, [*accumulate(counts, initial=0)], None
    given_bounds = bounds
    if total > 1 and not bool((keys[1:] > keys[:-1]).all()):
        keys, order = torch.sort(keys, stable=True)
        weight = None if weight is None else weight[order]
        unique, place, repeats = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        if unique.numel() < total:
            if weight is not None and bool((weight < 0).any()):
                apart = keys, weight
            weight = repeats.float() if weight is None else _add_up(place, weight, unique.numel())
            keys, bounds = unique, _find_bounds(unique, num_nodes**2, len(edges))
    loop_bounds = _find_bounds(loop_nodes, num_nodes, len(edges))
    out = []
    spans = zip(pairwise(bounds), pairwise(loop_bounds), pairwise(given_bounds), strict=True)
    for t, (part, loops, whole) in enumerate(spans):
        mine, looped, each = slice(*part), slice(*loops), slice(*whole)
        # Where no edge was there twice, each weighs one.
        is_plain = not weighed and part[1] - part[0] == counts[t]
        out.append(Snapshot(
            keys[mine] - t * num_nodes**2 if t else keys[mine], None if weight is None or is_plain else weight[mine],
            num_nodes, loop_nodes[looped] - t * num_nodes, None if loop_weight is None else loop_weight[looped],
            num_in[t * num_nodes : (t + 1) * num_nodes],
            (apart[0][each] - t * num_nodes**2, apart[1][each]) if apart and part[1] - part[0] < counts[t] else None,
        ))  # fmt: skip
    return out


def _check_edges(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Sources and targets, int64 `[E]`; those of a GPU are not read."""
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        shape = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ArgumentError(f"edge_index must have shape [2, E], got {shape}")
    if edge_index.dtype not in INDEX_DTYPES:
        raise ArgumentTypeError(f"edge_index must have dtype int64 or int32, got {edge_index.dtype}")
    sources, targets = (check_ids("edge_index", ids, num_nodes).long() for ids in edge_index.unbind(0))
    return sources, targets


def _check_weight(edge_weight: Tensor, edge_index: Tensor) -> Tensor:
    """Weights as fp32 `[E]`."""
    num_edges = edge_index.shape[1]
    check_same_device("edge_weight", edge_weight, "edge_index", edge_index)
    if edge_weight.numel() != num_edges or edge_weight.shape[:1] != (num_edges,):
        raise ArgumentError(f"edge_weight must have shape [{num_edges}], got {tuple(edge_weight.shape)}")
    if not edge_weight.is_floating_point():
        raise ArgumentTypeError(f"edge_weight must have a floating dtype, got {edge_weight.dtype}")
    return edge_weight.detach().reshape(-1).float()


def _find_bounds(ascending: Tensor, step: int, count: int) -> list[int]:
    """Where the numbers of each of `count` ranges of length `step` begin, and where the last ends."""
    if count == 1 or ascending.numel() == 0:
        return [0] * count + [ascending.numel()]
    bounds = torch.arange(1, count, device=ascending.device) * step
    return [0, *torch.searchsorted(ascending, bounds).tolist(), ascending.numel()]


def _add_up(places: Tensor, weight: Tensor, count: int) -> Tensor:
    """Sum of the weights at each of `count` places; equal calls give equal sums to the last bit."""
    out = torch.zeros(count, device=weight.device)
    # Atomics of a GPU would add in any order; this sorts there, and threads of a CPU would do so here.
    return out.index_put_((places,), weight, accumulate=True) if weight.is_cuda else out.index_add_(0, places, weight)


def _last_loops(is_loop: Tensor, nodes: Tensor, weight: Tensor | None,
                num_nodes: int) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Nodes with loops, ascending, and the weight of the last loop of each."""
    loops = is_loop.nonzero().view(-1)
    if weight is None or loops.numel() == 0:
        return torch.unique(nodes[loops]), None if weight is None else weight[:0]
    last = loops.new_full((num_nodes,), -1).scatter_reduce_(0, nodes[loops], loops, "amax")
    looped = (last >= 0).nonzero().view(-1)
    return looped, weight[last[looped]]
