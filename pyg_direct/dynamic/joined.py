"""Edges of several snapshots as those of one graph, put in order in as many operations as those of one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyg_direct.dynamic.snapshot import Snapshot, check_edges, check_weights, order_checked
from pyg_direct.ops.offsets import repeat_each


@dataclass(frozen=True, eq=False)
class Joined:
    """Edges of T snapshots of N nodes each: node i of snapshot t is t * N + i.

    Attributes:
        graph: All of them in order, T * N nodes.
        counts: Edges given of each snapshot.
        is_weighted: Whether weights were given.
    """

    graph: Snapshot
    counts: tuple[int, ...]
    is_weighted: bool

    def split(self) -> list[Snapshot]:
        """The snapshots, each as `order_edges` has it."""
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
            # Where no edge was there twice, each weighs one.
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
        """Keys of all edges as those of their snapshots, target * N + source."""
        size = max(1, self.graph.num_nodes)
        num_nodes = max(1, size // len(self.counts))
        targets = torch.div(keys, size, rounding_mode="floor")
        # Both ends are of one snapshot.
        first = torch.div(targets, num_nodes, rounding_mode="floor") * num_nodes
        return (targets - first) * num_nodes + keys - targets * size - first


def join_edges(edges: Sequence[Tensor], weights: Sequence[Tensor | None], num_nodes: int,
               dtype: torch.dtype = torch.float32) -> Joined:  # fmt: skip
    """The edges of several snapshots in order, as those of one graph.

    Args:
        edges: Of each snapshot, int64 or int32 `[2, E]`, on one device.
        weights: Of each, `[E]` or `[E, 1]` of any floating dtype, or None for all of them.
        num_nodes: N; the square of N times the number of snapshots must be less than 2**63.
        dtype: Of weights and sums.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
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
    """Where the numbers of each of `count` ranges of length `step` begin, and where the last ends."""
    if count == 1 or ascending.numel() == 0:
        return [0] * count + [ascending.numel()]
    bounds = torch.arange(1, count, device=ascending.device) * step
    return [0, *torch.searchsorted(ascending, bounds).tolist(), ascending.numel()]
