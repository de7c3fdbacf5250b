"""The plan for id spaces too large to scan: nodes are numbered by sorting keys, with memory by the batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.ops.check import check_below
from pyg_direct.ops.neighbor import sample_neighbors
from pyg_direct.ops.relabel import relabel
from pyg_direct.sampling.sample import Recipe, Sample, empty_sample


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
            n_id, local = relabel(n_id, picks.nodes.long(), topology.num_nodes, method="sort")
            rows.append(local)
            ids.append(picks.ids)
            begin = 0 if recipe.expand_all else node_counts[-1]
            node_counts.append(n_id.numel())
            edge_counts.append(edge_counts[-1] + local.numel())
        if not rows:
            return empty_sample(seeds, 0)
        edge_index = torch.stack([torch.cat(rows), torch.cat(columns)])
        return Sample(n_id, edge_index, torch.cat(ids), node_counts, edge_counts, max_degree=recipe.max_degree)
