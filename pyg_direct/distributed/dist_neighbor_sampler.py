"""`DistNeighborSampler`: PyG's sampler interface over a graph in parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace as replace_fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import (
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import SubgraphType

from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.edge_queries import EdgesOfAll
from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import LINKS, NODES, EdgeType
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_flag, check_ids
from pyg_direct.sampler.graph_reader import Parts
from pyg_direct.sampler.keyed_sampler import Drawn
from pyg_direct.sampler.link_seeds import NegativeSource, check_exclusion
from pyg_direct.sampler.neighbor_sampler import NeighborSampler, Opened, check_choices
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.negative_links import Edges
from pyg_direct.sampling.random_key import check_seed
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.seeds import Excluded
from pyg_direct.sampling.uniform_plan import open_plan


@dataclass(eq=False)
class _DistParts(Parts):
    """Description of a graph in parts: no edges, but queries of them."""

    graph: DistGraph | None = None

    def edge_set(self, edge_type: EdgeType | None, num_sources: int, num_targets: int, device: torch.device) -> Edges:
        """Make the set of edges of a relation that negatives avoid."""
        assert self.graph is not None
        if self.graph.whole is not None:
            return self.graph.whole.edge_set(self.graph.edge_types[0] if edge_type is None else edge_type)
        return EdgesOfAll(self.graph.pairs, self.graph.edge_types[0] if edge_type is None else edge_type)

    def is_reverse(self, edge_type: EdgeType, other: EdgeType) -> bool | None:
        """Return None: edges of other parts are not known here."""
        return None


class DistNeighborSampler(NeighborSampler):
    """Sampler around nodes and links of a graph in parts; samples equal `NeighborSampler` on the whole graph.

    Unless the graph lies in one memory, its calls are collective: every process makes them, with its own seeds.

    Args:
        graph: The graph.
        num_neighbors, subgraph_type, replace, disjoint, temporal_strategy: See `NeighborSampler`.
        time_comparison, time_window, strict_negatives, exclude_target_edges, seed: See `NeighborSampler`.
        rev_edge_type: With `exclude_target_edges="reverse"`: the relation of the reverse edges, unless it is `rev_...`.
        time_attr: Any name: neighbors are sampled by the times of the partition.
        weight_attr: Any name: neighbors are drawn by the weights of the partition.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value; also if the partition has no times or weights.

    Example:
        >>> import torch.distributed as dist
        >>> from torch_geometric.sampler import NodeSamplerInput
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> manifest = partition_graph("ring", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_parts=1)
        >>> sampler = DistNeighborSampler(DistGraph("ring", device="cpu"), [-1, -1])
        >>> sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([2]))).node.tolist()
        [2, 1, 0]
        >>> dist.destroy_process_group()
    """

    # Whether captured samples come with the rows of their nodes: those of a loader.
    _fetches_rows = False

    def __init__(self, graph: DistGraph, num_neighbors: Any, subgraph_type: Any = "directional", replace: bool = False,
                 disjoint: bool = False, temporal_strategy: str = "uniform", time_attr: str | None = None,
                 weight_attr: str | None = None, *, seed: int | None = None, time_comparison: str = "<=",
                 time_window: int | None = None, strict_negatives: bool = False,
                 exclude_target_edges: bool | str = False, rev_edge_type: EdgeType | None = None
                 ) -> None:  # fmt: skip
        if not isinstance(graph, DistGraph):
            raise ArgumentError(f"graph must be a DistGraph, got {type(graph).__name__}")
        # Not the base class's constructor, which reads a whole graph.
        manifest = graph.part.manifest
        has_times = any(e.time is not None for e in manifest.nodes) or any(e.time is not None for e in manifest.edges)
        has_weights = any(entry.weighted for entry in manifest.edges)
        for name, value, has in (("time_attr", time_attr, has_times), ("weight_attr", weight_attr, has_weights)):
            if value is not None and not has:
                raise ArgumentError(f"{name} must be None for a graph partitioned without, got {value!r}")
        self.graph, self.data, self.device = graph, graph.skeleton(), graph.device
        self._chooses_device, self.placement, self.topology_cache = False, "auto", None
        self.seed, self._num_calls = check_seed(seed), 0
        self.time_attr, self.weight_attr, self.is_sorted = time_attr, weight_attr, True
        self.sample_direction = "forward" if manifest.direction == "in" else "backward"
        edges: Any = dict.fromkeys(graph.edge_types)
        self._opened = Opened(_DistParts(graph.num_nodes, LINKS if graph.is_homogeneous else edges,
                                         node_time=NODES if time_attr is not None else None, graph=graph))  # fmt: skip
        check_exclusion(exclude_target_edges, rev_edge_type, self._opened.parts)
        self.num_neighbors = num_neighbors
        self.subgraph_type, self.replace, self.disjoint = subgraph_type, check_flag("replace", replace), disjoint
        self.temporal_strategy = temporal_strategy
        self.time_comparison, self.time_window = time_comparison, time_window
        self.strict_negatives = check_flag("strict_negatives", strict_negatives)
        self.exclude_target_edges = exclude_target_edges
        self.rev_edge_type = rev_edge_type
        self._read_recipe()
        if time_attr is None:
            check_choices(temporal_strategy, time_comparison, time_window)
        if graph.whole is not None:
            # Collective; afterwards each process makes batches alone.
            graph.whole.place_plain() if self.is_plain else self._open_topology()

    @property
    def node_time(self) -> Any:
        """None: each process knows only the times of its own nodes."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Raises the reason why it cannot be pickled.
        return self.graph.__getstate__()

    def refresh(self) -> None:
        """Do nothing: a graph in parts does not change."""

    def _check_labor(self) -> None:
        raise ArgumentError("sampling must be 'uniform' for a graph in parts, got 'labor'; load the whole graph in "
                            "every process for it")  # fmt: skip

    def _is_uniform(self) -> bool:
        is_directional = self._subgraph_type == SubgraphType.directional and self.sample_direction == "forward"
        return (self.graph.whole is not None and self.graph.is_homogeneous and not self.disjoint and is_directional
                and self.weight_attr is None)  # fmt: skip

    def _make_plan(self, unique_seeds: bool, windows: bool = False) -> Any:
        recipe = replace_fields(self._read_recipe(), seed_windows=windows)
        if self.is_plain:
            assert self.graph.whole is not None
            own = Recipe(tuple(recipe.fanouts), recipe.replace, unique_seeds=unique_seeds)  # type: ignore[arg-type]
            return open_plan(self.graph.whole.place_plain(), own)
        has_times, has_weights = self.time_attr is not None, self.weight_attr is not None
        return self.graph.make_plan(recipe, timed=has_times, weighted=has_weights, with_rows=self._fetches_rows)

    def _open_topology(self) -> Any:
        options = {"timed": self.time_attr is not None, "weighted": self.weight_attr is not None}
        if self.graph.whole is not None:
            return self.graph.whole.place(**options, summed=self.replace).topo
        return self.graph.part.place(**options).topo

    def sample_from_nodes(self, index: NodeSamplerInput, *, key: int | None = None
                          ) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around nodes, after the batches that are prefetched.

        Args:
            index, key: See `NeighborSampler.sample_from_nodes`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
            RankError: another process failed or ended.
        """
        return self._hold(self.graph.run_in_turn(partial(super().sample_from_nodes, index, key=key)))

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, *,
                          key: int | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around links, after the batches that are prefetched.

        Args:
            index, neg_sampling, key: See `NeighborSampler.sample_from_edges`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
            RankError: another process failed or ended.
        """
        return self._hold(self.graph.run_in_turn(partial(super().sample_from_edges, index, neg_sampling, key=key)))

    def submit_together(self, inputs: Sequence[NodeSamplerInput], keys: Sequence[int]) -> PendingOutput | Finished:
        """Start to sample around the nodes of several batches; see `NeighborSampler.submit_together`.

        Args:
            inputs, keys: See `NeighborSampler.submit_together`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
            RankError: another process failed or ended.
        """
        if self._lacks_times(inputs):
            # Their owners know the times.
            return Finished([self.sample_from_nodes(index, key=key) for index, key in zip(inputs, keys, strict=True)])
        return super().submit_together(inputs, keys)

    def submit_links_together(self, inputs: Sequence[EdgeSamplerInput], neg_sampling: NegativeSampling | None,
                              keys: Sequence[int]) -> PendingOutput | Finished:  # fmt: skip
        """Start to sample around the links of several batches; see `NeighborSampler.submit_links_together`.

        Args:
            inputs, neg_sampling, keys: See `NeighborSampler.submit_links_together`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; also links without times on a
                graph with times.
            RankError: another process failed or ended.
        """
        if self._lacks_times(inputs):
            raise ArgumentError("index.time must be given for links of a graph in parts that is sampled by time, got "
                                "None")  # fmt: skip
        if self.strict_negatives and self.graph.whole is None and self.graph.communicator.captured:
            # All ranks take the captured way, in which kernels read the links.
            inputs = [_bring_links(index) for index in inputs]
        return super().submit_links_together(inputs, neg_sampling, keys)

    def _lacks_times(self, inputs: Sequence[Any]) -> bool:
        """Check if times are missing that other processes may know."""
        return self.graph.whole is None and self.is_temporal and any(index.time is None for index in inputs)

    def _hold(self, out: Any) -> Any:
        if self.device.type == "cuda" and self.graph.whole is None:
            # The sample, and its metadata of the seeds, were allocated on the stream of the exchange.
            Drawn(out).record_stream(torch.cuda.current_stream(self.device))
        return out

    def _sample(self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, *, key: int | None = None,
                excluded: Excluded | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        if self.is_temporal and seed_time is None:
            seed_time = self._find_times(seed)
        return super()._sample(seed, seed_time, key=key, excluded=excluded)

    def _find_times(self, seed: Tensor | Mapping[str, Tensor]) -> Any:
        """Fetch the times of the seeds from their owners."""
        timed = {entry.name for entry in self.graph.part.manifest.nodes if entry.time is not None}
        if not timed:
            # Edges have times; the plan reports missing ones.
            return None
        sizes = {entry.name: entry.num_nodes for entry in self.graph.part.manifest.nodes}
        if isinstance(seed, Tensor):
            kind = self.graph.node_types[0]
            return self.graph.times_of(kind, check_ids("seeds", seed, sizes[kind]).to(self.device).long())
        for kind in seed:
            if kind not in timed:
                raise ArgumentError(
                    f"seed_time must be given for seeds without times of their own, got None for {kind!r}"
                )
        checked = {kind: check_ids(f"seeds of {kind!r}", ids, sizes[kind]) for kind, ids in seed.items()}
        return {kind: self.graph.times_of(kind, ids.to(self.device).long()) for kind, ids in checked.items()}

    def _negatives(self, neg_sampling: NegativeSampling, edge_type: EdgeType | None) -> NegativeSource:
        parts = self._opened.parts
        if isinstance(parts.node_time, str):
            # Negatives are drawn from all nodes: 8 bytes per node with a time, once.
            sizes = {entry.name: entry.num_nodes for entry in self.graph.part.manifest.nodes if entry.time is not None}
            times = {kind: self.graph.times_of(kind, torch.arange(size, device=self.device))
                     for kind, size in sizes.items()}  # fmt: skip
            if times:
                parts.node_time = next(iter(times.values())) if self.graph.is_homogeneous else times
            else:
                parts.node_time, parts.edge_time = None, LINKS
        return super()._negatives(neg_sampling, edge_type)


_TIME_DTYPES = (torch.uint8, torch.int8, torch.int16, *INDEX_DTYPES)


def _bring_links(index: EdgeSamplerInput) -> EdgeSamplerInput:
    """Return links with ends and times as int64 on the host; other values are refused as on one machine."""
    changed = {}
    for name in ("row", "col", "time"):
        value = getattr(index, name)
        known = _TIME_DTYPES if name == "time" else INDEX_DTYPES
        if isinstance(value, Tensor) and value.dtype in known and (value.dtype != torch.int64 or value.is_cuda):
            changed[name] = value.cpu().long()
    if not changed:
        return index
    brought = copy.copy(index)
    vars(brought).update(changed)
    return brought
