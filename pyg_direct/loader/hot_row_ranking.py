"""Ranking of the rows that a loader will read most, computed before its first epoch.

`rank_sampled` ranks for every loader over a `NeighborSampler`. Probabilities are computed when a cache needs them: not
on a CPU, and not if all rows are in GPU memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import (
    RANKINGS,
    ListedRows,
    Listing,
    Ranked,
    blend_reads,
    chance_of_seeds,
    count_reads,
    follow_chances,
    order_by_edge,
    warn_of_frequency,
)
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import NODES, HeteroTopo
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.loader.collate.data import Ranking
from pyg_direct.loader.collate.hetero_data import TypeRanking
from pyg_direct.ops.argument_checks import check_below, check_choice, check_topology
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.host_memory import available_bytes
from pyg_direct.sampler.keyed_sampler import is_own
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.sampling.random_key import batch_key

# Epochs from this number on are sampled only for counting.
_FIRST_EPOCH = 1 << 40
# Share of an epoch: enough to correct probabilities for other draws.
_A_LITTLE = 0.05
# Peak GPU memory for the ranking of an edge.
_EDGE_BYTES = 64


def check_ranking(hotness: str, presample: float | None) -> None:
    """Refuse unknown rankings, and warn of deprecated ones."""
    check_choice("hotness", hotness, RANKINGS)
    warn_of_frequency(hotness)
    if presample is None:
        return
    if isinstance(presample, bool) or not isinstance(presample, (int, float)) or not 0 < presample <= 1000:
        raise ArgumentError(f"presample must be a number of epochs above 0 and at most 1000, got {presample!r}")
    if hotness != "frequency":
        raise ArgumentError(f"presample={presample!r} needs hotness='frequency', which counts reads, got {hotness!r}: "
                            "leave it out")  # fmt: skip


class SeedDraw(NamedTuple):
    """Seeds of a batch.

    Attributes:
        kind: Their type; None without types.
        nodes: Input nodes, drawn without replacement in an epoch, int64 `[S]`; None for all nodes of the type, with
            replacement.
        weight: Weight of each node of the type, `[N]`, if `nodes` is None; None if they are equally likely.
    """

    kind: str | None
    batch_size: int
    nodes: Tensor | None = None
    weight: Tensor | None = None

    def find_chance(self, num_nodes: int, device: torch.device) -> Tensor:
        """Find the probability of each node to be among the seeds of a batch, float32 `[N]`."""
        if self.nodes is not None:
            return chance_of_seeds(self.nodes.to(device), num_nodes, self.batch_size)
        weight = torch.ones(num_nodes, device=device) if self.weight is None else self.weight.to(device)
        share = weight.double() / weight.double().sum()
        return -torch.expm1(self.batch_size * torch.log1p(-share)).float()


class ReadChances:
    """Probabilities of nodes and edges to be in a batch, computed once, on the first request.

    Args:
        make_lists: Returns the neighbor lists of the graph.
        parts: The nodes of each type among all; type None without types.
    """

    def __init__(self, make_lists: Callable[[], Sequence[ListedRows]], draws: Sequence[SeedDraw],
                 parts: Mapping[str | None, slice], replace: bool) -> None:  # fmt: skip
        self._make_lists, self._draws, self._parts, self._replace = make_lists, draws, parts, replace
        self._made: tuple[Tensor, list[Tensor]] | None = None

    def _compute(self) -> tuple[Tensor, list[Tensor]]:
        if self._made is None:
            lists = self._make_lists()
            device = lists[0].indptr.device if lists else torch.device("cpu")
            spared = torch.ones(max(part.stop for part in self._parts.values()), dtype=torch.float32, device=device)
            for draw in self._draws:
                part = self._parts[draw.kind]
                spared[part] *= 1 - draw.find_chance(part.stop - part.start, device)
            self._made = follow_chances(lists, 1 - spared, self._replace)
        return self._made

    def of_nodes(self, kind: str | None = None) -> Tensor:
        """Return the probabilities of the nodes of a type, float32 `[N]`."""
        return self._compute()[0][self._parts[kind]]

    def of_edges(self, indptr: Tensor, num_edges: int, eid: Tensor | None) -> Tensor:
        """Return the probabilities of the edges of the first lists by id, float32 `[E]`; see `order_by_edge`."""
        return order_by_edge(self._compute()[1][0], indptr, num_edges, eid)


def _rank_edges(loader: Any, reads: ReadChances, topology: Any) -> Ranked | None:
    """Find the probability of each edge to be in a batch; None if edges have no rows, or the device has no room."""
    (indptr, indices), store = _find_rows(topology), loader.data._store
    num_edges, eid = indices.numel(), topology.edge_ids if isinstance(topology, PlacedTopology) else topology.eid
    eid = None if eid is not None and not eid.numel() else eid
    if not any(store.is_edge_attr(key) for key in store if key not in ("edge_index", "adj_t")):
        return None
    free = free_bytes(indptr.device.index) if indptr.is_cuda else available_bytes()
    if num_edges * _EDGE_BYTES > free // 2:
        return None
    return Ranked(Ranking(indices, num_edges, num_edges), partial(reads.of_edges, indptr, num_edges, eid))


def score_nodes(loader: Any) -> Tensor:
    """Estimate how often a loader will read each node, by its `hotness`, `[N]`, on the device that samples.

    Args:
        loader: A `NeighborLoader` whose plan is open.
    """
    reads = _read_sampler(loader, loader._sampled_topology)
    assert reads is not None
    scores, num_batches = reads.of_nodes(), _count_batches(loader) if loader.hotness == "frequency" else 0
    if num_batches > 0:
        with Bar(num_batches, "ranking rows by a run of sampling", "batches") as bar:
            counts = count_reads(_sample(loader, num_batches, bar), loader._plan.topology.num_nodes)
        scores = blend_reads(counts, scores)
    return scores


class Rankings(NamedTuple):
    """Rankings of the rows of a graph under a sampler.

    Attributes:
        nodes: By node type, None without types; empty without a ranking.
        edges: Ranking of edges of a graph without types; None without a ranking.
    """

    nodes: Mapping[str | None, Listing]
    edges: Ranked | None = None


def rank_sampled(loader: Any, topology: Any) -> Rankings:
    """Rank the rows of a loader over any sampler: by probabilities if they can be computed, otherwise by degrees.

    Probabilities are known for a sampler that samples as a `NeighborSampler` does, without times and weights.

    Args:
        loader: A loader of a `Data` or `HeteroData`.
        topology: The topology of its sampler, a `CSRTopo` or `HeteroTopo`; None if it is not known.
    """
    if topology is None:
        return Rankings({})
    has_types, lists = isinstance(topology, HeteroTopo), _find_lists(loader, topology)
    kinds = [None if topology.is_homogeneous else kind for kind in topology.node_types] if has_types else [None]
    nodes: dict[str | None, Listing] = {
        kind: TypeRanking(topology, NODES if kind is None else kind) if has_types else _find_listing(lists)
        for kind in kinds
    }
    # A CPU has no second memory for hot rows.
    reads = None if loader.device.type == "cpu" else _read_sampler(loader, topology)
    if reads is None:
        return Rankings(nodes)
    if loader.hotness == "frequency":
        # Reads are counted before the first epoch.
        is_counted = loader._general is None and loader._plan is not None
        return Rankings({None: Ranked(nodes[None], score_nodes(loader))} if is_counted else nodes)
    ranked: dict[str | None, Listing] = {
        kind: Ranked(own, partial(reads.of_nodes, kind)) for kind, own in nodes.items()}  # fmt: skip
    return Rankings(ranked, None if has_types else _rank_edges(loader, reads, lists))


def _read_sampler(loader: Any, topology: Any) -> ReadChances | None:
    """Open the probabilities of a loader's reads, kept as long as its sampling options do not change; None if not
    known.
    """
    sampler = loader._sampler
    if loader.hotness == "degree" or not is_own(sampler, NeighborSampler):
        return None
    has_types = isinstance(topology, HeteroTopo)
    if has_types and (topology.is_temporal or topology.weighted.any()):
        return None
    recipe = sampler._read_recipe()
    key = topology, loader.input_data, sampler.num_neighbors, recipe.replace
    if loader._reads is None or any(old is not new for old, new in zip(loader._reads[0], key, strict=True)):
        if has_types:
            fanouts = recipe.table(topology)
            kinds = [None if topology.is_homogeneous else kind for kind in topology.node_types]
            parts = {kind: slice(int(start), int(start) + size) for kind, start, size in zip(
                kinds, topology.type_starts[:-1], topology.num_nodes.values(), strict=True)}  # fmt: skip
            make_lists: Any = partial(_list_relations, topology, fanouts)
        else:
            lists = _find_lists(loader, topology)
            nodes = slice(0, topology.node_count)
            parts, make_lists = {None: nodes}, partial(_list_rows, lists, nodes, recipe.fanouts)
        draws = loader._list_draws()
        if any(draw.kind not in parts for draw in draws):
            return None
        loader._reads = key, ReadChances(make_lists, draws, parts, recipe.replace)
    return loader._reads[1]  # type: ignore[no-any-return]


def _find_lists(loader: Any, topology: Any) -> Any:
    """Find the neighbor lists that rank rows: those that the loader's plan has placed, if it has a plan."""
    return topology if loader._plan is None else loader._plan.topology


def _find_listing(lists: CSRTopo | PlacedTopology) -> Listing:
    return Ranking.of(lists) if isinstance(lists, PlacedTopology) else lists


def _find_rows(topology: Any) -> tuple[Tensor, Tensor]:
    """Find the row offsets and neighbors of a topology, on one device, or where a plan reads them."""
    if isinstance(topology, PlacedTopology):
        return topology.indptr, topology.indices
    return topology.indptr.to(topology.indices.device), topology.indices


def _list_rows(lists: CSRTopo | PlacedTopology, nodes: slice, fanouts: Sequence[int]) -> list[ListedRows]:
    indptr, indices = _find_rows(lists)
    # The arrays may be the program's, and may have been written to; a plan checks its own.
    if not indptr.is_cuda and not isinstance(lists, PlacedTopology):
        check_topology(indptr, indices)
    return [ListedRows(indptr, indices, nodes, fanouts)]


def _list_relations(topology: HeteroTopo, fanouts: np.ndarray) -> list[ListedRows]:
    lists, (indptr, indices) = [], _find_rows(topology)
    if topology.bound is not None and not indices.is_cuda:
        check_below("neighbors of the graph", indices.numpy(), topology.bound)
    for number, expanded in enumerate(topology.expanded.tolist()):
        first, end = (int(topology.row_starts[number + step]) for step in (0, 1))
        begin, stop = (int(topology.edge_starts[number + step]) for step in (0, 1))
        start = int(topology.type_starts[expanded])
        lists.append(ListedRows(indptr[first : end + 1] - begin, indices[begin:stop], slice(start, start + end - first),
                                fanouts[:, number].tolist()))  # fmt: skip
    return lists


def _count_batches(loader: Any) -> int:
    """Count the batches to sample for counting: none if the probabilities are exact and the user requests no
    counting.
    """
    presample = loader.presample
    if presample is None:
        recipe = loader._plan.recipe
        if not recipe.replace and recipe.sampling == "uniform":
            return 0
        presample = _A_LITTLE
    return max(1, round(presample * len(loader.input_data.node) / (loader.batch_size or 1)))


def _sample(loader: Any, num_batches: int, bar: Bar) -> Iterator[Tensor]:
    """Iterate over nodes of batches, from epochs that training does not use."""
    nodes, batch_size, left = loader.input_data.node, loader.batch_size or 1, num_batches
    # Without the loader's seed a fixed one: counting takes nothing from torch's generator.
    seed = loader.seed or 0
    for epoch in itertools.count(_FIRST_EPOCH):
        generator = torch.Generator().manual_seed(seed % 2**63 + epoch % 2**20)
        order = torch.randperm(len(nodes), generator=generator, device="cpu")
        for number, part in enumerate(nodes[order].split(batch_size)):
            if left == 0:
                return
            left -= 1
            yield loader._plan.sample(part, batch_key(seed, epoch, number)).n_id
            bar.update(1)
