"""Recipes of plans: the options of a sample around seeds, checked, and the `Sample` that a plan returns.

`GeneralRecipe` holds the options of PyG for the general sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo
from pyg_direct.ops.argument_checks import check_choice, check_fanouts
from pyg_direct.ops.sampling.sample_uniform import check_sampling
from pyg_direct.sampling.seeds import PlacedEnds


@dataclass
class Sample:
    """A sampled batch: seeds first in the order given, then the new nodes of each hop, ascending.

    Attributes:
        n_id: Global node ids, int64 `[M]`.
        edge_index: Local (source, target), int64 `[2, E']`, hop after hop, sorted by target within a hop.
        e_id: Edge ids, int64 `[E']`.
        node_counts: Nodes up to and including each hop, length H + 1; node_counts[0] seeds.
        edge_counts: Edges up to and including each hop, length H + 1; edge_counts[0] = 0.
        memory: Owner of the memory of all of them, if it is known.
        ends: Of a sample around links: places of their ends among the nodes.
        max_degree: Upper bound of the edges of a node; None for none.
    """

    n_id: Tensor
    edge_index: Tensor
    e_id: Tensor
    node_counts: list[int]
    edge_counts: list[int]
    memory: tuple[Tensor, ...] = ()
    ends: PlacedEnds | None = None
    max_degree: int | None = None

    @property
    def num_sampled_nodes(self) -> list[int]:
        """New nodes of each hop, seeds first, as PyG gives them."""
        return [b - a for a, b in pairwise([0, *self.node_counts])]

    @property
    def num_sampled_edges(self) -> list[int]:
        """Edges of each hop, as PyG gives them."""
        return [b - a for a, b in pairwise(self.edge_counts)]

    def finish(self) -> Sample:
        """Return this sample, as a pending one does."""
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that the sample is read on `stream` too."""
        for ids in self.memory or (self.n_id, self.e_id, self.edge_index):
            ids.record_stream(stream)


@dataclass(frozen=True)
class Recipe:
    """Options of a sample around seeds, with one node type and uniform draws.

    Attributes:
        fanouts: Neighbors a node, per hop; -1 takes all.
        replace: Draw with replacement.
        expand_all: A hop expands all nodes so far (PyG's old NeighborSampler) instead of the new ones of the last hop
            (PyG's NeighborLoader).
        sampling: `uniform`, or `labor` for draws that the rows of a hop share (see `kernels/sampling/labor.py`).
        layer_dependency: With `labor`: all hops share their draws too.
        unique_seeds: Seeds that repeat become one, and stand ascending.
    """

    fanouts: tuple[int, ...]
    replace: bool = False
    expand_all: bool = False
    sampling: str = "uniform"
    layer_dependency: bool = False
    unique_seeds: bool = False

    @cached_property
    def max_degree(self) -> int | None:
        """Upper bound of the edges of a node of a sample; None if all neighbors are taken."""
        return largest_fanout([self.fanouts])

    def worst_case(self, num_seeds: int, num_nodes: int, num_edges: int) -> int | None:
        """Upper bound of the edges of a batch; None when a fanout takes all neighbors."""
        frontier, total, nodes = num_seeds, 0, num_seeds
        for fanout in self.fanouts:
            if fanout < 0:
                return None
            edges = frontier * fanout
            total += edges
            new = min(edges, num_nodes)
            nodes = min(nodes + new, num_seeds + num_nodes)
            frontier = nodes if self.expand_all else new
        if not self.replace and not self.expand_all:
            # Every node but a repeated seed is expanded once.
            first = num_seeds * self.fanouts[0] if self.fanouts else 0
            total = min(total, first + num_edges)
        return total


def largest_fanout(fanouts: Iterable[Iterable[int]]) -> int | None:
    """Upper bound of the edges of a target, from fanouts of hops or relations; None if one takes all neighbors."""
    flat = [fanout for part in fanouts for fanout in part]
    return None if any(fanout < 0 for fanout in flat) else max(flat, default=0)


def check_hops(fanouts: Sequence[int], limit: int, name: str) -> None:
    """Check that there are at most `limit` hops."""
    if len(fanouts) > limit:
        raise ArgumentError(f"{name} must have at most {limit} hops, got {len(fanouts)}")


def empty_sample(seeds: Tensor, hops: int) -> Sample:
    """Make the sample of a batch without hops or seeds."""
    count = seeds.numel()
    none = torch.empty(0, dtype=torch.int64, device=seeds.device)
    return Sample(seeds.long(), none.view(2, 0), none, [count] * (hops + 1), [0] * (hops + 1))


# Keys of hops must differ from each other only; the bound keeps plans comparable with plans of homogeneous graphs.
_MAX_HOPS = 31
_SUBGRAPHS = ("directional", "bidirectional", "induced")
_STRATEGIES = ("uniform", "last")
_COMPARISONS = ("<=", "<")


@dataclass(frozen=True)
class GeneralRecipe:
    """Options of a sample around seeds, with types, times and weights.

    Attributes:
        fanouts: Neighbors a node, per hop, -1 for all; or these for each relation.
        replace: Draw with replacement.
        disjoint: Each seed gets a tree of its own: a node met from two seeds stands twice. Always so with times.
        subgraph_type: `directional`: the edges sampled. `bidirectional`: these in both directions, once each.
            `induced`: all edges of the graph among the nodes sampled (of one tree, and allowed by time).
        temporal_strategy: `uniform`: allowed edges are equally likely (or by weight). `last`: the latest are taken;
            of equal times the later ones in the row.
        time_comparison: `<=`: edges up to the time of the seed are allowed, as in PyG. `<`: before it.
        time_window: Only edges after the seed's time minus this are allowed; None for no limit.
        weighted: Choose edges by their weights; without effect if the topology has none.
        seed_windows: Each seed has two times, and edges from the first to the second are allowed, both included.
        sampling: `uniform`, or `labor` for draws that the rows of all relations of a hop share, and all trees too;
            without replacement and weights.
        layer_dependency: With `labor`: all hops share their draws too.
    """

    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str = "directional"
    temporal_strategy: str = "uniform"
    time_comparison: str = "<="
    time_window: int | None = None
    weighted: bool = True
    seed_windows: bool = False
    sampling: str = "uniform"
    layer_dependency: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("subgraph_type", self.subgraph_type, _SUBGRAPHS),
                                   ("temporal_strategy", self.temporal_strategy, _STRATEGIES),
                                   ("time_comparison", self.time_comparison, _COMPARISONS)):  # fmt: skip
            check_choice(name, value, known)
        window = self.time_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or not 0 <= window < 2**63):
            raise ArgumentError(f"time_window must be None or an integer in [0, 2**63), got {window!r}")
        if self.seed_windows and window is not None:
            raise ArgumentError(f"time_window must be None where each seed has a window of its own, got {window}")
        check_sampling(self.sampling, self.replace, self.layer_dependency)

    @cached_property
    def max_degree(self) -> int | None:
        """Upper bound of the edges of one relation that a node of a sample has; None if all neighbors are taken, or
        the edges are not the picked ones."""
        if self.subgraph_type != "directional":
            return None
        return largest_fanout(self.fanouts.values() if isinstance(self.fanouts, Mapping) else [self.fanouts])

    def table(self, topo: HeteroTopo) -> np.ndarray:
        """Fanouts by hop and relation, int64 `[H, R]`."""
        fanouts = self.fanouts
        if not isinstance(fanouts, Mapping):
            fanouts = dict.fromkeys(topo.edge_types, fanouts)
            # A graph without relations has hops too.
            check_fanouts("fanouts", self.fanouts)  # type: ignore[arg-type]
        for edge_type in fanouts:
            if edge_type not in topo.edge_types:
                raise ArgumentError(f"fanouts must name known relations, got {edge_type} of {topo.edge_types}")
        for edge_type in topo.edge_types:
            if edge_type not in fanouts:
                raise ArgumentError(f"fanouts must name every relation, {edge_type} is missing")
        rows = [check_fanouts(f"fanouts[{edge_type}]", fanouts[edge_type]) for edge_type in topo.edge_types]
        hops = {len(row) for row in rows}
        if len(hops) > 1:
            raise ArgumentError(f"fanouts must have the same number of hops for every relation, got {sorted(hops)}")
        if not rows and not isinstance(self.fanouts, Mapping):
            return np.zeros((len(self.fanouts), 0), np.int64)
        num_hops = hops.pop() if hops else 0
        check_hops(rows[0] if rows else [], _MAX_HOPS, "fanouts")
        return np.array(rows, dtype=np.int64).reshape(len(rows), num_hops).T
