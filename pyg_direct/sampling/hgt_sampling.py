"""HGT's layer-wise sampling (Hu et al., WWW 2020, algorithm 2): a number of nodes of each type in every layer.

Every node sampled adds, for each relation, 1 / (number of its neighbors) to the budget of each neighbor. A layer takes
nodes of each type with chances in proportion to the squares of their budgets, without replacement
(Efraimidis-Spirakis). Budgets are sums of fixed-point numbers, so that the order of adding does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import HeteroTopo, PlacedHetero
from pyg_direct.kernels.batch_counters import BUDGET_DRAW
from pyg_direct.kernels.sampling import hgt_budget as kernels
from pyg_direct.ops.argument_checks import check_fanouts, check_key
from pyg_direct.ops.run_kernel import run_cpu, runs_on_gpu
from pyg_direct.ops.sampling.hetero import Frontier, Rules, pick_edges
from pyg_direct.ops.sampling.random import derive_key, draw_bits
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling.hetero_plan import list_work
from pyg_direct.sampling.hetero_sample import GeneralSample, split_by
from pyg_direct.sampling.seeds import read_seeds

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


class _Budget:
    """Nodes that may be sampled and their budgets, kept in order; for a GPU.

    `_ids` holds those of the id space, ascending, `_shares` their budgets times `_ONE`, int64 `[C]`.
    """

    def __init__(self, seeds: Tensor, starts: Tensor) -> None:
        self._starts, self._chosen = starts, seeds
        self._ids = self._shares = seeds[:0]

    def add(self, edges: _Edges, num_targets: int) -> None:
        """Add what nodes of a layer bring to their neighbors that are not in the batch."""
        number = torch.arange(edges.sources.numel(), device=edges.sources.device)
        relation = torch.searchsorted(edges.ends[1:], number, right=True)
        # Edges of one node and relation stand together.
        item = relation * (num_targets + 1) + edges.targets
        _, place, size = item.unique_consecutive(return_inverse=True, return_counts=True)
        shares = torch.div(torch.full_like(size, _ONE), size, rounding_mode="floor")[place]
        is_new = ~torch.isin(edges.sources, self._chosen)
        self._ids, places = torch.cat([self._ids, edges.sources[is_new]]).unique(return_inverse=True)
        shares = torch.cat([self._shares, shares[is_new]])
        self._shares = torch.zeros_like(self._ids).index_add_(0, places, shares)

    def take(self, wanted: np.ndarray, key: int) -> tuple[Tensor, np.ndarray]:
        """Choose nodes of each type, `wanted[t]` of them at most: (ids, ascending; their number by type)."""
        ids = self._ids
        kind = torch.searchsorted(self._starts, ids, right=True) - 1
        order = _score(ids, self._shares, key).sort(stable=True).indices
        order = order[kind[order].sort(stable=True).indices]
        begins = torch.searchsorted(ids, self._starts)
        place = torch.arange(ids.numel(), device=ids.device) - begins[kind[order]]
        most = torch.from_numpy(wanted).to(ids.device)
        taken = ids[order[place < most[kind[order]]]].sort().values
        own = torch.searchsorted(taken, self._starts).diff()
        self._chosen = torch.cat([self._chosen, taken]).sort().values
        kept = ~torch.isin(ids, taken)
        self._ids, self._shares = ids[kept], self._shares[kept]
        return taken, np.array(own.tolist(), dtype=np.int64)

    def keep_inside(self, nodes: Tensor, places: Tensor, edges: _Edges) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Keep edges among the nodes of the batch: (place of the source, of the target, edge id; number by relation).

        Args:
            nodes: All nodes of the batch in the id space, and `places` where each stands within its type.
            edges: Edges into them.
        """
        # Of a repeated seed the first place.
        table = nodes.sort(stable=True)
        at = torch.searchsorted(table.values, edges.sources).clamp(max=max(nodes.numel() - 1, 0))
        is_inside = table.values[at] == edges.sources if nodes.numel() else edges.sources > 0
        kept = torch.cat([edges.ends.new_zeros(1), is_inside.cumsum(0)])[edges.ends].diff().tolist()
        return places[table.indices[at[is_inside]]], edges.targets[is_inside], edges.ids[is_inside], kept


class _TableBudget:
    """Nodes that may be sampled and their budgets, in a hash table (`kernels/sampling/hgt_budget.py`); for a CPU."""

    def __init__(self, seeds: Tensor, starts: Tensor) -> None:
        self._starts = starts.numpy()
        self._count = 0
        self._table, self._shares, self._slots = np.empty((3, 0), np.int64)
        self._make_room(seeds.numel())
        self._count = run_cpu(kernels.choose_nodes_cpu, seeds, *self._filled())

    def _filled(self) -> tuple[Any, ...]:
        return self._table, self._shares, self._slots, self._count

    def _make_room(self, more: int) -> None:
        """Have a free slot beside each that may be filled."""
        size, needed = len(self._slots), self._count + more
        if needed <= size and size > 0:
            return
        old, self._count = self._slots[: self._count], 0
        ids, shares = self._table[old], self._shares[old]
        size = 1 << max(10, (2 * needed).bit_length())
        self._table, self._shares = np.full(2 * size, -1, np.int64), np.empty(2 * size, np.int64)
        self._slots = np.empty(size, np.int64)
        self._count = run_cpu(kernels.choose_nodes_cpu, ids, *self._filled())
        self._shares[self._slots[: self._count]] = shares

    def add(self, edges: _Edges, num_targets: int) -> None:
        """As `_Budget.add`."""
        self._make_room(edges.sources.numel())
        self._count = run_cpu(kernels.add_shares_cpu, edges.sources, edges.targets, edges.ends, _ONE, *self._filled())

    def take(self, wanted: np.ndarray, key: int) -> tuple[Tensor, np.ndarray]:
        """As `_Budget.take`."""
        ids, shares = np.empty((2, self._count), np.int64)
        count = run_cpu(kernels.list_budgets_cpu, self._table, self._shares, self._slots[: self._count], ids, shares)
        ids, shares = ids[:count], shares[:count]
        scores = _score(torch.from_numpy(ids), torch.from_numpy(shares), key).numpy()
        kinds = np.searchsorted(self._starts, ids, side="right") - 1
        taken = []
        for kind, most in enumerate(wanted.tolist()):
            own = np.flatnonzero(kinds == kind)
            if 0 < most < len(own):
                last = np.partition(scores[own], most - 1)[most - 1]
                own = own[scores[own] <= last]
                if len(own) > most:
                    # Of those with the last score the first by id.
                    own = own[np.lexsort((ids[own], scores[own]))[:most]]
            taken.append(np.sort(ids[own[:most]]))
        chosen = np.concatenate([ids[:0], *taken])
        self._count = run_cpu(kernels.choose_nodes_cpu, chosen, *self._filled())
        return torch.from_numpy(chosen), np.array([len(own) for own in taken], np.int64)

    def keep_inside(self, nodes: Tensor, places: Tensor, edges: _Edges) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """As `_Budget.keep_inside`."""
        found, kept = torch.empty(3, edges.sources.numel(), dtype=torch.int64), np.empty(len(edges.relations), np.int64)
        count = run_cpu(kernels.keep_inside_cpu, nodes, places, edges.sources, edges.targets, edges.ids, edges.ends,
                        self._table, np.full(len(self._table), -1, np.int32), *found, kept)  # fmt: skip
        sources, targets, ids = found[:, :count].unbind()
        return sources, targets, ids, kept.tolist()


def _score(ids: Tensor, shares: Tensor, key: int) -> Tensor:
    """-log(uniform) / square of the budget, float64: the least are chosen."""
    unit = (((draw_bits(ids, key=key) >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(unit) / (shares.double() / _ONE).square()


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
        start = read_seeds(self.topology, seeds, None, False)
        layers, counts = [start.identities], [start.counts]
        front = start.identities.unique()
        budget = (_Budget if runs_on_gpu(front) else _TableBudget)(front, self._starts)
        for layer, wanted in enumerate(self._samples):
            if front.numel() > 0:
                ends = torch.searchsorted(front, self._starts)
                edges = self._expand(front, np.diff(np.array(ends.tolist(), dtype=np.int64)), key, layer)
                budget.add(edges, front.numel())
            front, own = budget.take(wanted, derive_key(key, layer, BUDGET_DRAW))
            layers.append(front)
            counts.append(own)
        by_layer = np.stack(counts)
        nodes = _by_type(layers, by_layer)
        edges = self._expand(nodes, by_layer.sum(0), key, len(self._samples))
        return self._collect(nodes, by_layer.sum(0), edges, budget)

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
        self.topology.check_neighbors(picked.ids)
        total = int(picked.ends[-1])
        return _Edges(picked.sources[:total], picked.targets[:total], picked.ids[:total], picked.ends, relations)

    def _collect(self, nodes: Tensor, counts: np.ndarray, edges: _Edges, budget: _Budget | _TableBudget
                 ) -> GeneralSample:  # fmt: skip
        """The sample of nodes, type after type, with the edges among them."""
        topo, sizes = self.topology.topo, torch.from_numpy(counts).to(nodes.device)
        begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        places = torch.arange(nodes.numel(), device=nodes.device) - begins
        sources, targets, ids, kept = budget.keep_inside(nodes, places, edges)
        sizes_of_relations = np.zeros(len(topo.edge_types), np.int64)
        sizes_of_relations[edges.relations] = kept
        by_relation, by_type = sizes_of_relations.tolist(), counts.tolist()
        rows = nodes - self._starts[:-1].repeat_interleave(sizes)
        return GeneralSample(
            node=split_by(topo.node_types, rows, by_type),
            edge_index=split_by(topo.edge_types, torch.stack([sources, targets]), by_relation, dim=1),
            edge=split_by(topo.edge_types, ids, by_relation),
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
