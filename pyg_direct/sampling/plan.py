"""The plan on a GPU: all hops of a batch as one captured graph, with one wait for its sizes.

Buffers have a fixed capacity, counts stay on the device, and writes are checked against the capacity; a batch that
needs more says so in its state and is sampled again, under the same key, by a larger plan. So a result never depends
on the capacity.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from pyg_direct.errors import IdError, MemoryLimitError
from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.kernels import bitmap, neighbor, relabel
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.kernels.state import BAD_SEED, EDGES, HEADER, KEY, NEEDED_EDGES, NO_POSITION, NODES, NUM_SEEDS, STATE
from pyg_direct.ops.launch import full_grid, grid_for, run_gpu
from pyg_direct.ops.neighbor import pick_kernel
from pyg_direct.ops.relabel import num_words
from pyg_direct.runtime.driver import tolerate_captures
from pyg_direct.runtime.graph import CapturedGraph, copy_words, fill_words
from pyg_direct.sampling.sample import Recipe, Sample, empty_sample

# Edges up to which a plan is made for the worst case at once; above, it grows with what batches need.
_WORST_CASE_EDGES = 1 << 24
_FIRST_EDGES = 1 << 20
_MAX_EDGES = 2**31 - 1
# Work a block should have before another block is worth its share of the running sums.
_ROWS_PER_BLOCK = 16
_WORDS_PER_BLOCK = 2 * THREADS
_FAR = 0x7F7F7F7F


class _Buffers:
    """Arrays of fixed capacity that the captured kernels read and write."""

    def __init__(self, topology: PlacedTopology, num_seeds: int, num_edges: int) -> None:
        device, index_dtype = topology.device, topology.indices.dtype
        pinned = device.type == "cuda"
        words = num_words(topology.num_nodes)
        num_nodes = num_seeds + min(num_edges, topology.num_nodes)
        self.num_seeds, self.num_edges = num_seeds, num_edges
        # The header and the seeds are neighbors, so that one copy brings both.
        self.inbox = torch.empty(HEADER + num_seeds, dtype=torch.int64, pin_memory=pinned)
        self.outbox = torch.empty(STATE, dtype=torch.int64, pin_memory=pinned)
        self.arrived = torch.empty(HEADER + num_seeds, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.nodes = torch.empty(num_nodes, dtype=index_dtype, device=device)
        self.locals_of_rank = torch.empty(num_nodes, dtype=torch.int32, device=device)
        self.sources = torch.empty(num_edges, dtype=index_dtype, device=device)
        self.positions = torch.empty(num_edges, dtype=torch.int64, device=device)
        self.targets = torch.empty(num_edges, dtype=torch.int32, device=device)
        self.seen = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.fresh = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.ranks = torch.empty(words, dtype=torch.int32, device=device)
        self.block_sums = torch.empty(full_grid(self.state), dtype=torch.int64, device=device)


class Pending:
    """A batch on its way: enqueued, its sizes not yet read."""

    def __init__(self, plan: GpuPlan, seeds: Tensor, key: int) -> None:
        self._plan, self.seeds, self.key = plan, seeds, key
        # Whoever finishes it, it is read on the stream it was enqueued on: there its user expects the result.
        self.stream = torch.cuda.current_stream(plan.topology.device) if plan._sized is not None else None
        self._result: Sample | None = None
        self._error: Exception | None = None

    def finish(self) -> Sample:
        """Wait for the sizes and write the batch into tensors of its own, on torch's current stream.

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
    """Samples batches on one GPU. One batch is on its way at a time: a new one finishes the one before."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        self.topology, self.recipe = topology, recipe
        self._buffers: _Buffers | None = None
        self._graph: CapturedGraph | None = None
        self._pending: Pending | None = None
        self._sized = torch.cuda.Event() if topology.device.type == "cuda" else None
        self._exported = torch.cuda.Event() if topology.device.type == "cuda" else None
        self.num_captures = 0

    def __del__(self) -> None:
        # The graph reads and writes page-locked memory that the allocator would hand on at once: a batch that nobody
        # waited for must be over first.
        for event in (getattr(self, "_sized", None), getattr(self, "_exported", None)):
            if event is not None:
                with contextlib.suppress(Exception), tolerate_captures():
                    event.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes of GPU memory held by the plan."""
        if self._buffers is None:
            return 0
        return sum(t.numel() * t.element_size() for t in vars(self._buffers).values() if isinstance(t, Tensor))

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """The batch of `seeds` under `key`."""
        return self.submit(seeds, key).finish()

    def submit(self, seeds: Tensor, key: int) -> Pending:
        """Enqueue a batch on torch's current stream and return at once.

        Args:
            seeds: int64 `[B]`, on the CPU (checked before) or on the plan's GPU (checked by the kernels).
            key: Key of its draws.
        """
        if self._pending is not None:
            self._finish(self._pending)
        pending = Pending(self, seeds, key)
        if seeds.numel() == 0 or self.topology.num_nodes == 0:
            if seeds.numel() > 0:
                pending._error = IdError(f"seeds must lie in [0, 0), got {int(seeds[0])}")
            else:
                pending._result = empty_sample(seeds.to(self.topology.device), len(self.recipe.fanouts))
            return pending
        if self._buffers is None or seeds.numel() > self._buffers.num_seeds:
            self._grow(seeds.numel(), self._edges_at_first(seeds.numel()))
        self._enqueue_batch(pending)
        self._pending = pending
        return pending

    def _edges_at_first(self, num_seeds: int) -> int:
        topology = self.topology
        worst = self.recipe.worst_case(num_seeds, topology.num_nodes, topology.num_edges)
        if worst is not None and worst <= _WORST_CASE_EDGES:
            return max(worst, 1)
        known = 0 if self._buffers is None else self._buffers.num_edges
        return max(known, _FIRST_EDGES if not SIMULATED else 64)

    def _grow(self, num_seeds: int, num_edges: int) -> None:
        if num_edges > _MAX_EDGES:
            raise MemoryLimitError(
                f"a batch must have fewer than {_MAX_EDGES} edges, and {num_seeds} seeds with fanouts "
                f"{list(self.recipe.fanouts)} need {num_edges}; use fewer seeds or smaller fanouts"
            )
        before, self._buffers, self._graph = self._buffers, None, None
        if before is not None and self._exported is not None:
            torch.cuda.current_stream(self.topology.device).synchronize()
            self._exported.synchronize()
        if before is not None:
            num_seeds = max(num_seeds, before.num_seeds)
        del before
        try:
            self._buffers = _Buffers(self.topology, num_seeds, num_edges)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"a plan for {num_seeds} seeds and {num_edges} edges must fit free GPU memory; use fewer seeds or "
                f"smaller fanouts: {error}"
            ) from error
        if not SIMULATED:
            index = self.topology.device.index
            # Compile and load before the capture, in which nothing may be loaded.
            with torch.cuda.device(index):
                self._buffers.arrived.zero_()
                self._enqueue(torch._C._cuda_getCurrentRawStream(index))
                torch.cuda.current_stream(index).synchronize()
            self._graph = CapturedGraph(self._enqueue, index)
        self.num_captures += 1

    def _enqueue_batch(self, pending: Pending) -> None:
        buffers, seeds = self._buffers, pending.seeds
        assert buffers is not None
        if self._exported is not None:
            # The batch before, maybe of another stream, must have left the buffers.
            self._exported.wait()
        count = seeds.numel()
        header = [0] * HEADER
        header[KEY], header[NUM_SEEDS], header[BAD_SEED] = _signed(pending.key), count, NO_POSITION
        buffers.inbox[:HEADER] = torch.tensor(header)
        if not seeds.is_cuda:
            buffers.inbox[HEADER : HEADER + count] = seeds
            buffers.arrived[: HEADER + count].copy_(buffers.inbox[: HEADER + count], non_blocking=True)
        else:
            buffers.arrived[:HEADER].copy_(buffers.inbox[:HEADER], non_blocking=True)
            buffers.arrived[HEADER : HEADER + count].copy_(seeds)
        if self._graph is None:
            self._enqueue(0)
        else:
            self._graph.replay()
            assert self._sized is not None
            self._sized.record()

    def _enqueue(self, stream: int) -> None:
        """All kernels of a batch, in order; this is what is captured."""
        b, topology, recipe = self._buffers, self.topology, self.recipe
        assert b is not None
        num_nodes, expand_all, replace = topology.num_nodes, int(recipe.expand_all), int(recipe.replace)
        full = b.block_sums.numel()
        words_grid = max(1, min(full, b.seen.numel() // _WORDS_PER_BLOCK))
        copy_words(b.state, b.arrived[:HEADER], stream)
        fill_words(b.seen, 0, stream)
        fill_words(b.locals_of_rank, _FAR, stream)
        run_gpu(relabel.load_seeds_gpu, grid_for(b.num_seeds, b.state), b.state, b.arrived[HEADER:], b.seen, b.nodes,
                num_nodes, stream=stream)  # fmt: skip
        rows = b.num_seeds
        for hop, fanout in enumerate(recipe.fanouts):
            grid = max(1, min(full, rows // _ROWS_PER_BLOCK))
            run_gpu(neighbor.count_picks_gpu, grid, b.state, topology.indptr, b.nodes, hop, fanout, replace, expand_all,
                    b.block_sums, stream=stream)  # fmt: skip
            run_gpu(pick_kernel(fanout), grid, b.state, topology.indptr, topology.indices, b.nodes, b.block_sums, hop,
                    fanout, replace, expand_all, b.num_edges, b.sources, b.positions, b.targets, b.seen, b.fresh,
                    stream=stream)  # fmt: skip
            run_gpu(bitmap.sum_words_gpu, words_grid, b.fresh, b.block_sums, stream=stream)
            run_gpu(relabel.emit_fresh_gpu, words_grid, b.state, hop, b.fresh, b.seen, b.block_sums, b.nodes,
                    stream=stream)  # fmt: skip
            rows = b.nodes.numel() if fanout < 0 else min(b.nodes.numel(), rows * (fanout + expand_all))
        run_gpu(bitmap.sum_words_gpu, words_grid, b.seen, b.block_sums, stream=stream)
        run_gpu(bitmap.rank_words_gpu, words_grid, b.seen, b.block_sums, b.ranks, stream=stream)
        run_gpu(relabel.locate_nodes_gpu, grid_for(b.nodes.numel(), b.state), b.state, len(recipe.fanouts), b.nodes,
                b.seen, b.ranks, b.locals_of_rank, stream=stream)  # fmt: skip
        copy_words(b.outbox, b.state, stream)

    def _finish(self, pending: Pending) -> None:
        if pending._result is not None or pending._error is not None:
            return
        try:
            with torch.cuda.stream(pending.stream):
                pending._result = self._read(pending)
        except Exception as error:
            pending._error = error
        finally:
            if self._pending is pending:
                self._pending = None

    def _read(self, pending: Pending) -> Sample:
        while True:
            buffers = self._buffers
            assert buffers is not None
            if self._sized is not None:
                # The one wait of the batch; other threads run meanwhile.
                self._sized.synchronize()
            state = buffers.outbox.tolist()
            if state[BAD_SEED] != NO_POSITION:
                value = int(pending.seeds[state[BAD_SEED]])
                raise IdError(f"seeds must lie in [0, {self.topology.num_nodes}), got {value}")
            if state[NEEDED_EDGES] == 0:
                return self._export(state)
            needed = max(state[NEEDED_EDGES] + state[NEEDED_EDGES] // 4, 2 * buffers.num_edges)
            worst = self.recipe.worst_case(buffers.num_seeds, self.topology.num_nodes, self.topology.num_edges)
            self._grow(buffers.num_seeds, needed if worst is None else min(needed, max(worst, state[NEEDED_EDGES])))
            self._enqueue_batch(pending)

    def _export(self, state: list[int]) -> Sample:
        b, hops, device = self._buffers, len(self.recipe.fanouts), self.topology.device
        assert b is not None
        node_counts = state[NODES : NODES + hops + 1]
        edge_counts = state[EDGES : EDGES + hops + 1]
        num_nodes, num_edges = node_counts[-1], edge_counts[-1]
        n_id = torch.empty(num_nodes, dtype=torch.int64, device=device)
        edge_index = torch.empty(2, num_edges, dtype=torch.int64, device=device)
        e_id = torch.empty(num_edges, dtype=torch.int64, device=device)
        run_gpu(relabel.export_batch_gpu, grid_for(max(num_nodes, num_edges), n_id), b.sources, b.positions, b.targets,
                b.nodes, b.seen, b.ranks, b.locals_of_rank, self.topology.edge_ids, edge_index.view(-1), e_id,
                n_id)  # fmt: skip
        if self._exported is not None:
            self._exported.record()
        return Sample(n_id, edge_index, e_id, node_counts, edge_counts)


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
