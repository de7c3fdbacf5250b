"""The plan on a GPU: all hops of a batch as one captured graph, with one wait for its sizes.

Buffers have a fixed capacity, counts stay on the device, and writes are checked against the capacity; a batch that
needs more says so in its state and is sampled again, under the same key, by a larger plan. So a result never depends
on the capacity. Two batches may be on their way at once, so that the GPU samples the next one while the host still
reads the sizes of the last.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from pyg_direct.errors import IdError, MemoryLimitError, PlacementWarning, warn
from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.kernels import bitmap, fresh as fresh_nodes, link, neighbor, relabel
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.kernels.state import (
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
)
from pyg_direct.ops.launch import full_grid, grid_for, run_gpu
from pyg_direct.ops.neighbor import gpu_picks
from pyg_direct.runtime.graph import CapturedGraph, fill_words
from pyg_direct.runtime.mode import ordinary_tensors
from pyg_direct.runtime.stream import current_stream, is_current, kept_stream, set_stream
from pyg_direct.sampling.budget import make_room, touch
from pyg_direct.sampling.buffers import Scratch, Slot
from pyg_direct.sampling.ends import Ends, PlacedEnds
from pyg_direct.sampling.sample import Recipe, Sample, empty_sample

# Edges up to which a plan is made for the worst case at once; above, it grows with what batches need.
_WORST_CASE_EDGES = 1 << 24
_FIRST_EDGES = 1 << 20
_MAX_EDGES = 2**31 - 1
# Work a block should have before another block is worth its share of the running sums.
_ROWS_PER_BLOCK = 16
# Words of the bitmap for each thread of a full grid up to which a thread takes one at a time.
_FEW_WORDS = 4


class Pending:
    """A batch on its way: enqueued, its sizes not yet read."""

    def __init__(self, plan: GpuPlan, seeds: Tensor | Ends, key: int) -> None:
        self._plan, self.seeds, self.key = plan, seeds, key
        # Whoever finishes it, it is read on the stream it was enqueued on: there its user expects the result, if
        # nothing else is set here.
        self.stream = None if plan.topology.device.type == "cpu" else current_stream(plan.topology.device.index)
        self._slot: Slot | None = None
        self._result: Sample | None = None
        self._error: Exception | None = None

    def finish(self) -> Sample:
        """Wait for the sizes and write the batch into tensors of its own, on the stream it was enqueued on.

        Raises:
            IdError: a seed on the GPU lies outside the graph.
            MemoryLimitError: the batch does not fit GPU memory.
        """
        if self._result is None and self._error is None:
            self._plan._finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class GpuPlan:
    """Samples batches on one GPU. Two may be on their way at a time: a third one finishes the first."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        self.topology, self.recipe = topology, recipe
        self.num_captures = 0
        self._scratch: Scratch | None = None
        self._slots: list[Slot] = []
        self._most_slots = 2
        self._pending: deque[Pending] = deque()
        self._lock = threading.RLock()
        self._known_edges = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of GPU memory held by the plan, without the scratch it shares with other plans of its topology."""
        return sum(slot.num_bytes for slot in self._slots)

    @property
    def num_scratch_bytes(self) -> int:
        """Bytes of GPU memory of that scratch."""
        return 0 if self._scratch is None else self._scratch.num_bytes

    def release(self) -> bool:
        """Give the buffers back, unless a batch is on its way in them; they are made again when needed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._pending:
                return False
            self._slots.clear()
            return True
        finally:
            self._lock.release()

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """The batch of `seeds` under `key`."""
        return self.submit(seeds, key).finish()

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
        with self._lock:
            touch(self)
            pending._slot = self._claim_slot(seeds.numel())
            self._pending.append(pending)
            self._enqueue_batch(pending)
        return pending

    def _claim_slot(self, num_seeds: int) -> Slot:
        """A slot without a batch on its way, large enough for the seeds."""
        busy = [pending._slot for pending in self._pending]
        idle = next((slot for slot in self._slots if slot not in busy), None)
        if idle is None and len(self._slots) >= self._most_slots:
            oldest = self._pending[0]
            self._finish(oldest)
            idle = oldest._slot
        elif idle is None and self._slots:
            try:
                return self._make_slot(None, num_seeds, self._edges_at_first(num_seeds))
            except MemoryLimitError:
                self._most_slots = 1
                warn(
                    "no GPU memory is left to sample one batch ahead; batches are sampled one by one", PlacementWarning
                )
                return self._claim_slot(num_seeds)
        if idle is None or idle not in self._slots or num_seeds > idle.num_seeds:
            return self._make_slot(idle, num_seeds, self._edges_at_first(num_seeds))
        return idle

    def _edges_at_first(self, num_seeds: int) -> int:
        topology = self.topology
        worst = self.recipe.worst_case(num_seeds, topology.num_nodes, topology.num_edges)
        if worst is not None and worst <= _WORST_CASE_EDGES:
            return max(worst, 1)
        return max(self._known_edges, _FIRST_EDGES if not SIMULATED else 64)

    @ordinary_tensors()
    def _make_slot(self, before: Slot | None, num_seeds: int, num_edges: int) -> Slot:
        """A slot of this capacity instead of `before`, whose batch is over."""
        if num_edges > _MAX_EDGES:
            raise MemoryLimitError(
                f"a batch must have fewer than {_MAX_EDGES} edges, and {num_seeds} seeds with fanouts "
                f"{list(self.recipe.fanouts)} need {num_edges}; use fewer seeds or smaller fanouts"
            )
        if before is not None:
            num_seeds = max(num_seeds, before.num_seeds)
            if before in self._slots:
                self._slots.remove(before)
            del before
        if self._scratch is None:
            self._scratch = Scratch.of(self.topology)
        slot = self._allocate(num_seeds, num_edges)
        if not SIMULATED:
            index = self.topology.device.index
            # Compile and load before the capture, in which nothing may be loaded; without seeds, so that nothing
            # changes in the scratch.
            with torch.cuda.device(index), self._scratch.lock:
                stream = torch._C._cuda_getCurrentRawStream(index)
                self._scratch.wait(stream)
                self._enqueue(slot, stream)
                torch.cuda.current_stream(index).synchronize()
            slot.graph = CapturedGraph(lambda stream: self._enqueue(slot, stream), index)
        self._slots.append(slot)
        self._known_edges = max(self._known_edges, num_edges)
        self.num_captures += 1
        return slot

    def _allocate(self, num_seeds: int, num_edges: int) -> Slot:
        assert self._scratch is not None
        device, ranked = self.topology.device, self._scratch.ranks.numel() > 0
        if device.type == "cuda":
            make_room(Slot.count_bytes(self.topology, num_seeds, num_edges), self, device)
        try:
            return Slot(self.topology, num_seeds, num_edges, ranked)
        except torch.OutOfMemoryError:
            make_room(0, self, device, all_of_it=True)
        try:
            return Slot(self.topology, num_seeds, num_edges, ranked)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"a plan for {num_seeds} seeds and {num_edges} edges must fit free GPU memory; use fewer seeds or "
                f"smaller fanouts: {error}"
            ) from error

    def _enqueue_batch(self, pending: Pending) -> None:
        slot, seeds = pending._slot, pending.seeds
        assert slot is not None and self._scratch is not None
        count, words = seeds.numel(), slot.inbox_words
        words[KEY], words[NUM_SEEDS], words[SEEDS_ON_GPU] = _signed(pending.key), count, seeds.is_cuda
        stream, index = 0, self.topology.device.index
        if slot.graph is not None:
            stream = torch._C._cuda_getCurrentRawStream(index)
            slot.wait(stream)
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
        if slot.graph is None:
            self._enqueue(slot, 0)
            return
        with self._scratch.lock:
            self._scratch.wait(stream)
            slot.graph.replay(stream)
            assert slot.sized is not None
            slot.sized.record(current_stream(index))
            self._scratch.note(stream, slot.sized)

    def _enqueue(self, slot: Slot, stream: int) -> None:
        """All kernels of a batch, in order; this is what is captured."""
        topology, recipe, s = self.topology, self.recipe, self._scratch
        assert s is not None
        num_nodes, expand_all, replace = topology.num_nodes, int(recipe.expand_all), int(recipe.replace)
        hops, full = len(recipe.fanouts), s.block_sums.numel()
        # Rows are picked in one wave: the grid that fits at once.
        most = full if SIMULATED else min(full, full_grid(s.seen, neighbor.RESIDENT_BLOCKS))
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
            run_gpu(neighbor.count_picks_gpu, grid, slot.state, topology.indptr, slot.nodes, hop, fanout, replace,
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
        """The nodes marked fresh become those of the hop after `hop`."""
        s = self._scratch
        assert s is not None
        run_gpu(fresh_nodes.count_fresh_gpu, grid, s.fresh, s.seen, s.touched, s.block_sums, stream=stream)
        run_gpu(fresh_nodes.emit_fresh_gpu, grid, slot.state, hop, quads, s.fresh, s.seen, s.touched, s.block_sums,
                s.local_of_node, slot.nodes, stream=stream)  # fmt: skip

    def _finish(self, pending: Pending) -> None:
        with self._lock:
            if pending._result is not None or pending._error is not None:
                return
            try:
                if pending.stream is None or is_current(pending.stream):
                    pending._result = self._read(pending)
                else:
                    with kept_stream(pending.stream.device_index):
                        set_stream(pending.stream)
                        pending._result = self._read(pending)
            except Exception as error:
                pending._error = error
            finally:
                self._pending.remove(pending)

    def _read(self, pending: Pending) -> Sample:
        while True:
            slot = pending._slot
            assert slot is not None
            if slot.sized is not None:
                # The one wait of the batch; other threads run meanwhile.
                slot.sized.synchronize()
            state = slot.outbox_words.tolist()
            if state[BAD_SEED] != NO_POSITION:
                value = int(pending.seeds[state[BAD_SEED]])
                raise IdError(f"seeds must lie in [0, {self.topology.num_nodes}), got {value}")
            if state[NEEDED_EDGES] == 0:
                return self._export(slot, state, pending.seeds)
            needed = max(state[NEEDED_EDGES] + state[NEEDED_EDGES] // 4, 2 * slot.num_edges)
            worst = self.recipe.worst_case(slot.num_seeds, self.topology.num_nodes, self.topology.num_edges)
            needed = needed if worst is None else min(needed, max(worst, state[NEEDED_EDGES]))
            pending._slot = self._make_slot(slot, slot.num_seeds, needed)
            self._enqueue_batch(pending)

    def _export(self, slot: Slot, state: list[int], seeds: Tensor | Ends) -> Sample:
        hops = len(self.recipe.fanouts)
        node_counts = state[NODES : NODES + hops + 1]
        edge_counts = state[EDGES : EDGES + hops + 1]
        num_nodes, num_edges = node_counts[-1], edge_counts[-1]
        # Like another tensor of int64: torch takes twice as long where a dtype and a device are given.
        n_id, memory = slot.arrived.new_empty(num_nodes), slot.arrived.new_empty(3 * num_edges)
        # Both come from one piece of memory, as each piece takes the host longer than a launch until it is free again.
        ends, e_id = memory.unsafe_split_with_sizes([2 * num_edges, num_edges])
        edge_index = ends.view(2, num_edges)
        run_gpu(relabel.export_batch_gpu, grid_for(max(num_nodes, num_edges), n_id), slot.sources, slot.targets,
                slot.ids, slot.nodes, edge_index, e_id, n_id)  # fmt: skip
        placed = self._place(slot, seeds, node_counts[0]) if isinstance(seeds, Ends) else None
        slot.note_export()
        return Sample(n_id, edge_index, e_id, node_counts, edge_counts, (n_id, memory, *(placed or ())), placed,
                      self.recipe.max_degree)  # fmt: skip

    def _place(self, slot: Slot, ends: Ends, num_seeds: int) -> PlacedEnds:
        """Where the ends, which are left in `arrived`, stand among the seeds."""
        places = slot.arrived.new_empty(ends.numel())
        labels = places.new_empty(ends.num_pairs if ends.has_labels else 0, dtype=torch.float32)
        run_gpu(link.place_ends_gpu, grid_for(places.numel(), places), slot.nodes, slot.arrived, num_seeds,
                ends.num_links, places, labels)  # fmt: skip
        return PlacedEnds(places, labels)


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
