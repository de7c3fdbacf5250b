"""GPU plan: all hops of a batch as one captured graph, with one wait for its sizes.

Buffers have a fixed capacity, counts stay on the device, and writes are checked against the capacity. A batch that
needs more says so in its state. It is sampled again, under the same key, by a larger plan. So a result never
depends on the capacity. Two batches may run at once, so that the GPU samples the next one while the host reads the
sizes of the last.

All plans of a topology share scratch memory (`Scratch`). Each batch has a `Slot`. One budget of GPU memory serves
the plans of a process: the least recently used plan gives its buffers back (`make_room`).

`SortingPlan` serves id spaces too large to scan. Nodes are numbered by sorting keys, with memory in proportion to
the batch alone.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import IdError, MemoryLimitError, PlacementWarning, warn
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
from pyg_direct.ops.local_ids.relabel import num_words, relabel as relabel_nodes
from pyg_direct.ops.run_kernel import check_below, full_grid, grid_for, run_gpu
from pyg_direct.ops.sampling.uniform import gpu_picks, sample_neighbors
from pyg_direct.runtime.cuda.driver import tolerate_captures
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph, fill_words
from pyg_direct.runtime.cuda.launch import current_stream, is_current, kept_stream, set_stream
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.sampling.link_endpoints import Ends, PlacedEnds
from pyg_direct.sampling.local_ids import TABLE_SHARE
from pyg_direct.sampling.sampling_options import Recipe, Sample, empty_sample

# Nodes up to which every hop reads the whole bitmap: flags would cost more than they save.
_SCAN_NODES = 1 << 27


class Scratch:
    """Memory by the number of nodes, used by one batch after the other.

    Attributes:
        seen, fresh: Bitmaps, uint32 `[W]`, empty between batches.
        local_of_node: Local ids, int32 `[N]`, or `[0]` where the ranked bitmap serves instead.
        touched: A flag, uint8, for each group of words of `fresh`; `[0]` for few nodes, all of whose groups are read.
        ranks: int32 `[W]`, or `[0]` where the table serves.
        block_sums: int64, one for each block of a full grid.
    """

    def __init__(self, topology: PlacedTopology) -> None:
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
        # Plans of several threads take turns, and batches of several streams wait for each other.
        self.lock = threading.RLock()
        self._last: tuple[int, torch.cuda.Event] | None = None
        self._topology: PlacedTopology | None = None

    @classmethod
    def of(cls, topology: PlacedTopology) -> Scratch:
        """The scratch of a topology, made once."""
        with _SCRATCH_LOCK:
            known = _SCRATCH.get(id(topology))
            if known is None:
                known = _SCRATCH[id(topology)] = cls(topology)
                # So that its id stays its own as long as the scratch lives.
                known._topology = topology
            return known

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return _count_bytes(self)

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the last batch."""
        if self._last is not None and self._last[0] != stream:
            self._last[1].wait()

    def note(self, stream: int, done: torch.cuda.Event) -> None:
        """Remember the last batch."""
        self._last = stream, done


_SCRATCH: WeakValueDictionary[int, Scratch] = WeakValueDictionary()
_SCRATCH_LOCK = threading.Lock()


class Slot:
    """Arrays of fixed capacity that hold one batch, and the graph that fills them.

    Attributes:
        num_seeds, num_edges: The capacity.
        inbox, outbox: Page-locked words that the kernels read first and write last.
        sized, exported: Events after the graph, and after the batch has left for tensors of its own.
        locals_of_rank: Local ids by rank, int32, where the scratch has no table.
    """

    def __init__(self, topology: PlacedTopology, num_seeds: int, num_edges: int, ranked: bool) -> None:
        device, index_dtype = topology.device, topology.indices.dtype
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
        self.graph: CapturedGraph | None = None
        self.sized = torch.cuda.Event() if on_gpu else None
        self.exported = torch.cuda.Event() if on_gpu else None
        self._exported_on: int | None = None

    def wait(self, stream: int) -> None:
        """Let `stream`, the current one, come after the export of the batch before."""
        if self._exported_on is not None and self._exported_on != stream:
            assert self.exported is not None
            current_stream(self.state.get_device()).wait_event(self.exported)

    def note_export(self) -> None:
        """Remember that the batch leaves on the current stream."""
        if self.exported is not None:
            stream = current_stream(self.state.get_device())
            self.exported.record(stream)
            self._exported_on = stream.cuda_stream

    @staticmethod
    def count_bytes(topology: PlacedTopology, num_seeds: int, num_edges: int) -> int:
        """About the bytes that a slot of this capacity takes."""
        edge_bytes = topology.indices.element_size() + topology.edge_ids.element_size() + 4
        node_bytes = topology.indices.element_size() + 4
        return edge_bytes * num_edges + node_bytes * (num_seeds + min(num_edges, topology.num_nodes)) + 8 * num_seeds

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        # Names are given: as the interpreter ends, those of modules are gone before objects are.
        # The graph reads and writes page-locked memory that the allocator would hand on at once: a batch that nobody
        # waited for must be over first.
        for event in (getattr(self, "sized", None), getattr(self, "exported", None)):
            if event is not None:
                with suppress(Exception), tolerate_captures():
                    event.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return _count_bytes(self)


def _count_bytes(holder: object) -> int:
    return sum(
        t.numel() * t.element_size() for t in vars(holder).values() if isinstance(t, Tensor) and not t.is_pinned()
    )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        # The simulator's GPU has no limit.
        return 2**62
    return torch.cuda.get_device_properties(device).total_memory


# Share of a GPU's memory for buffers of plans; a plan that needs more than all of it still gets it.
_SHARE = 1 / 16


class Holder(Protocol):
    """A plan, as the budget sees it."""

    @property
    def num_bytes(self) -> int:
        """Bytes it holds."""

    def release(self) -> bool:
        """Give the buffers back, unless a batch is on its way in them; they are made again when needed."""


_HOLDERS: OrderedDict[int, weakref.ref[Holder]] = OrderedDict()


def touch(holder: Holder) -> None:
    """Note that a plan is used now."""
    number = id(holder)
    if number in _HOLDERS:
        _HOLDERS.move_to_end(number)
    else:
        # Bound to the table: as the interpreter ends, names of this module are gone before plans are.
        _HOLDERS[number] = weakref.ref(holder, partial(_HOLDERS.pop, number))


def make_room(num_bytes: int, holder: Holder, device: torch.device, *, all_of_it: bool = False) -> None:
    """Let other plans give buffers back until `num_bytes` more fit the budget, or all of them (`all_of_it`)."""
    limit = 0 if all_of_it else int(_SHARE * torch.cuda.get_device_properties(device).total_memory)
    plans = [plan for plan in (ref() for ref in list(_HOLDERS.values())) if plan is not None]
    held = sum(plan.num_bytes for plan in plans) + num_bytes
    for plan in plans:
        if held <= limit:
            return
        if plan is not holder:
            before = plan.num_bytes
            held -= before if plan.release() else 0


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
        """The nodes marked fresh become those of the hop after `hop`."""
        s = self._scratch
        assert s is not None
        run_gpu(new_nodes.count_fresh_gpu, grid, s.fresh, s.seen, s.touched, s.block_sums, stream=stream)
        run_gpu(new_nodes.emit_fresh_gpu, grid, slot.state, hop, quads, s.fresh, s.seen, s.touched, s.block_sums,
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
        run_gpu(relabel.place_ends_gpu, grid_for(places.numel(), places), slot.nodes, slot.arrived, num_seeds,
                ends.num_links, places, labels)  # fmt: skip
        return PlacedEnds(places, labels)


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


class SortingPlan:
    """Samples hop after hop on the device of the topology; same batches as the plans that use bitmaps."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        self.topology, self.recipe = topology, recipe

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """The batch of `seeds` (int64 `[B]` on the device of the topology) under `key`.

        Raises:
            IdError: a seed lies outside the graph.
        """
        topology, recipe = self.topology, self.recipe
        topology.check_unchanged()
        if not seeds.is_cuda:
            check_below("seeds", seeds.numpy(), topology.num_nodes)
        if recipe.unique_seeds:
            seeds = seeds.unique()
        if seeds.numel() == 0:
            return empty_sample(seeds, len(recipe.fanouts))
        n_id = seeds.long()
        node_counts, edge_counts = [seeds.numel()], [0]
        rows, columns, ids = [], [], []
        begin = 0
        for hop, fanout in enumerate(recipe.fanouts):
            if not seeds.is_cuda:
                topology.check_rows(n_id[begin:].numpy())
            picks = sample_neighbors(topology.indptr, topology.indices, n_id[begin:], fanout=fanout, key=key, hop=hop,
                                     replace=recipe.replace, edge_ids=topology.edge_ids,
                                     pairs=topology.pairs, sampling=recipe.sampling,
                                     layer_dependency=recipe.layer_dependency)  # fmt: skip
            if not seeds.is_cuda:
                check_below("neighbors of the topology", picks.nodes.numpy(), topology.num_nodes)
            targets = torch.arange(begin, n_id.numel(), device=n_id.device)
            columns.append(targets.repeat_interleave(picks.counts))
            # The nodes so far are the seeds of this numbering: they keep their places, new ones follow.
            n_id, local = relabel_nodes(n_id, picks.nodes.long(), topology.num_nodes, method="sort")
            rows.append(local)
            ids.append(picks.ids)
            begin = 0 if recipe.expand_all else node_counts[-1]
            node_counts.append(n_id.numel())
            edge_counts.append(edge_counts[-1] + local.numel())
        if not rows:
            return empty_sample(seeds, 0)
        edge_index = torch.stack([torch.cat(rows), torch.cat(columns)])
        return Sample(n_id, edge_index, torch.cat(ids), node_counts, edge_counts, max_degree=recipe.max_degree)
