"""The plan on the CPU: the loops of `kernels/` hop after hop, exact sizes, no graph.

Arrays are NumPy's between the loops: torch would wake its own threads for them, which then spin beside Numba's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import IdError
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.kernels.local_ids import bitmap, new_nodes, relabel
from pyg_direct.kernels.sampling import uniform
from pyg_direct.object_text import one_line, show_fanouts
from pyg_direct.ops.argument_checks import check_below
from pyg_direct.ops.local_ids.relabel_nodes import cpu_bitmaps, num_words
from pyg_direct.ops.run_kernel import cpu_chunks, threads_for
from pyg_direct.ops.sampling.sample_uniform import cpu_picks
from pyg_direct.sampling.sampling_options import Recipe, Sample, empty_sample

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
