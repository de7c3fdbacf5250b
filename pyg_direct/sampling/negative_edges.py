"""Negative edges of a whole graph, or of each graph of a batch, as PyG's `negative_sampling` defines them.

Pairs of nodes are numbered, graph after graph, without self loops if both ends are of one node type. Candidates are
drawn on the device of the edges, sorted, and compared with the sorted numbers of the edges. Random numbers come from
torch's generator of this device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Counts = np.ndarray[Any, np.dtype[np.int64]]
# Graphs with fewer pairs for each candidate list all pairs, as draws would repeat too many of them.
_LIST_BELOW = 8
# Candidates for each pair that is not found yet, and some more: a second round is rare.
_SPARE, _EXCESS = 12, 1.25
_ANY_NUMBER = 2**63 - 1


def sample_negative_edges(edge_index: Tensor, num_nodes: int | tuple[int, int] | None = None,
                          num_neg_samples: float | None = None, method: str = "sparse",
                          force_undirected: bool = False) -> Tensor:  # fmt: skip
    """Draw distinct pairs of nodes that are no edges, with the arguments of PyG's `negative_sampling`.

    The result has as many pairs as are requested, or all pairs that are no edges if there are fewer. Each set of so
    many pairs has the same probability.

    Args:
        edge_index: Edges, `[2, E]`.
        num_nodes: Number of nodes, or (of sources, of targets); None for one more than the highest id.
        num_neg_samples: Number of pairs, or as a float their number for each edge; None for one for each edge.
        method: `sparse` or `dense`; without effect.
        force_undirected: Return each pair in both directions, and half as many pairs.

    Returns:
        int64 `[2, n]` on the device of the edges.
    """
    assert method in ("sparse", "dense")
    edge_index = edge_index.detach().as_subclass(Tensor)
    is_bipartite = num_nodes is not None and not isinstance(num_nodes, int)
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    size: Any = num_nodes if is_bipartite else (num_nodes, num_nodes)
    graphs = _Graphs([np.array([int(end)]) for end in size], is_bipartite, force_undirected, edge_index.device)
    return graphs.sample(edge_index, None, np.array([edge_index.shape[1]]), num_neg_samples)


def sample_batched_negative_edges(edge_index: Tensor, batch: Tensor | tuple[Tensor, Tensor],
                                  num_neg_samples: float | None = None, method: str = "sparse",
                                  force_undirected: bool = False) -> Tensor:  # fmt: skip
    """Draw negative edges of each graph of a batch, with the arguments of PyG's `batched_negative_sampling`.

    Args:
        edge_index: Edges, `[2, E]`.
        batch: Graph of each node, int64 `[N]`, ascending; or (of sources, of targets).
        num_neg_samples: Number of pairs of each graph; see `sample_negative_edges`.
        method: `sparse` or `dense`; without effect.
        force_undirected: Return each pair in both directions, and half as many pairs.

    Returns:
        int64 `[2, n]`, graph after graph. As in PyG, graphs after the last one with edges have none.
    """
    assert method in ("sparse", "dense")
    edge_index = edge_index.detach().as_subclass(Tensor)
    is_bipartite = not isinstance(batch, Tensor)
    ends = tuple(batch) if is_bipartite else (batch, batch)
    graph = ends[0][edge_index[0]]
    num_edges = _count(graph)
    sizes = [_count(end)[: len(num_edges)] for end in ends]
    graphs = _Graphs(sizes, is_bipartite, force_undirected, edge_index.device)
    return graphs.sample(edge_index, graph, num_edges, num_neg_samples)


def _count(graph: Tensor, num_graphs: int = 0) -> Counts:
    """Count the entries of each graph, on the host."""
    counts: Counts = torch.bincount(graph, minlength=num_graphs).cpu().numpy()
    return counts


class _Graphs:
    """Numbered pairs of nodes of several graphs.

    Args:
        sizes: Number of sources and of targets in each graph, int64 `[G]`.
        is_bipartite: True if the ends are of two node types, so that no pair is a self loop.
        force_undirected: True if a pair stands for both directions; without effect between two types.
    """

    def __init__(self, sizes: list[Counts], is_bipartite: bool, force_undirected: bool, device: torch.device) -> None:
        self._is_bipartite, self._is_undirected = is_bipartite, force_undirected and not is_bipartite
        self._device = device
        sources, targets = sizes
        self._pairs = sources * (targets if is_bipartite else sources - 1)
        if self._is_undirected:
            self._pairs = self._pairs // 2
        self._begins = np.cumsum(self._pairs) - self._pairs
        first = [np.cumsum(size) - size for size in sizes]
        self._columns = np.stack([*first, targets, self._pairs, self._begins])
        self._table = torch.from_numpy(self._columns).to(device) if len(sources) > 1 else None

    def sample(self, edge_index: Tensor, graph: Tensor | None, num_edges: Counts, num_neg_samples: float | None
               ) -> Tensor:  # fmt: skip
        """Draw negative edges; `graph` is the graph of each edge, `num_edges` their number in each graph."""
        if not len(num_edges):
            return edge_index.new_empty((2, 0))
        total = int(self._pairs.sum())
        numbers, counted = self._number(edge_index, graph)
        # Edges that are no pairs stand behind all pairs.
        known = numbers.clamp_(max=total).sort().values
        is_first = known < total
        is_first[1:] &= known[1:] != known[:-1]
        num_known, num_counted = self._count_of(known, is_first), self._count_of(numbers, counted, graph)
        requested = _read_requested(num_neg_samples, num_edges)
        if self._is_undirected:
            requested = requested // 2
        # As in PyG, parallel edges count as often as they are there, and then leave no negatives.
        requested = np.where(num_counted < self._pairs, np.minimum(requested, self._pairs - num_known), 0)
        found = self._draw(known, requested, self._pairs - num_known)
        return self._read(found)

    def _look_up(self, graph: Tensor | None) -> Any:
        """Return (first source, first target, targets, pairs, first pair) of graphs; numbers if there is only one."""
        return self._columns[:, 0].tolist() if self._table is None else self._table[:, graph]

    def _find_graph(self, numbers: Tensor) -> Tensor | None:
        """Return the graph of each pair; None if there is only one."""
        if self._table is None:
            return None
        # Graphs without pairs begin where the next graph does.
        return torch.searchsorted(self._table[4], numbers, right=True) - 1

    def _count_of(self, numbers: Tensor, is_counted: Tensor, graph: Tensor | None = None) -> Counts:
        """Count pairs of each graph."""
        if self._table is None:
            return np.array([int(is_counted.sum())])
        graph = self._find_graph(numbers) if graph is None else graph
        assert graph is not None, "there are several graphs"
        return _count(graph[is_counted], len(self._pairs))

    def _number(self, edge_index: Tensor, graph: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (number of each edge, very high for self loops; True for edges that PyG counts)."""
        first_source, first_target, num_targets, _, begin = self._look_up(graph)
        row, col = edge_index[0].long() - first_source, edge_index[1].long() - first_target
        if self._is_bipartite:
            return row * num_targets + col + begin, torch.ones_like(row, dtype=torch.bool)
        if self._is_undirected:
            # Pairs above the diagonal, column after column.
            low, high = torch.minimum(row, col), torch.maximum(row, col)
            numbers, counted = high * (high - 1) // 2 + low, row < col
        else:
            numbers, counted = row * (num_targets - 1) + col - (row < col).long(), row != col
        return (numbers + begin).masked_fill_(row == col, _ANY_NUMBER), counted

    def _read(self, numbers: Tensor) -> Tensor:
        """Return the ends of numbered pairs, graph after graph, `[2, n]`."""
        graph = self._find_graph(numbers)
        first_source, first_target, num_targets, _, begin = self._look_up(graph)
        number = numbers - begin
        if self._is_undirected:
            # The root in double precision may be off by one.
            col = ((1 + (8 * number.double() + 1).sqrt()) / 2).long()
            col -= (col * (col - 1) // 2 > number).long()
            col += (col * (col + 1) // 2 <= number).long()
            row = number - col * (col - 1) // 2
        else:
            width = num_targets if self._is_bipartite else num_targets - 1
            row = number // width
            col = number - row * width
            if not self._is_bipartite:
                col += (row <= col).long()
        out = torch.stack([row + first_source, col + first_target])
        if not self._is_undirected:
            return out
        both = torch.cat([out, out.flip(0)], 1)
        # Each graph has its pairs in one direction, then in the other one.
        return both if graph is None else both[:, torch.cat([graph, graph]).argsort(stable=True)]

    def _draw(self, known: Tensor, requested: Counts, available: Counts) -> Tensor:
        """Draw pairs that are not known: numbers, int64 `[requested.sum()]`, graph after graph in random order."""
        share = np.maximum(available, 1) / np.maximum(self._pairs, 1)
        wanted = np.where(requested > 0, np.ceil(_EXCESS * (requested + _SPARE) / share), 0).astype(np.int64)
        is_listed = (requested > 0) & (self._pairs <= _LIST_BELOW * wanted)
        count = np.where(is_listed, self._pairs, wanted)
        found = known.new_empty(0)
        while True:
            candidates = torch.cat([found, self._propose(count, is_listed)]).sort().values
            is_new = torch.ones_like(candidates, dtype=torch.bool)
            is_new[1:] = candidates[1:] != candidates[:-1]
            if known.numel():
                place = torch.searchsorted(known, candidates).clamp_(max=known.numel() - 1)
                is_new &= known[place] != candidates
            found = candidates[is_new]
            graph = self._find_graph(found)
            have = np.array([found.numel()]) if graph is None else _count(graph, len(requested))
            is_short = have < requested
            if not is_short.any():
                return _choose(found, graph, have, requested)
            count, is_listed = np.where(is_short, wanted, 0), np.zeros_like(is_listed)

    def _propose(self, count: Counts, is_listed: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
        """Propose so many pairs of each graph, drawn one by one; of listed graphs all pairs."""
        total = int(count.sum())
        drawn = torch.randint(_ANY_NUMBER, (0 if is_listed.all() else total,), device=self._device)
        if self._table is None:
            # The remainder prefers some pairs, by one in 2**63 / pairs.
            return torch.arange(total, device=self._device) if is_listed[0] else drawn % int(self._pairs[0])
        graph = torch.repeat_interleave(torch.from_numpy(count).to(self._device), output_size=total)
        _, _, _, pairs, begin = self._look_up(graph)
        before = np.cumsum(count) - count
        if not is_listed.any():
            return begin + drawn % pairs
        listed = torch.arange(total, device=self._device) - torch.from_numpy(before).to(self._device)[graph]
        if is_listed.all():
            return begin + listed
        return begin + torch.where(torch.from_numpy(is_listed).to(self._device)[graph], listed, drawn % pairs)


def _read_requested(num_neg_samples: float | None, num_edges: Counts) -> Counts:
    """Read how many pairs each graph is asked for."""
    if num_neg_samples is None:
        return num_edges
    if isinstance(num_neg_samples, float):
        return (num_neg_samples * num_edges).astype(np.int64)
    return np.full_like(num_edges, int(num_neg_samples))


def _choose(found: Tensor, graph: Tensor | None, have: Counts, requested: Counts) -> Tensor:
    """Choose as many pairs of each graph as are requested, at random."""
    order = torch.randperm(found.numel(), device=found.device)
    if graph is None:
        return found[order[: int(requested[0])]]
    order = order[graph[order].argsort(stable=True)]
    # The first ones of each graph.
    skipped = np.repeat(np.cumsum(have) - have - np.cumsum(requested) + requested, requested)
    place = torch.from_numpy(skipped + np.arange(len(skipped))).to(found.device)
    return found[order[place]]
