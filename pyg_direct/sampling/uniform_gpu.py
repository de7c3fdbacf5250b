"""GPU plan for one node type and uniform draws: all hops of a batch as one captured graph.

All plans of a topology share scratch memory (`Scratch`). Each batch has a `Slot`. `GpuPlan` gives `CapturedPlan` the
kernels to capture.
"""

from __future__ import annotations

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
from pyg_direct.ops.local_ids.relabel_nodes import num_words
from pyg_direct.ops.run_kernel import full_grid, grid_for, run_gpu
from pyg_direct.ops.sampling.sample_uniform import gpu_picks
from pyg_direct.runtime.cuda.graph_capture import fill_words
from pyg_direct.sampling import captured_plan
from pyg_direct.sampling.captured_plan import CapturedPlan, Pending
from pyg_direct.sampling.link_endpoints import Ends, PlacedEnds
from pyg_direct.sampling.local_ids import TABLE_SHARE
from pyg_direct.sampling.sampling_options import Recipe, Sample, empty_sample

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
        num_seeds, num_edges: The capacity.
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
            key: Key of its draws.
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
