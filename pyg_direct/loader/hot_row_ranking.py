"""Which rows a loader will read most, found out before its first epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import (
    RANKINGS,
    Listing,
    Ranked,
    blend_reads,
    count_reads,
    expected_edge_reads,
    expected_reads,
)
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.loader.collate.data import Ranking
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.sampling.random_key import batch_key

# Epochs of this number and above are sampled for counting alone.
_FIRST_EPOCH = 1 << 40
# Of an epoch: enough to correct chances of other draws.
_A_LITTLE = 0.05
# GPU memory that it takes to rank an edge, at the peak.
_EDGE_BYTES = 64


def check_ranking(hotness: str, presample: float | None) -> None:
    """Refuse what ranks no rows.

    Raises:
        ArgumentError: named argument, rule and value.
    """
    if hotness not in RANKINGS:
        raise ArgumentError(f"hotness must be one of {', '.join(RANKINGS)}, got {hotness!r}")
    if presample is None:
        return
    if isinstance(presample, bool) or not isinstance(presample, (int, float)) or not 0 < presample <= 1000:
        raise ArgumentError(f"presample must be a number of epochs above 0 and at most 1000, got {presample!r}")
    if hotness != "frequency":
        raise ArgumentError(f"presample={presample!r} needs hotness='frequency', which counts reads, got {hotness!r}")


def rank_rows(loader: Any, placed: PlacedTopology, plan: Any) -> Listing:
    """What ranks the rows of a loader's node attributes, by its `hotness`."""
    listing = Ranking.of(placed)
    # Where all rows are alike, or none is copied, nothing is to be ranked.
    if loader.hotness == "degree" or loader.device.type == "cpu":
        return listing
    return Ranked(*listing, score_nodes(loader, placed, plan))


def rank_edges(loader: Any, placed: PlacedTopology) -> Ranked | None:
    """The chance of each edge to be in a batch, where that ranks nodes as well and a GPU has room for it; else None."""
    store = loader.data._store
    has_rows = any(store.is_edge_attr(key) for key in store if key not in ("edge_index", "adj_t"))
    if loader.hotness != "expected" or loader.device.type == "cpu" or not has_rows:
        return None
    if placed.num_edges * _EDGE_BYTES > free_bytes(loader.device.index) // 2:
        return None
    eid = placed.edge_ids if placed.edge_ids.numel() else None
    reads = expected_edge_reads(placed.indptr, placed.indices, _nodes_of(loader, placed), loader.num_neighbors,
                                loader.batch_size or 1, eid)  # fmt: skip
    return Ranked(placed.indices, placed.num_edges, placed.num_edges, reads)


def _nodes_of(loader: Any, placed: PlacedTopology) -> Tensor:
    nodes: Tensor | None = loader.input_data.node
    return torch.arange(placed.num_nodes, device="cpu") if nodes is None else nodes


def score_nodes(loader: Any, placed: PlacedTopology, plan: Any) -> Tensor:
    """How often a loader will read each node, by its `hotness`, `[N]`, on the device that samples."""
    nodes = _nodes_of(loader, placed)
    scores = expected_reads(placed.indptr, placed.indices, nodes, loader.num_neighbors, loader.batch_size or 1)
    num_batches = _count_batches(loader, nodes) if loader.hotness == "frequency" else 0
    if num_batches > 0:
        with Bar(num_batches, "ranking rows by a run of sampling", "batches") as bar:
            counts = count_reads(_sample(loader, nodes, plan, num_batches, bar), placed.num_nodes)
        scores = blend_reads(counts, scores)
    return scores


def _count_batches(loader: Any, nodes: Tensor) -> int:
    """Batches whose reads are counted: none where the chances are those of the draws and nobody asks for more."""
    presample = loader.presample
    if presample is None:
        recipe = loader._recipe
        if not recipe.replace and recipe.sampling == "uniform":
            return 0
        presample = _A_LITTLE
    return max(1, round(presample * len(nodes) / (loader.batch_size or 1)))


def _sample(loader: Any, nodes: Tensor, plan: Any, num_batches: int, bar: Bar) -> Iterator[Tensor]:
    """Nodes of so many batches of epochs, other ones than those that are trained with."""
    batch_size, left = loader.batch_size or 1, num_batches
    # Without a seed of the loader's: what is only counted takes nothing from torch's generator.
    seed = loader.seed or 0
    for epoch in itertools.count(_FIRST_EPOCH):
        generator = torch.Generator().manual_seed(seed % 2**63 + epoch % 2**20)
        order = torch.randperm(len(nodes), generator=generator, device="cpu")
        for number, part in enumerate(nodes[order].split(batch_size)):
            if left == 0:
                return
            left -= 1
            yield plan.sample(part, batch_key(seed, epoch, number)).n_id
            bar.update(1)
