"""The plan on the CPU: the loops of `kernels/` hop after hop, exact sizes, no graph."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.kernels import bitmap, neighbor, relabel
from pyg_direct.ops.launch import cpu_chunks, run_cpu
from pyg_direct.ops.relabel import num_words
from pyg_direct.sampling.sample import Recipe, Sample, empty_sample


class CpuPlan:
    """Samples batches with Numba threads; keeps two bitmaps of N / 8 bytes between batches."""

    def __init__(self, topology: PlacedTopology, recipe: Recipe) -> None:
        self.topology, self.recipe = topology, recipe
        self._seen = torch.zeros(num_words(topology.num_nodes), dtype=torch.uint32)
        self._fresh = torch.zeros_like(self._seen)
        self._ranks = torch.empty(self._seen.numel(), dtype=torch.int32)
        self._lock = threading.Lock()

    def sample(self, seeds: Tensor, key: int) -> Sample:
        """The batch of `seeds` (checked, int64 `[B]` on the CPU) under `key`."""
        if seeds.numel() == 0:
            return empty_sample(seeds, len(self.recipe.fanouts))
        with self._lock:
            return self._sample(seeds, key)

    def _sample(self, seeds: Tensor, key: int) -> Sample:
        topology, recipe = self.topology, self.recipe
        chunks, sums = cpu_chunks(), np.zeros(cpu_chunks(), np.int64)
        seen, fresh = self._seen, self._fresh
        pieces = [seeds.to(topology.indices.dtype)]
        node_counts, edge_counts, hops = [seeds.numel()], [0], []
        run_cpu(relabel.mark_fresh_cpu, pieces[0], fresh, seen, chunks)
        begin = 0
        for hop, fanout in enumerate(recipe.fanouts):
            frontier = torch.cat(pieces) if recipe.expand_all else pieces[-1]
            offsets = torch.empty(frontier.numel() + 1, dtype=torch.int64)
            run_cpu(neighbor.count_picks_cpu, topology.indptr, frontier, fanout, recipe.replace, sums, offsets)
            sources = frontier.new_empty(int(offsets[-1]))
            positions = torch.empty(sources.numel(), dtype=torch.int64)
            run_cpu(neighbor.pick_neighbors_cpu, topology.indptr, topology.indices, frontier, offsets, np.uint64(key),
                    hop, fanout, recipe.replace, chunks, sources, positions)  # fmt: skip
            hops.append((begin, offsets, sources, positions))
            run_cpu(relabel.mark_fresh_cpu, sources, seen, fresh, chunks)
            new = frontier.new_empty(min(sources.numel(), topology.num_nodes))
            run_cpu(relabel.emit_fresh_cpu, fresh, seen, sums, new, 0)
            pieces.append(new[: int(sums.sum())])
            begin = 0 if recipe.expand_all else node_counts[-1]
            node_counts.append(node_counts[-1] + pieces[-1].numel())
            edge_counts.append(edge_counts[-1] + sources.numel())
        return self._export(torch.cat(pieces), hops, node_counts, edge_counts, sums)

    def _export(self, nodes: Tensor, hops: list[tuple[int, Tensor, Tensor, Tensor]], node_counts: list[int],
                edge_counts: list[int], sums: np.ndarray) -> Sample:  # fmt: skip
        seen, ranks, edge_ids = self._seen, self._ranks, self.topology.edge_ids
        run_cpu(bitmap.rank_words_cpu, seen, ranks, sums)
        local = torch.empty(nodes.numel(), dtype=torch.int32)
        run_cpu(relabel.locate_nodes_cpu, nodes, node_counts[0], seen, ranks, local)
        edge_index = torch.empty(2, edge_counts[-1], dtype=torch.int64)
        e_id = torch.empty(edge_counts[-1], dtype=torch.int64)
        for hop, (begin, offsets, sources, positions) in enumerate(hops):
            part = slice(edge_counts[hop], edge_counts[hop + 1])
            run_cpu(relabel.export_hop_cpu, begin, offsets, sources, positions, seen, ranks, local, edge_ids,
                    cpu_chunks(), edge_index[0, part], edge_index[1, part], e_id[part])  # fmt: skip
        # The bitmaps go back empty: whole when that is cheap, else only the words that were touched.
        if seen.numel() <= 16 * nodes.numel():
            seen.view(torch.int32).zero_()
        else:
            seen.view(torch.int32)[nodes.long() >> 5] = 0
        return Sample(nodes.long(), edge_index, e_id, node_counts, edge_counts)
