"""HGT's layer-wise sampling (Hu et al., WWW 2020, algorithm 2): a number of nodes of each type in every layer.

Every node sampled adds, for each relation, 1 / (number of its neighbors) to the budget of each neighbor. A layer takes
nodes of each type with chances in proportion to the squares of their budgets, without replacement
(Efraimidis-Spirakis). Budgets are sums of fixed-point numbers, so that the order of adding does not matter.

On a GPU a batch is a captured graph, as in `hetero_gpu.py`. A layer is a hop; its new nodes are chosen among the
neighbors that this layer and earlier ones met. On a CPU layers follow one another in loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import HeteroTopo, PlacedHetero
from pyg_direct.kernels.batch_counters import BUDGET_DRAW, MAX_HOPS, STATE
from pyg_direct.kernels.sampling import hgt_budget as kernels
from pyg_direct.object_text import one_line
from pyg_direct.ops.argument_checks import check_fanouts, check_key
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu
from pyg_direct.ops.sampling.draw_random import derive_key, draw_bits
from pyg_direct.ops.sampling.sample_hetero import Frontier, Rules, pick_edges
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling import hetero_gpu
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.hetero_gpu import Capacity, HeteroGpuPlan
from pyg_direct.sampling.hetero_plan import list_work
from pyg_direct.sampling.hetero_sample import GeneralSample, split_by
from pyg_direct.sampling.sampling_options import check_hops
from pyg_direct.sampling.seeds import read_group

# Neighbors of a node in one relation that are looked at, as in torch-sparse; more are drawn from.
MOST_NEIGHBORS = 50
_RULES = Rules(replace=False, last=False, strict=False, window=-1)


class _Edges(NamedTuple):
    """Edges into a set of nodes: source and target in the id space and by place, edge ids, ends by relation."""

    sources: Tensor
    targets: Tensor
    ids: Tensor
    ends: Tensor
    relations: np.ndarray


class _Budget:
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

    def add(self, edges: _Edges) -> None:
        """Add the shares of nodes of a layer to the budgets of their neighbors that are not in the batch."""
        self._make_room(edges.sources.numel())
        self._count = run_cpu(kernels.add_shares_cpu, edges.sources, edges.targets, edges.ends, kernels.ONE,
                              *self._filled())  # fmt: skip

    def take(self, wanted: np.ndarray, key: int) -> tuple[Tensor, np.ndarray]:
        """Choose nodes of each type, `wanted[t]` of them at most: (ids, ascending; their number by type)."""
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
                    # Of the nodes with the last score, the first by id.
                    own = own[np.lexsort((ids[own], scores[own]))[:most]]
            taken.append(np.sort(ids[own[:most]]))
        chosen = np.concatenate([ids[:0], *taken])
        self._count = run_cpu(kernels.choose_nodes_cpu, chosen, *self._filled())
        return torch.from_numpy(chosen), np.array([len(own) for own in taken], np.int64)

    def keep_inside(self, nodes: Tensor, places: Tensor, edges: _Edges) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Keep edges among the nodes of the batch: (place of the source, of the target, edge id; number by relation).

        Args:
            nodes: All nodes of the batch in the id space, and `places` the position of each within its type.
        """
        found, kept = torch.empty(3, edges.sources.numel(), dtype=torch.int64), np.empty(len(edges.relations), np.int64)
        count = run_cpu(kernels.keep_inside_cpu, nodes, places, edges.sources, edges.targets, edges.ids, edges.ends,
                        self._table, np.full(len(self._table), -1, np.int32), *found, kept)  # fmt: skip
        sources, targets, ids = found[:, :count].unbind()
        return sources, targets, ids, kept.tolist()


def _score(ids: Tensor, shares: Tensor, key: int) -> Tensor:
    """-log(uniform) / square of the budget, float64: the least are chosen."""
    unit = (((draw_bits(ids, key=key) >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(unit) / (shares.double() / kernels.ONE).square()


class _Slot(hetero_gpu.Slot):
    """Slot with the neighbors that the layers of a batch met, and their budgets (`kernels/sampling/hgt_budget.py`).

    Counts, bits and budgets are zero between batches.
    """

    def __init__(self, plan: HgtGpuPlan, capacity: Capacity) -> None:
        super().__init__(plan, capacity)
        device, num_types = plan.topology.device, plan.num_classes
        most = self.nodes.numel()
        self.met_state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.met_bits = torch.zeros(plan.num_words, dtype=torch.int32, device=device).view(torch.uint32)
        self.budgets = torch.zeros(most, dtype=torch.int64, device=device)
        self.met, self.orders = torch.empty(2, most, dtype=torch.int64, device=device).unbind()
        self.prefixes, self.left, self.equal = torch.empty(3, num_types, dtype=torch.int64, device=device).unbind()
        self.digit_counts = torch.zeros(num_types * kernels.BINS, dtype=torch.int32, device=device)


class HgtGpuPlan(HeteroGpuPlan):
    """Plan that samples batches layer by layer on one GPU.

    Args:
        samples: Nodes to sample by layer and type, int64 `[L, T]`.
        most_neighbors: See `HgtPlan`.
    """

    _slot_class = _Slot

    def __init__(self, topology: PlacedHetero, samples: np.ndarray, most_neighbors: int) -> None:
        topo = topology.topo
        fanouts = np.full((len(samples) + 1, len(topo.edge_types)), most_neighbors)
        rows = topology.rows._replace(edge_weight=topology.rows.edge_weight[:0])
        super().__init__(topology, fanouts[:-1], _RULES, rows, np.zeros(len(topo.edge_types), np.int64), disjoint=False,
                         repeats=False, num_batches=1, max_degree=None, last_fanouts=fanouts[-1])  # fmt: skip
        # Each layer finds budgets through it.
        self.has_table = True
        self._wanted = upload(samples, topology.device)

    @property
    def num_words(self) -> int:
        """Words of a bitmap of all nodes."""
        return int(self._scratch.seen.numel())

    def _count_slot_bytes(self, capacity: Capacity) -> int:
        most, counts = capacity.seeds + capacity.edges, 4 * kernels.BINS * self.num_classes
        return super()._count_slot_bytes(capacity) + 24 * most + counts + 4 * self.num_words

    def _number(self, slot: Any, hop: int, stream: int) -> None:
        """Turn the nodes that a layer chooses into the nodes of the next hop."""
        scratch, num_types = self._scratch, self.num_classes
        grid, starts = grid_for(slot.met.numel(), slot.state), self._class_starts
        if hop == 0:
            run_gpu(kernels.mark_seeds_met_gpu, grid_for(slot.capacity.seeds, slot.state), slot.state, slot.nodes,
                    slot.met_bits, stream=stream)  # fmt: skip
        self._number_by_table(hop, slot.met_bits, slot.met_state, slot.met, stream)
        run_gpu(kernels.add_shares_gpu, scratch.block_sums.numel(), slot.work, slot.offsets, slot.sources, slot.nodes,
                scratch.seen, scratch.place_of_id, slot.budgets, stream=stream)  # fmt: skip
        for number, (shift, bits) in enumerate(kernels.DIGITS):
            run_gpu(kernels.count_digits_gpu, grid, slot.met_state, slot.work, hop, shift, bits, num_types, slot.met,
                    slot.budgets, scratch.seen, starts, slot.prefixes, slot.orders, slot.digit_counts,
                    stream=stream)  # fmt: skip
            run_gpu(kernels.find_digits_gpu, max(1, num_types), int(number == 0), bits, num_types, self._wanted[hop],
                    slot.prefixes, slot.left, slot.equal, slot.digit_counts, stream=stream)  # fmt: skip
        run_gpu(kernels.mark_chosen_gpu, grid, slot.met_state, hop, num_types, slot.met, slot.orders, starts,
                slot.prefixes, slot.left, slot.equal, scratch.fresh, scratch.touched, stream=stream)  # fmt: skip
        self._number_by_table(hop, scratch.seen, slot.state, slot.nodes, stream)

    def _keep_inside(self, slot: Any, node_grid: int, stream: int) -> None:
        super()._keep_inside(slot, node_grid, stream)
        run_gpu(kernels.forget_met_gpu, node_grid, slot.state, slot.met_state, self.num_hops, slot.nodes, slot.met,
                slot.budgets, slot.met_bits, stream=stream)  # fmt: skip


class HgtPlan:
    """Plan that samples batches from a placed `HeteroTopo`, layer by layer.

    Args:
        num_samples: Nodes of each type in each layer; types may be missing, which are then not sampled.
        most_neighbors: Neighbors of a node and relation that are looked at, -1 for all; of more, as many are drawn.
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
        is_on_gpu = SIMULATED or topology.device.type == "cuda"
        self._captured = HgtGpuPlan(topology, self._samples, most) if is_on_gpu else None

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self.topology)

    def sample(self, seeds: Tensor | Mapping[str, Tensor], key: int) -> GeneralSample:
        """Sample the batch of `seeds` under `key`: nodes of each type, seeds first, then layer after layer.

        Its edges are all edges among the nodes; of each node and relation at most `most_neighbors` are looked at.

        Args:
            seeds: int64 or int32 ids within their types, by type; a tensor if there is one type.
            key: Unsigned 64-bit key of its draws.
        """
        sample: GeneralSample = self.submit(seeds, key).finish()
        return sample

    def submit(self, seeds: Tensor | Mapping[str, Tensor], key: int) -> PendingOutput | Finished:
        """Start to sample a batch; `finish()` of the returned object gives the result of `sample`."""
        check_key("key", key)
        self.topology.check_process()
        if self._captured is not None:
            return PendingOutput(self._captured.submit([(seeds, None)], [key]), lambda samples: samples[0])
        # A few hundred items for each of the loops: torch's other threads would only be woken.
        with one_thread():
            return Finished(self._sample(seeds, key))

    def _sample(self, seeds: Tensor | Mapping[str, Tensor], key: int) -> GeneralSample:
        start = read_group(self.topology, [(seeds, None)], False)
        layers, counts = [start.identities], [start.counts]
        front = start.identities.unique()
        budget = _Budget(front, self._starts)
        for layer, wanted in enumerate(self._samples):
            if front.numel() > 0:
                ends = torch.searchsorted(front, self._starts)
                edges = self._expand(front, np.diff(np.array(ends.tolist(), dtype=np.int64)), key, layer)
                budget.add(edges)
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

    def _collect(self, nodes: Tensor, counts: np.ndarray, edges: _Edges, budget: _Budget
                 ) -> GeneralSample:  # fmt: skip
        """Collect the sample of nodes, type after type, with the edges among them."""
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
    """Nodes to sample by layer and type, int64 `[L, T]`; a type with fewer layers samples none in the others."""
    rows = {}
    for kind, own in num_samples.items():
        if kind not in topo.node_types:
            raise ArgumentError(f"num_samples must name known node types, got {kind!r} of {topo.node_types}")
        rows[kind] = check_fanouts(f"num_samples[{kind!r}]", list(own))
        if any(number < 0 for number in rows[kind]):
            raise ArgumentError(f"num_samples must hold numbers of at least 0, got {rows[kind]} for {kind!r}")
        check_hops(rows[kind], MAX_HOPS, f"num_samples[{kind!r}]")
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
