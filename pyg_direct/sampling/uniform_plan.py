"""Plans for one node type and uniform draws: `CpuPlan`, and `GpuPlan`, whose batch is one captured graph.

`open_plan` chooses the plan that serves a topology.

All GPU plans of a topology share scratch memory (`Scratch`). Each batch has a `Slot`. `GpuPlan` gives `CapturedPlan`
the kernels to capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import IdError, MemoryLimitError
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.kernels.batch_counters import (
    BAD_SEED,
    BEFORE_SEEDS,
    EDGES,
    FAR,
    HEADER,
    KEY,
    MORE_SOURCES,
    NEEDED_EDGES,
    NO_POSITION,
    NODES,
    NUM_LINKS,
    NUM_SEEDS,
    SEEDS_ON_GPU,
    STATE,
)
from pyg_direct.kernels.local_ids import bitmap, new_nodes, relabel
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS
from pyg_direct.kernels.sampling import uniform
from pyg_direct.object_text import one_line, show_fanouts
from pyg_direct.ops.argument_checks import check_below
from pyg_direct.ops.local_ids.relabel_nodes import cpu_bitmaps, num_words
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_gpu, threads_for
from pyg_direct.ops.sampling.sample_uniform import cpu_picks, gpu_picks
from pyg_direct.runtime.cuda.graph_capture import fill_words
from pyg_direct.sampling import captured_plan
from pyg_direct.sampling.captured_plan import CapturedPlan, Pending
from pyg_direct.sampling.local_ids import TABLE_SHARE
from pyg_direct.sampling.sampling_options import Recipe, Sample, empty_sample
from pyg_direct.sampling.seeds import Ends, PlacedEnds

Hop = tuple[int, np.ndarray, np.ndarray, np.ndarray]


class _Scratch:
    """Memory of a batch beside its results: bitmaps, empty between batches, and ranks, N / 8 bytes each, and nodes."""

    def __init__(self, num_nodes: int, dtype: np.dtype) -> None:
        words = num_words(num_nodes)
        self.seen, self.fresh = np.zeros(words, np.uint32), cpu_bitmaps(num_nodes)
        self.ranks = np.empty(words, np.int32)
        self._nodes = np.empty(0, dtype)

    def make_room(self, count: int, more: int) -> np.ndarray:
        """Return the nodes of the batch, `count` so far, with room for as many `more`."""
        if len(self._nodes) < count + more:
            nodes = np.empty(count + more, self._nodes.dtype)
            nodes[:count] = self._nodes[:count]
            self._nodes = nodes
        return self._nodes


class CpuPlan:
    """Plan that samples batches with Numba threads, for as many callers at a time as come."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        self.topology, self.recipe = topology, recipe
        self._idle = [self._make_scratch()]
        # The loop that serves each hop, and the option it takes.
        self._picks = [cpu_picks(fanout, recipe.replace, recipe.sampling, recipe.layer_dependency)
                       for fanout in recipe.fanouts]  # fmt: skip
        self._edges_per_seed = _expect_edges(recipe, topology)
        # A node is expanded once, or once a hop, and without repeats gives each of its edges at most once.
        expansions = len(recipe.fanouts) if recipe.expand_all else 1
        self._edges_in_all = sys.maxsize if recipe.replace else expansions * topology.num_edges
        # Of the largest batch so far: a short one at the end of an epoch is no reason to compile other loops.
        self._most_seeds = self._most_edges = 0

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_fanouts(self.recipe.fanouts)
        yield repr(self.topology)

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """Sample the batch of `seeds`, int64 `[B]` on the CPU, under `key`.

        Raises:
            IdError: a seed lies outside the graph, or a neighbor does, which was written there later.
        """
        self.topology.check_unchanged()
        check_below("seeds", seeds.numpy(), self.topology.num_nodes)
        if self.recipe.unique_seeds:
            seeds = seeds.unique()
        if seeds.numel() == 0:
            return empty_sample(seeds, len(self.recipe.fanouts))
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = self._make_scratch()
        if seeds.numel() > self._most_seeds:
            # Until it is known, as many as there could be.
            self._most_seeds = seeds.numel()
            most_edges = min(self._most_seeds * self._edges_per_seed, self._edges_in_all)
        else:
            most_edges = self._most_edges
        with threads_for(most_edges):
            sample = self._sample(seeds, key, scratch)
        self._most_edges = max(self._most_edges, sample.edge_counts[-1])
        self._idle.append(scratch)
        return sample

    def submit(self, seeds: Tensor, key: int) -> Sample:
        """Sample a batch as `sample` does; its `finish` returns it."""
        return self.sample(seeds, key)

    def _make_scratch(self) -> _Scratch:
        return _Scratch(self.topology.num_nodes, self.topology.indices.numpy().dtype)

    def _sample(self, seeds: Tensor, key: int, scratch: _Scratch) -> Sample:
        recipe, num_nodes = self.recipe, self.topology.num_nodes
        indptr, indices = self.topology.indptr.numpy(), self.topology.indices.numpy()
        chunks, sums = cpu_chunks(), np.zeros(cpu_chunks(), np.int64)
        seen, fresh = scratch.seen, scratch.fresh
        node_counts, edge_counts, hops = [seeds.numel()], [0], []
        nodes = scratch.make_room(0, seeds.numel())
        nodes[: seeds.numel()] = seeds.numpy()
        new_nodes.mark_fresh_cpu(nodes[: seeds.numel()], seen[None], chunks)
        begin = 0
        for hop, fanout in enumerate(recipe.fanouts):
            count = node_counts[-1]
            frontier = nodes[begin:count]
            offsets = np.empty(len(frontier) + 1, np.int64)
            uniform.count_picks_cpu(indptr, frontier, fanout, recipe.replace, sums, offsets)
            # Rows that are written later differ from their counts, which the loop sees.
            self.topology.check_rows(frontier)
            sources = np.empty(offsets[-1], indices.dtype)
            positions = np.empty(offsets[-1], np.int64)
            kernel, option = self._picks[hop]
            kernel(indptr, indices, frontier, offsets, np.uint64(key), hop, fanout, option, chunks, sources,
                    positions)  # fmt: skip
            # A write through NumPy is counted nowhere: a bitmap has no bit for an id beyond the last.
            try:
                check_below("neighbors of the topology", sources, num_nodes)
            except IdError:
                # Offsets may have been written since they were checked.
                self.topology.check_rows(frontier)
                raise
            hops.append((begin, offsets, sources, positions))
            used = new_nodes.mark_fresh_cpu(sources, fresh, chunks)
            nodes = scratch.make_room(count, min(len(sources), num_nodes))
            new_nodes.emit_fresh_cpu(fresh[:used], seen, sums, nodes, count)
            begin = 0 if recipe.expand_all else count
            node_counts.append(count + int(sums.sum()))
            edge_counts.append(edge_counts[-1] + len(sources))
        return self._export(nodes[: node_counts[-1]], hops, node_counts, edge_counts, sums, scratch)

    def _export(self, nodes: np.ndarray, hops: list[Hop], node_counts: list[int], edge_counts: list[int],
                sums: np.ndarray, scratch: _Scratch) -> Sample:  # fmt: skip
        seen, ranks, all_ids = scratch.seen, scratch.ranks, self.topology.edge_ids.numpy()
        bitmap.rank_words_cpu(seen, ranks, sums)
        local, n_id = np.empty(len(nodes), np.int32), np.empty(len(nodes), np.int64)
        relabel.locate_nodes_cpu(nodes, node_counts[0], seen, ranks, local, n_id)
        edge_index = np.empty((2, edge_counts[-1]), np.int64)
        e_id = np.empty(edge_counts[-1], np.int64)
        for hop, (begin, offsets, sources, positions) in enumerate(hops):
            part = slice(edge_counts[hop], edge_counts[hop + 1])
            relabel.export_hop_cpu(begin, offsets, sources, positions, seen, ranks, local, all_ids,
                    cpu_chunks(), edge_index[0, part], edge_index[1, part], e_id[part])  # fmt: skip
        # The bitmaps go back empty: whole if that is cheap, otherwise only the touched words.
        if len(seen) <= 16 * len(nodes):
            seen.fill(0)
        else:
            seen[nodes >> 5] = 0
        ids, edges, edge_ids = (torch.from_numpy(a) for a in (n_id, edge_index, e_id))
        return Sample(ids, edges, edge_ids, node_counts, edge_counts, max_degree=self.recipe.max_degree)


def _expect_edges(recipe: Recipe, topology: PlacedTopology) -> int:
    """Count the edges of a batch for each of its seeds, if every node has as many neighbors as its fanout."""
    mean_degree = -(-topology.num_edges // max(1, topology.num_nodes))
    frontier, edges = 1, 0
    for fanout in recipe.fanouts:
        picks = frontier * (mean_degree if fanout < 0 else fanout)
        edges, frontier = edges + picks, picks + recipe.expand_all * frontier
    return edges


# Nodes up to which every hop reads the whole bitmap: flags would cost more than they save.
_SCAN_NODES = 1 << 27


class Scratch(captured_plan.Scratch):
    """Memory by the number of nodes, used by one batch after the other.

    Attributes:
        seen, fresh: Bitmaps, uint32 `[W]`, empty between batches.
        local_of_node: Local ids, int32 `[N]`, or `[0]` if the ranked bitmap serves instead.
        touched: A flag, uint8, for each group of words of `fresh`; `[0]` for few nodes, all of whose groups are read.
        ranks: int32 `[W]`, or `[0]` if the table serves.
        block_sums: int64, one for each block of a full grid.
    """

    def __init__(self, topology: PlacedTopology) -> None:
        super().__init__()
        device, words = topology.device, num_words(topology.num_nodes)
        groups = -(-words // GROUP_WORDS) if topology.num_nodes > _SCAN_NODES else 0
        # A ranked bitmap, a sixteenth of a table, serves above.
        has_table = 4 * topology.num_nodes <= TABLE_SHARE * _total_bytes(device)
        self.seen = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.fresh = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.touched = torch.zeros(groups, dtype=torch.uint8, device=device)
        self.local_of_node = torch.empty(topology.num_nodes if has_table else 0, dtype=torch.int32, device=device)
        self.ranks = torch.empty(0 if has_table else words, dtype=torch.int32, device=device)
        self.block_sums = torch.empty(full_grid(self.seen), dtype=torch.int64, device=device)
        self._topology: PlacedTopology | None = None

    @classmethod
    def of(cls, topology: PlacedTopology) -> Scratch:
        """Return the scratch of a topology, made once."""
        with _SCRATCH_LOCK:
            known = _SCRATCH.get(id(topology))
            if known is None:
                known = _SCRATCH[id(topology)] = cls(topology)
                # So that its id stays its own as long as the scratch lives.
                known._topology = topology
            return known


_SCRATCH: WeakValueDictionary[int, Scratch] = WeakValueDictionary()
_SCRATCH_LOCK = threading.Lock()


class Slot(captured_plan.Slot):
    """Arrays of fixed capacity that hold one batch, and the graph that fills them.

    Attributes:
        inbox, outbox: Page-locked words that the kernels read first and write last.
        locals_of_rank: Local ids by rank, int32, if the scratch has no table.
    """

    def __init__(self, topology: PlacedTopology, num_seeds: int, num_edges: int, ranked: bool) -> None:
        device, index_dtype = topology.device, topology.indices.dtype
        super().__init__(device)
        on_gpu = device.type == "cuda"
        num_nodes = num_seeds + min(num_edges, topology.num_nodes)
        self.num_seeds, self.num_edges = num_seeds, num_edges
        self.inbox = torch.zeros(HEADER + num_seeds, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.outbox = torch.zeros(STATE, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.arrived = torch.empty(num_seeds, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.state[BAD_SEED] = NO_POSITION
        self.nodes = torch.empty(num_nodes, dtype=index_dtype, device=device)
        self.sources = torch.empty(num_edges, dtype=index_dtype, device=device)
        self.ids = torch.empty(num_edges, dtype=topology.edge_ids.dtype, device=device)
        self.targets = torch.empty(num_edges, dtype=torch.int32, device=device)
        self.locals_of_rank = torch.empty(num_nodes if ranked else 0, dtype=torch.int32, device=device)
        # NumPy views: writing a few words through torch costs microseconds.
        self.inbox_words: np.ndarray = self.inbox.numpy()
        self.outbox_words: np.ndarray = self.outbox.numpy()

    @staticmethod
    def expect_bytes(topology: PlacedTopology, num_seeds: int, num_edges: int) -> int:
        """Estimate the bytes that a slot of this capacity takes."""
        edge_bytes = topology.indices.element_size() + topology.edge_ids.element_size() + 4
        node_bytes = topology.indices.element_size() + 4
        return edge_bytes * num_edges + node_bytes * (num_seeds + min(num_edges, topology.num_nodes)) + 8 * num_seeds


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        # The simulator's GPU has no limit.
        return 2**62
    return torch.cuda.get_device_properties(device).total_memory


# Edges up to which a plan is made for the worst case at once; above, it grows with the needs of batches.
_WORST_CASE_EDGES = 1 << 24
_FIRST_EDGES = 1 << 20
_MAX_EDGES = 2**31 - 1
# Work a block should have before another block is worth its share of the running sums.
_ROWS_PER_BLOCK = 16
# Words of the bitmap for each thread of a full grid up to which a thread takes one at a time.
_FEW_WORDS = 4


class Capacity(NamedTuple):
    """Seeds and edges that a slot has room for."""

    seeds: int
    edges: int


class GpuPlan(CapturedPlan):
    """Plan that samples batches on one GPU."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        super().__init__()
        self.topology, self.recipe = topology, recipe
        self._known_edges = 0

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_fanouts(self.recipe.fanouts)
        yield repr(self.topology)

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """Sample the batch of `seeds` under `key`."""
        sample: Sample = self.submit(seeds, key).finish()
        return sample

    def submit(self, seeds: Tensor | Ends, key: int) -> Pending:
        """Enqueue a batch on torch's current stream and return at once.

        Args:
            seeds: int64 `[B]`, on the CPU or on the plan's GPU; the kernels check them. Or the ends of links, at
                least one, for a recipe with `unique_seeds`.
        """
        self.topology.check_unchanged()
        pending = Pending(self, seeds, key)
        if isinstance(seeds, Tensor) and (seeds.numel() == 0 or self.topology.num_nodes == 0):
            if seeds.numel() > 0:
                pending._error = IdError(f"seeds must lie in [0, 0), got {int(seeds[0])}")
            else:
                pending._result = empty_sample(seeds.to(self.topology.device), len(self.recipe.fanouts))
            return pending
        return self._submit(pending)

    def _find_scratch(self) -> Scratch:
        return Scratch.of(self.topology)

    def _has_room(self, slot: Slot, pending: Pending) -> bool:
        return bool(pending.seeds.numel() <= slot.num_seeds)

    def _find_capacity(self, before: Slot | None, pending: Pending) -> Capacity:
        num_seeds = pending.seeds.numel()
        edges = self._edges_at_first(num_seeds)
        return Capacity(num_seeds if before is None else max(num_seeds, before.num_seeds), edges)

    def _edges_at_first(self, num_seeds: int) -> int:
        topology = self.topology
        worst = self.recipe.worst_case(num_seeds, topology.num_nodes, topology.num_edges)
        if worst is not None and worst <= _WORST_CASE_EDGES:
            return max(worst, 1)
        return max(self._known_edges, _FIRST_EDGES if not SIMULATED else 64)

    def _count_slot_bytes(self, capacity: Capacity) -> int:
        return Slot.expect_bytes(self.topology, *capacity)

    def _allocate_slot(self, capacity: Capacity) -> Slot:
        if capacity.edges > _MAX_EDGES:
            raise MemoryLimitError(
                f"a batch must have fewer than {_MAX_EDGES} edges, and {capacity.seeds} seeds with fanouts "
                f"{list(self.recipe.fanouts)} need {capacity.edges}; use fewer seeds or smaller fanouts"
            )
        slot = Slot(self.topology, *capacity, self._scratch.ranks.numel() > 0)
        self._known_edges = max(self._known_edges, capacity.edges)
        return slot

    def _write_inbox(self, slot: Slot, pending: Pending) -> None:
        seeds, words = pending.seeds, slot.inbox_words
        count = seeds.numel()
        words[KEY], words[NUM_SEEDS], words[SEEDS_ON_GPU] = to_signed(pending.key), count, seeds.is_cuda
        if isinstance(seeds, Ends):
            assert self.recipe.unique_seeds
            given = seeds.num_links
            words[NUM_LINKS], words[MORE_SOURCES] = given, seeds.more_sources
            words[HEADER : HEADER + given] = seeds.sources.numpy()
            words[HEADER + given : HEADER + 2 * given] = seeds.targets.numpy()
        elif seeds.is_cuda:
            words[NUM_LINKS] = 0
            slot.arrived[:count].copy_(seeds)
        else:
            words[NUM_LINKS] = 0
            words[HEADER : HEADER + count] = seeds.numpy()

    def _enqueue(self, slot: Slot, stream: int) -> None:
        """Enqueue all kernels of a batch, in order; the plan captures them."""
        topology, recipe, s = self.topology, self.recipe, self._scratch
        num_nodes, expand_all, replace = topology.num_nodes, int(recipe.expand_all), int(recipe.replace)
        hops, full = len(recipe.fanouts), s.block_sums.numel()
        # Rows are picked in one wave: the grid that fits at once.
        most = full if SIMULATED else min(full, full_grid(s.seen, uniform.RESIDENT_BLOCKS))
        words_grid = max(1, min(most, -(-s.seen.numel() // THREADS)))
        quads = int(s.seen.numel() > _FEW_WORDS * THREADS * full)
        has_table = s.local_of_node.numel() > 0
        load_grid = grid_for(slot.num_seeds, s.seen)
        if recipe.unique_seeds:
            run_gpu(relabel.mark_seeds_gpu, load_grid, slot.state, slot.inbox, slot.arrived, s.fresh, s.touched,
                    num_nodes, stream=stream)  # fmt: skip
            self._number(slot, BEFORE_SEEDS, words_grid, quads, stream)
        else:
            run_gpu(relabel.load_seeds_gpu, load_grid, slot.state, slot.inbox, slot.arrived, s.seen, s.local_of_node,
                    slot.nodes, num_nodes, stream=stream)  # fmt: skip
        rows = slot.num_seeds
        for hop, fanout in enumerate(recipe.fanouts):
            grid = max(1, min(most, rows // _ROWS_PER_BLOCK))
            run_gpu(uniform.count_picks_gpu, grid, slot.state, topology.indptr, slot.nodes, hop, fanout, replace,
                    expand_all, s.local_of_node, s.block_sums, stream=stream)  # fmt: skip
            kernel, option = gpu_picks(fanout, recipe.replace, recipe.sampling, recipe.layer_dependency)
            run_gpu(kernel, grid, slot.state, topology.indptr, topology.starts, topology.lists, topology.edge_ids,
                    topology.pairs, slot.nodes, s.block_sums, hop, fanout, option, expand_all,
                    slot.num_edges, slot.sources, slot.ids, slot.targets, s.fresh, s.touched,
                    stream=stream)  # fmt: skip
            self._number(slot, hop, words_grid, quads, stream)
            most_nodes = slot.nodes.numel()
            rows = most_nodes if fanout < 0 else min(most_nodes, rows * (fanout + expand_all))
        locals_of_rank = s.local_of_node
        if not has_table:
            locals_of_rank = slot.locals_of_rank
            fill_words(locals_of_rank, FAR, stream)
            run_gpu(bitmap.sum_words_gpu, words_grid, s.seen, s.block_sums, stream=stream)
            run_gpu(bitmap.rank_words_gpu, words_grid, s.seen, s.block_sums, s.ranks, stream=stream)
            run_gpu(relabel.locate_nodes_gpu, grid_for(slot.nodes.numel(), s.seen), slot.state, hops, slot.nodes,
                    s.seen, s.ranks, locals_of_rank, stream=stream)  # fmt: skip
        run_gpu(relabel.localize_sources_gpu, grid_for(slot.num_edges, s.seen), slot.state, hops, slot.nodes, s.seen,
                s.ranks, locals_of_rank, s.local_of_node, slot.sources, slot.outbox, stream=stream)  # fmt: skip
        if not has_table:
            fill_words(s.seen, 0, stream)

    def _number(self, slot: Slot, hop: int, grid: int, quads: int, stream: int) -> None:
        """Turn the nodes marked fresh into the nodes of the hop after `hop`."""
        s = self._scratch
        run_gpu(new_nodes.count_fresh_gpu, grid, s.fresh, s.seen, s.touched, s.block_sums, stream=stream)
        run_gpu(new_nodes.emit_fresh_gpu, grid, slot.state, hop, quads, s.fresh, s.seen, s.touched, s.block_sums,
                s.local_of_node, slot.nodes, stream=stream)  # fmt: skip

    def _find_larger(self, slot: Slot, pending: Pending) -> Capacity | None:
        words = slot.outbox_words
        if words[BAD_SEED] != NO_POSITION:
            value = int(pending.seeds[int(words[BAD_SEED])])
            raise IdError(f"seeds must lie in [0, {self.topology.num_nodes}), got {value}")
        needed_edges = int(words[NEEDED_EDGES])
        if needed_edges == 0:
            return None
        needed = max(needed_edges + needed_edges // 4, 2 * slot.num_edges)
        worst = self.recipe.worst_case(slot.num_seeds, self.topology.num_nodes, self.topology.num_edges)
        return Capacity(slot.num_seeds, needed if worst is None else min(needed, max(worst, needed_edges)))

    def _export(self, slot: Slot, pending: Pending) -> Sample:
        hops, state, seeds = len(self.recipe.fanouts), slot.outbox_words.tolist(), pending.seeds
        node_counts = state[NODES : NODES + hops + 1]
        edge_counts = state[EDGES : EDGES + hops + 1]
        num_nodes, num_edges = node_counts[-1], edge_counts[-1]
        # Like another tensor of int64: torch takes twice as long if a dtype and a device are given.
        n_id, memory = slot.arrived.new_empty(num_nodes), slot.arrived.new_empty(3 * num_edges)
        # Both come from one piece of memory, as each piece takes the host longer than a launch until it is free again.
        ends, e_id = memory.unsafe_split_with_sizes([2 * num_edges, num_edges])
        edge_index = ends.view(2, num_edges)
        run_gpu(relabel.export_batch_gpu, grid_for(max(num_nodes, num_edges), n_id), slot.sources, slot.targets,
                slot.ids, slot.nodes, edge_index, e_id, n_id)  # fmt: skip
        placed = self._place(slot, seeds, node_counts[0]) if isinstance(seeds, Ends) else None
        held = () if placed is None else (placed.places, placed.labels)
        return Sample(n_id, edge_index, e_id, node_counts, edge_counts, (n_id, memory, *held), placed,
                      self.recipe.max_degree)  # fmt: skip

    def _place(self, slot: Slot, ends: Ends, num_seeds: int) -> PlacedEnds:
        """Find the places of the ends, which are left in `arrived`, among the seeds."""
        places = slot.arrived.new_empty(ends.numel())
        labels = places.new_empty(ends.num_pairs if ends.has_labels else 0, dtype=torch.float32)
        run_gpu(relabel.place_ends_gpu, grid_for(places.numel(), places), slot.nodes, slot.arrived, num_seeds,
                ends.num_links, places, labels)  # fmt: skip
        return PlacedEnds(places, labels)


def to_signed(key: int) -> int:
    """Return a key as a signed number of 64 bits."""
    return key - 2**64 if key >= 2**63 else key


Plan = CpuPlan | GpuPlan
# Loaders over one topology with equal recipes share a plan, as long as one of them lives.
_PLANS: WeakValueDictionary[tuple[int, Recipe], GpuPlan] = WeakValueDictionary()


def is_captured_on(device: torch.device) -> bool:
    """Report whether plans on a device are captured graphs, `GpuPlan`."""
    return device.type == "cuda" or SIMULATED


def open_plan(topology: PlacedTopology, recipe: Recipe) -> Plan:
    """Open the plan for a topology and a recipe; all of them give equal batches."""
    if not is_captured_on(topology.device):
        return CpuPlan(topology, recipe)
    plan = _PLANS.get((id(topology), recipe))
    if plan is None:
        # It keeps the topology, so that the id stays its own.
        plan = _PLANS[id(topology), recipe] = GpuPlan(topology, recipe)
    return plan
