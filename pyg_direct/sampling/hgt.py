"""HGT's layer-wise sampling (Hu et al., WWW 2020, algorithm 2): a number of nodes of each type in every layer.

Every node sampled adds, for each relation, 1 / (number of its neighbors) to the budget of each neighbor. A layer takes
nodes of each type with chances in proportion to the squares of their budgets, without replacement
(Efraimidis-Spirakis). Budgets are sums of fixed-point numbers, so that the order of adding does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero import HeteroTopo, PlacedHetero
from pyg_direct.kernels.state import BUDGET_DRAW
from pyg_direct.ops.check import check_fanouts, check_key
from pyg_direct.ops.draw import derive_key, draw_bits
from pyg_direct.ops.general import Frontier, Rules, pick_edges
from pyg_direct.runtime.threads import one_thread
from pyg_direct.sampling.general import split_by
from pyg_direct.sampling.seeds import read_seeds
from pyg_direct.sampling.subgraph import GeneralSample
from pyg_direct.sampling.worklist import list_work

# Neighbors of a node in one relation that are looked at, as in torch-sparse; more are drawn from.
MOST_NEIGHBORS = 50
_ONE = 1 << 40
_RULES = Rules(replace=False, last=False, strict=False, window=-1)


class _Edges(NamedTuple):
    """Edges into a set of nodes: source and target in the id space and by place, edge ids, ends by relation."""

    sources: Tensor
    targets: Tensor
    ids: Tensor
    ends: Tensor
    relations: np.ndarray


class _Budget(NamedTuple):
    """Nodes that may be sampled, ids in the id space ascending, and their budgets times `_ONE`; int64 `[C]`."""

    ids: Tensor
    shares: Tensor

    def without(self, ids: Tensor) -> _Budget:
        """The rest, without some of its nodes."""
        kept = ~torch.isin(self.ids, ids)
        return _Budget(self.ids[kept], self.shares[kept])

    def add(self, ids: Tensor, shares: Tensor) -> _Budget:
        """With shares for nodes, which may repeat."""
        known, places = torch.cat([self.ids, ids]).unique(return_inverse=True)
        sums = torch.zeros_like(known).index_add_(0, places, torch.cat([self.shares, shares]))
        return _Budget(known, sums)


class HgtPlan:
    """Samples batches from a placed `HeteroTopo`, layer by layer.

    Args:
        topology: Where to sample.
        num_samples: Nodes of each type in each layer; types may be missing, which are then not sampled.
        most_neighbors: Neighbors of a node and relation that are looked at, -1 for all; of more, as many are drawn.

    Raises:
        ArgumentError: a type that is unknown, numbers below 0, or no neighbors to look at.
    """

    def __init__(self, topology: PlacedHetero, num_samples: Mapping[str, Sequence[int]],
                 most_neighbors: int = MOST_NEIGHBORS) -> None:  # fmt: skip
        self.topology = topology
        topo = topology.topo
        self._samples = read_samples(topo, num_samples)
        (most,) = check_fanouts("most_neighbors", [most_neighbors])
        if most == 0:
            # Nothing but the seeds would ever be sampled.
            raise ArgumentError("most_neighbors must be -1 or at least 1, got 0")
        self._fanouts = np.full(len(topo.edge_types), most)
        self._flags = np.zeros(len(topo.edge_types), np.int64)
        self._starts = torch.from_numpy(topo.type_starts).to(topology.device)

    def sample(self, seeds: Tensor | Mapping[str, Tensor], key: int) -> GeneralSample:
        """The batch of `seeds` under `key`: nodes of each type, seeds first, then layer after layer.

        Its edges are those among the nodes, of each node and relation at most `most_neighbors` looked at.

        Args:
            seeds: int64 or int32 ids within their types, by type; a tensor where there is one type.
            key: Unsigned 64-bit key of its draws.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        check_key("key", key)
        self.topology.check_process()
        # On a CPU a few hundred items for each of its loops: torch's other threads would only be woken.
        with one_thread(self.topology.device.type == "cpu"):
            return self._sample(seeds, key)

    def _sample(self, seeds: Tensor | Mapping[str, Tensor], key: int) -> GeneralSample:
        topo = self.topology.topo
        start = read_seeds(self.topology, seeds, None, False)
        layers = [start.identities]
        counts = [start.counts]
        chosen = start.identities.unique()
        budget = _Budget(chosen[:0], chosen[:0])
        front = chosen
        for layer, wanted in enumerate(self._samples):
            if front.numel() > 0:
                budget = self._grow(budget, front, chosen, key, layer)
            front, own = self._choose(budget, wanted, key, layer)
            layers.append(front)
            counts.append(own)
            chosen = torch.cat([chosen, front]).sort().values
            budget = budget.without(front)
        by_layer = np.stack(counts)
        nodes = _by_type(layers, by_layer)
        edges = self._expand(nodes, by_layer.sum(0), key, len(self._samples))
        return self._collect(topo, nodes, by_layer.sum(0), edges)

    def _expand(self, nodes: Tensor, counts: np.ndarray, key: int, hop: int) -> _Edges:
        """Edges into nodes that stand type after type, ids in the id space."""
        topo = self.topology.topo
        rows = nodes - self._starts.repeat_interleave(torch.from_numpy(np.append(counts, 0)).to(nodes.device))
        none = rows[:0]
        relations, work = list_work(
            topo, self._flags, self._fanouts, counts, np.zeros_like(counts), topo.type_starts, key
        )
        if len(relations) == 0:
            return _Edges(none, none, none, none.new_zeros(1), relations)
        picked = pick_edges(self.topology.rows, work, Frontier(rows, none, none, 0), _RULES, hop=hop)
        total = int(picked.ends[-1])
        return _Edges(picked.sources[:total], picked.targets[:total], picked.ids[:total], picked.ends, relations)

    def _grow(self, budget: _Budget, front: Tensor, chosen: Tensor, key: int, layer: int) -> _Budget:
        """The budget with what the nodes of a layer, ascending, add to it."""
        ends = torch.searchsorted(front, self._starts)
        edges = self._expand(front, np.diff(np.array(ends.tolist(), dtype=np.int64)), key, layer)
        number = torch.arange(edges.sources.numel(), device=front.device)
        relation = torch.searchsorted(edges.ends[1:], number, right=True)
        # Edges of one node and relation stand together.
        item = relation * (front.numel() + 1) + edges.targets
        _, place, size = item.unique_consecutive(return_inverse=True, return_counts=True)
        shares = torch.div(torch.full_like(size, _ONE), size, rounding_mode="floor")[place]
        is_new = ~torch.isin(edges.sources, chosen)
        return budget.add(edges.sources[is_new], shares[is_new])

    def _choose(self, budget: _Budget, wanted: np.ndarray, key: int, layer: int) -> tuple[Tensor, np.ndarray]:
        """(nodes that a layer takes, ascending; their number by type)."""
        ids = budget.ids
        bits = draw_bits(ids, key=derive_key(key, layer, BUDGET_DRAW))
        unit = (((bits >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52
        scores = -torch.log(unit) / (budget.shares.double() / _ONE).square()
        kind = torch.searchsorted(self._starts, ids, right=True) - 1
        order = scores.sort(stable=True).indices
        order = order[kind[order].sort(stable=True).indices]
        begins = torch.searchsorted(ids, self._starts)
        place = torch.arange(ids.numel(), device=ids.device) - begins[kind[order]]
        most = torch.from_numpy(wanted).to(ids.device)
        taken = ids[order[place < most[kind[order]]]].sort().values
        own = torch.searchsorted(taken, self._starts).diff()
        return taken, np.array(own.tolist(), dtype=np.int64)

    def _collect(self, topo: HeteroTopo, nodes: Tensor, counts: np.ndarray, edges: _Edges) -> GeneralSample:
        """The sample of nodes, type after type, with the edges among them."""
        begins = torch.from_numpy(np.append(np.cumsum(counts) - counts, 0)).to(nodes.device)
        # Of a repeated seed the first place.
        table = nodes.sort(stable=True)
        at = torch.searchsorted(table.values, edges.sources).clamp(max=max(nodes.numel() - 1, 0))
        is_inside = table.values[at] == edges.sources if nodes.numel() else edges.sources > 0
        sources = edges.sources[is_inside]
        kind = torch.searchsorted(self._starts, sources, right=True) - 1
        local = table.indices[at[is_inside]] - begins[kind]
        kept = torch.cat([edges.ends.new_zeros(1), is_inside.cumsum(0)])[edges.ends].diff().tolist()
        sizes = np.zeros(len(topo.edge_types), np.int64)
        sizes[edges.relations] = kept
        by_relation, by_type = sizes.tolist(), counts.tolist()
        rows = nodes - self._starts.repeat_interleave(torch.from_numpy(np.append(counts, 0)).to(nodes.device))
        return GeneralSample(
            node=split_by(topo.node_types, rows, by_type),
            edge_index=split_by(topo.edge_types, torch.stack([local, edges.targets[is_inside]]), by_relation, dim=1),
            edge=split_by(topo.edge_types, edges.ids[is_inside], by_relation),
            batch=None, num_sampled_nodes=None, num_sampled_edges=None)  # fmt: skip


def read_samples(topo: HeteroTopo, num_samples: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Nodes to sample by layer and type, int64 `[L, T]`; a type with fewer layers samples none in the others.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    rows = {}
    for kind, own in num_samples.items():
        if kind not in topo.node_types:
            raise ArgumentError(f"num_samples must name known node types, got {kind!r} of {topo.node_types}")
        rows[kind] = check_fanouts(f"num_samples[{kind!r}]", list(own))
        if any(number < 0 for number in rows[kind]):
            raise ArgumentError(f"num_samples must hold numbers of at least 0, got {rows[kind]} for {kind!r}")
    num_layers = max((len(own) for own in rows.values()), default=0)
    table = np.zeros((num_layers, len(topo.node_types)), np.int64)
    for number, kind in enumerate(topo.node_types):
        own = rows.get(kind, [])
        table[: len(own), number] = own
    return table


def _by_type(layers: list[Tensor], counts: np.ndarray) -> Tensor:
    """Nodes by layer, type after type within each, as nodes by type, layer after layer within each."""
    pieces = [layer.split(own.tolist()) for layer, own in zip(layers, counts, strict=True)]
    return torch.cat([piece[kind] for kind in range(counts.shape[1]) for piece in pieces] or [layers[0]])
