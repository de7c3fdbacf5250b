"""`NeighborSampler`: PyG's sampler on the device, for any loader that takes a `BaseSampler`.

`Fanouts` holds the fanouts of loaders and samplers, as PyG keeps them and by relation. `Opened` holds everything that a
sampler has opened of its graph. Links as seeds, and their negatives, are in `link_seeds.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace as replace_fields
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.typing import EdgeTypeStr

from pyg_direct.errors import ArgumentError, LoaderWarning, warn, warn_unused
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.graph.placed_topology import PLACES, check_place
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.object_text import one_line, show_fanouts, show_options
from pyg_direct.ops.argument_checks import check_fanouts, check_flag, check_ids
from pyg_direct.ops.rows.upload import upload_parts
from pyg_direct.ops.sampling.sample_uniform import check_sampling
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import check_size
from pyg_direct.sampler.graph_reader import FanoutsOf, Graph, Parts, Subgraph, read_parts, read_topology
from pyg_direct.sampler.keyed_sampler import OwnSampler, move_output, to_general_output, to_output
from pyg_direct.sampler.link_seeds import (
    MOST_EXCLUDED,
    CapturedLinks,
    Links,
    Negatives,
    NegativeSource,
    PendingLinks,
    Ways,
    check_exclusion,
    find_ways,
)
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.random_key import check_seed
from pyg_direct.sampling.sampling_options import GeneralRecipe, Recipe, check_hops
from pyg_direct.sampling.seeds import Excluded
from pyg_direct.sampling.uniform_plan import open_plan
from pyg_direct.typing import Device


class Fanouts(NumNeighbors):  # type: ignore[misc]
    """Fanouts as PyG keeps them, and by relation.

    PyG's keys join the names of a relation to one string, which two relations may share.

    Args:
        values: A list, or one for each relation.
        default: For relations that are not named.
    """

    def __init__(self, values: Any, default: Any = None) -> None:
        super().__init__(values, default)
        named = values if isinstance(values, dict) else {}
        # Written to `__dict__`, as PyG does: the class is frozen.
        self.__dict__["by_relation"] = {_read_relation(key): own for key, own in named.items()}

    @property
    def relations(self) -> dict[EdgeType, Any]:
        """Fanouts of the relations that are named."""
        return self.__dict__["by_relation"]  # type: ignore[no-any-return]


def _read_relation(key: Any) -> EdgeType:
    # Before 2.7, PyG's strings do not keep the names from which they are joined.
    is_whole = isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)
    return key if is_whole else EdgeTypeStr(key).to_tuple()


def keep_fanouts(num_neighbors: Any) -> Fanouts:
    """Keep fanouts, a list or one for each relation, in a fresh object of PyG's class."""
    if isinstance(num_neighbors, Fanouts):
        kept = Fanouts(num_neighbors.values, num_neighbors.default)
        kept.__dict__["by_relation"] = dict(num_neighbors.relations)
        return kept
    if isinstance(num_neighbors, NumNeighbors):
        # PyG's object caches the fanouts of the first graph it served.
        return Fanouts(num_neighbors.values, num_neighbors.default)
    if not isinstance(num_neighbors, Mapping):
        return Fanouts(check_fanouts("num_neighbors", num_neighbors))
    try:
        return Fanouts(dict(num_neighbors))
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"num_neighbors must be by relation: {error}, got {num_neighbors}: name each as (source "
                            "type, name, target type)") from error  # fmt: skip


def read_fanouts(num_neighbors: NumNeighbors, edge_types: Sequence[EdgeType] | None) -> Any:
    """Read fanouts per hop, or per hop for each relation in the graph's order; `edge_types` is None without types."""
    if isinstance(num_neighbors.values, (list, tuple)):
        return check_fanouts("num_neighbors", num_neighbors.values)
    if edge_types is None:
        raise ArgumentError("num_neighbors must be a list for a graph without types, got one for each relation")
    # A sampler that an older version pickled holds an object of PyG's class.
    kept = num_neighbors if isinstance(num_neighbors, Fanouts) else keep_fanouts(num_neighbors)
    named, default = kept.relations, kept.default
    unknown = [edge_type for edge_type in named if edge_type not in edge_types]
    if unknown:
        raise ArgumentError("num_neighbors must name relations of the graph, got "
                            f"{_list(unknown)}: it has {_list(edge_types)}")  # fmt: skip
    missing = [edge_type for edge_type in edge_types if edge_type not in named]
    if missing and default is None:
        raise ArgumentError("num_neighbors must have fanouts for every relation of the graph, got none for "
                            f"{_list(missing)}; [0] for each hop takes no neighbors")  # fmt: skip
    given: dict[EdgeType, Any] = {**dict.fromkeys(edge_types, default), **named}
    fanouts = {edge_type: check_fanouts(f"num_neighbors[{edge_type}]", own) for edge_type, own in given.items()}
    hops = {edge_type: len(own) for edge_type, own in fanouts.items()}
    if len(set(hops.values())) > 1:
        told = ", ".join(f"{count} for {edge_type}" for edge_type, count in hops.items())
        # Words of PyG's message, which programs may search for.
        raise ArgumentError(f"num_neighbors: the number of hops must be the same across all relations, got {told}")
    return fanouts


def _list(edge_types: Sequence[EdgeType]) -> str:
    return ", ".join(map(str, edge_types))


@dataclass
class Opened:
    """State shared by copies of a sampler: parts of its graph, placed topologies, plans, sources of negatives."""

    parts: Parts
    plans: dict[Any, Any] = field(default_factory=dict)
    # Plans by the values of the attributes, a quicker look-up; fanouts are kept alive so that their ids stay unique.
    quick: dict[Any, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    # Relations from which links are excluded, by the options that choose them.
    ways: dict[Any, Ways] = field(default_factory=dict)
    negatives: Negatives = field(init=False)

    def __post_init__(self) -> None:
        self.negatives = Negatives(self.parts)


DIRECTIONS = ("forward", "backward")


class NeighborSampler(OwnSampler):
    """Sampler around nodes and links, after PyG's class of that name; results are on `device`.

    All arguments except `data` and the placement options are attributes that can be set; the next call uses them.
    Copies share topology and plans. The n-th call under one `seed` gives equal results on every device. In a worker of
    a PyG loader the result also depends on the seed that torch gives the worker, so that workers and epochs differ.

    Args:
        data: `Data`, `HeteroData` or (`FeatureStore`, `GraphStore`).
        num_neighbors: Fanout of each hop, -1 for all; for each relation in a dict or `NumNeighbors`.
        subgraph_type: `directional`, `bidirectional` or `induced`.
        replace: Draw with replacement.
        disjoint: Each seed gets its own tree. Always so with times.
        temporal_strategy: `uniform`, or `last` for the latest neighbors.
        time_attr: Name of the times of nodes, or of edges: only neighbors up to the time of the seed are sampled.
        weight_attr: Name of edge weights that neighbors are drawn by.
        is_sorted: Neighbors are sorted by time already, which is checked.
        share_memory: Accepted and unused; there are no worker processes to share with.
        directed: Deprecated in PyG; False means `subgraph_type="induced"`.
        sample_direction: `forward` follows edges back to their sources; `backward` to their targets.
        device: Device that samples; None is the current GPU if there is one, otherwise the CPU.
        placement, topology_cache: Memory of the topology; see `NeighborLoader`.
        seed: Seed of all draws; with None each call takes a seed from torch's generator.
        time_comparison: `<=` allows neighbors at the seed's own time, as PyG does; `<` only earlier ones.
        time_window: Only neighbors after the time of the seed minus this; None for no limit.
        strict_negatives: Negative links are neither edges nor positive links of the loader (nor, in an undirected
            graph, their reverse); after 32 tries one is kept, with a warning. See `LinkNeighborLoader`.
        exclude_target_edges: True: sample as if the graph had no edges between the ends of the seed links; `"reverse"`:
            exclude their reverse edges too. See `LinkNeighborLoader`.
        rev_edge_type: The relation of the reverse edges, if it cannot be found; see `LinkNeighborLoader`.
        sampling, layer_dependency: Rule of draws without weights and replacement; see `NeighborLoader`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
        NotImplementedError: combinations that PyG does not support either: times backward, weights of stores.

    Example:
        >>> from torch_geometric.sampler import NodeSamplerInput
        >>> data = Data(edge_index=torch.tensor([[1, 2, 3], [0, 0, 1]]), num_nodes=4)  # 1 and 2 lead to 0, 3 to 1
        >>> sampler = NeighborSampler(data, [-1, -1], device="cpu")
        >>> out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0])))
        >>> out.node.tolist(), out.row.tolist(), out.col.tolist()
        ([0, 1, 2, 3], [1, 2, 3], [0, 0, 1])
    """

    # Also of samplers that an older version pickled.
    sampling, layer_dependency = "uniform", False

    def __init__(self, data: Graph, num_neighbors: FanoutsOf, subgraph_type: Subgraph = "directional",
                 replace: bool = False, disjoint: bool = False, temporal_strategy: str = "uniform",
                 time_attr: str | None = None, weight_attr: str | None = None, is_sorted: bool = False,
                 share_memory: bool = False, directed: bool = True, sample_direction: str = "forward", *,
                 device: Device = None, placement: str = "auto", seed: int | None = None, time_comparison: str = "<=",
                 time_window: int | None = None, strict_negatives: bool = False,
                 exclude_target_edges: bool | str = False, topology_cache: int | str | None = None,
                 rev_edge_type: EdgeType | None = None, sampling: str = "uniform",
                 layer_dependency: bool = False) -> None:  # fmt: skip
        check_flag("share_memory", share_memory)
        if not check_flag("directed", directed):
            subgraph_type = SubgraphType.induced
            warn("directed=False is deprecated in PyG; use subgraph_type='induced'", DeprecationWarning)  # fmt: skip
        if sample_direction not in DIRECTIONS:
            raise ArgumentError(f"sample_direction must be 'forward' or 'backward', got {sample_direction!r}")
        if sample_direction == "backward" and time_attr is not None:
            raise NotImplementedError("time_attr with sample_direction='backward', as in PyG")
        self.data = data
        self.device = resolve_device(device)
        self._chooses_device = device is None
        check_place("placement", placement, self.device, PLACES)
        if topology_cache not in (None, "auto"):
            check_size(topology_cache, "topology_cache")
        self.placement, self.topology_cache = placement, topology_cache
        self.seed, self._num_calls = check_seed(seed), 0
        self.time_attr, self.weight_attr, self.is_sorted = time_attr, weight_attr, check_flag("is_sorted", is_sorted)
        self.sample_direction = sample_direction
        self._opened = Opened(read_parts(data, time_attr, weight_attr))
        check_exclusion(exclude_target_edges, rev_edge_type, self._opened.parts)
        self.num_neighbors = num_neighbors
        self.subgraph_type, self.replace, self.disjoint = subgraph_type, check_flag("replace", replace), disjoint
        self.temporal_strategy = temporal_strategy
        self.time_comparison, self.time_window = time_comparison, time_window
        self.strict_negatives = check_flag("strict_negatives", strict_negatives)
        self.exclude_target_edges, self.rev_edge_type = exclude_target_edges, rev_edge_type
        self.sampling, self.layer_dependency = sampling, check_flag("layer_dependency", layer_dependency)
        if topology_cache not in (None, "auto"):
            if not self._is_uniform():
                raise ArgumentError(
                    f"topology_cache={topology_cache!r} needs a Data that is sampled uniformly, without other options"
                )
            if not self.is_plain:
                warn(f"topology_cache={topology_cache!r} has no effect with exclude_target_edges", LoaderWarning)
        # Times and weights are read now, so that errors in them are raised here.
        self._read_recipe()
        if not self.is_temporal:
            check_choices(temporal_strategy, time_comparison, time_window)
        if self.is_temporal or weight_attr is not None:
            self._open_topology()

    @property
    def num_neighbors(self) -> NumNeighbors:
        """Fanouts, as PyG keeps them."""
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        self._num_neighbors = keep_fanouts(num_neighbors)

    @property
    def subgraph_type(self) -> SubgraphType:
        """Choice of the edges among the sampled nodes that a sample has."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, subgraph_type: Any) -> None:
        known = [kind.value for kind in SubgraphType]
        if getattr(subgraph_type, "value", subgraph_type) not in known:
            raise ArgumentError(f"subgraph_type must be one of {', '.join(known)}, got {subgraph_type!r}")
        self._subgraph_type = SubgraphType(subgraph_type)

    @property
    def disjoint(self) -> bool:
        """True if each seed gets its own tree."""
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, disjoint: bool) -> None:
        self._disjoint = check_flag("disjoint", disjoint)

    @property
    def is_hetero(self) -> bool:
        """True if the graph has types."""
        return self._opened.parts.is_hetero

    @property
    def is_temporal(self) -> bool:
        """True if nodes or edges have times."""
        return self._opened.parts.is_temporal

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """Number of nodes, by type in a graph with types."""
        return self._opened.parts.num_nodes

    @property
    def node_time(self) -> Any:
        """Times of nodes, by type in a graph with types; None without times."""
        return self._opened.parts.node_time

    def refresh(self) -> None:
        """Read the graph again, so that edits of a `Data` or `HeteroData` and writes to tensors of a store take effect.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: edges, times or weights of the graph are invalid.
        """
        is_stored = isinstance(self.data, (tuple, list))
        # A store is read once; the tensors that it returned may be its own, in which writes are seen.
        parts = self._opened.parts if is_stored else read_parts(self.data, self.time_attr, self.weight_attr)
        if self.is_plain:
            topology: Any = read_topology(self.data, self.device)
        else:
            topology = parts.open("in" if self.sample_direction == "forward" else "out", self.is_sorted)
        if not any(topology is kept for kept in self._opened.kept):
            self._opened = Opened(parts, kept=[topology])

    def change_data(self, data: Any) -> None:
        """Sample from another graph.

        Args:
            data: The graph, as of the constructor.

        Raises:
            ArgumentError, ArgumentTypeError: the graph is of another class, or has no times or weights of these names.
        """
        opened = Opened(read_parts(data, self.time_attr, self.weight_attr))
        self.data, self._opened = data, opened

    def sample_from_nodes(self, index: NodeSamplerInput, *, key: int | None = None
                          ) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around nodes.

        Args:
            index: PyG's input: ids, their times, their type.
            key: Draw under this key instead of the sampler's own count of calls.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        self._leave_gpu_in_worker()
        out = self._sample(*_by_type(index, self.is_hetero), key=key)
        out.metadata = (index.input_id, None if index.time is None else index.time.to(self.device))
        return out

    def submit_together(self, inputs: Sequence[NodeSamplerInput], keys: Sequence[int]) -> PendingOutput | Finished:
        """Start to sample around the nodes of several batches, in as many steps as one batch takes.

        Args:
            inputs: At least one, each as of `sample_from_nodes`.
            keys: A key for each.

        Returns:
            A pending output; `finish()` waits and returns a list of samples, each as from `sample_from_nodes`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        plan = self.open_plan(windows=has_windows(inputs[0].time))
        if not isinstance(plan, GeneralPlan):
            return Finished([self.sample_from_nodes(index, key=key) for index, key in zip(inputs, keys, strict=True)])
        is_hetero, is_temporal = self.is_hetero, self.is_temporal
        requests = []
        for index in inputs:
            seed, time = _by_type(index, is_hetero)
            requests.append((seed, time if is_temporal else None))

        def give(samples: list[GeneralSample]) -> list[SamplerOutput | HeteroSamplerOutput]:
            times = self._bring_times(samples, [index.time for index in inputs])
            lies_in_file = plan.topology.topo.lists is not None
            outs = []
            for sample, index, time in zip(samples, inputs, times, strict=True):
                out = to_general_output(sample, is_hetero)
                outs.append(out := move_output(out, self.device) if lies_in_file else out)
                out.metadata = (index.input_id, time)
            return outs

        return PendingOutput(plan.submit_together(requests, keys), give)

    def _bring_times(self, samples: Sequence[GeneralSample], times: Sequence[Tensor | None]
                     ) -> Sequence[Tensor | None]:  # fmt: skip
        """Return the times of seeds on the device; those that came with the samples are not copied again."""
        brought: list[Tensor | None] = []
        for sample, own in zip(samples, times, strict=True):
            copied = sample.seed_time
            if own is None:
                brought.append(None)
            elif copied is None or own.dtype != torch.int64:
                return upload_parts(times, self.device)
            else:
                brought.append(copied if own.dim() == 1 else copied.view(own.shape))
        return brought

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, *,
                          key: int | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around links, and around negative links drawn for them.

        Args:
            index: PyG's input: sources, targets, labels, times, the relation.
            neg_sampling: PyG's `NegativeSampling`; None draws none.
            key: Draw under this key instead of the sampler's own count of calls.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        return self.submit_from_edges(index, neg_sampling, key=key).finish()

    def submit_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, *,
                          key: int | None = None) -> PendingLinks | PendingOutput:  # fmt: skip
        """Start to sample around links; as `sample_from_edges`, but without waiting for a captured plan.

        Args:
            index, neg_sampling, key: See `sample_from_edges`.

        Returns:
            A pending sample; `finish()` waits for it.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        self._leave_gpu_in_worker()
        key = self._next_key() if key is None else key
        if not self.is_plain:
            return PendingOutput(self.submit_links_together([index], neg_sampling, [key]), itemgetter(0))
        links = self._open_links(index, neg_sampling, key)
        return PendingLinks(links, self.open_plan(unique_seeds=True).submit(links.ends(), key), self.disjoint)

    def submit_links_together(self, inputs: Sequence[EdgeSamplerInput], neg_sampling: NegativeSampling | None,
                              keys: Sequence[int]) -> PendingOutput | Finished:  # fmt: skip
        """Start to sample around the links of several batches, in as many steps as one batch takes.

        Args:
            inputs: At least one, each as of `sample_from_edges`.
            neg_sampling: PyG's `NegativeSampling`; None draws none.
            keys: A key for each.

        Returns:
            A pending output; `finish()` waits and returns a list of samples, each as from `sample_from_edges`.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        plan, each = self.open_plan(windows=has_windows(inputs[0].time)), list(zip(inputs, keys, strict=True))
        if not isinstance(plan, GeneralPlan):
            return Finished([self.sample_from_edges(index, neg_sampling, key=key) for index, key in each])
        ways = self.find_ways(inputs[0].input_type)
        negatives = None if neg_sampling is None else NegativeSampling.cast(neg_sampling)
        source = None if negatives is None else self._negatives(negatives, inputs[0].input_type)
        avoided, is_known = self._opened.negatives.find_avoided(source, inputs) if plan.is_captured else ((), False)
        if is_known and all(CapturedLinks.fits(index, source, own) for index, own in zip(inputs, avoided, strict=True)):
            # Pairs are compared with each other there; more of them are faster sorted before.
            is_few = len(ways or ()) * sum([index.row.numel() for index in inputs]) <= MOST_EXCLUDED
            own_ways = ways if ways and is_few and plan.has_all_rows else ()
            own_links = [CapturedLinks(index, self._opened.parts, negatives, source, own, own_ways)
                         for index, own in zip(inputs, avoided, strict=True)]  # fmt: skip
            without = None if own_ways or not ways else [own.list_excluded(ways) for own in own_links]
            pending = plan.submit_together([own.ends for own in own_links], keys, without, repeats=True)
            return PendingOutput(pending, lambda samples: [
                own.finish(sample) for own, sample in zip(own_links, samples, strict=True)])  # fmt: skip
        links = [self._open_links(index, neg_sampling, key) for index, key in each]
        seeds = [own.seeds(self.disjoint) for own in links]
        requests = [(own, times if self.is_temporal else None) for own, times in seeds]
        # Without ways nothing is asked of other processes, as in the captured way.
        excluded = None if not ways else [own.list_excluded(ways) for own in links]

        def give(samples: list[GeneralSample]) -> list[SamplerOutput | HeteroSamplerOutput]:
            outs = [PendingLinks(own, Finished(sample), self.disjoint).finish()
                    for own, sample in zip(links, samples, strict=True)]  # fmt: skip
            return [move_output(out, self.device) for out in outs] if plan.topology.topo.lists is not None else outs

        return PendingOutput(plan.submit_together(requests, keys, excluded, repeats=True), give)

    def _open_links(self, index: EdgeSamplerInput, neg_sampling: Any, key: int) -> Links:
        """Read the links of a batch and draw their negatives."""
        links = Links(index, self._opened.parts, self._sampling_device())
        if neg_sampling is not None:
            neg_sampling = NegativeSampling.cast(neg_sampling)
            source = self._negatives(neg_sampling, index.input_type)
            links.add_negatives(neg_sampling, source, key, self._opened.negatives.list_avoided(source, index))
        return links

    def find_ways(self, edge_type: EdgeType | None) -> Ways | None:
        """Find the relations from which the links of a relation are excluded; None if links are kept.

        Args:
            edge_type: The relation; None for a graph without types.

        Raises:
            ArgumentError, ArgumentTypeError: the relation of reverse edges is not known, or does not lead back.
        """
        exclude, reverse = self.exclude_target_edges, self.rev_edge_type
        if not exclude and reverse is None:
            return None
        is_bidirectional = self.subgraph_type == SubgraphType.bidirectional
        key = edge_type, exclude, is_bidirectional, None if reverse is None else tuple(reverse)
        ways = self._opened.ways
        if key not in ways:
            check_exclusion(exclude, reverse, self._opened.parts)
            ways[key] = find_ways(self._opened.parts, edge_type, with_reverse=exclude == "reverse",
                                  is_bidirectional=is_bidirectional, rev_edge_type=reverse)  # fmt: skip
        return ways[key]

    def _negatives(self, neg_sampling: NegativeSampling, edge_type: EdgeType | None) -> NegativeSource:
        """Find or make the source of a relation's negatives."""
        return self._opened.negatives.find(neg_sampling, edge_type, self.strict_negatives, self._sampling_device())

    def _sampling_device(self) -> torch.device:
        """Return the device that samples: the CPU if neighbor lists lie in a file."""
        return torch.device("cpu") if self._opened.parts.lists is not None else self.device

    def forget_written(self) -> None:
        """Forget cached weights of negatives that were written, in any way."""
        self._opened.negatives.forget_written()

    def _sample(self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, *, key: int | None = None,
                excluded: Excluded | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around seeds, by type in a graph with types; the caller sets the metadata."""
        plan = self.open_plan(windows=has_windows(seed_time))
        key = self._next_key() if key is None else key
        if isinstance(seed, Tensor) and not seed.numel():
            # An empty tensor from a list has a float dtype.
            seed = seed.long()
        if not isinstance(plan, GeneralPlan):
            assert isinstance(seed, Tensor)
            seeds = check_ids("seeds", seed, int(self._opened.parts.num_nodes)).long()  # type: ignore[arg-type]
            if self.device.type == "cpu":
                seeds = seeds.cpu()
            sample = plan.sample(seeds, key)
            return to_output(sample)
        times = seed_time if self.is_temporal else None
        out = to_general_output(plan.sample(seed, key, seed_time=times, excluded=excluded), self.is_hetero)
        return out if plan.topology.topo.lists is None else move_output(out, self.device)

    def _fanouts(self) -> Any:
        """Read fanouts per hop, or per relation in the order of the graph."""
        return read_fanouts(self._num_neighbors, list(self._opened.parts.edges) if self.is_hetero else None)

    def _read_recipe(self) -> GeneralRecipe:
        check_sampling(self.sampling, self.replace, self.layer_dependency)
        if self.sampling == "labor":
            self._check_labor()
        fanouts = self._fanouts()
        check_hops(
            fanouts if isinstance(fanouts, list) else next(iter(fanouts.values()), []), MAX_HOPS, "num_neighbors"
        )
        return GeneralRecipe(fanouts, replace=check_flag("replace", self.replace), disjoint=self._disjoint,
                             subgraph_type=self._subgraph_type.value, temporal_strategy=self.temporal_strategy,
                             time_comparison=self.time_comparison, time_window=self.time_window,
                             sampling=self.sampling, layer_dependency=self.layer_dependency)  # fmt: skip

    def _check_labor(self) -> None:
        """Raise if neighbors cannot be drawn by keys that nodes share."""
        if self.weight_attr is not None:
            raise ArgumentError(f"weight_attr must be None with sampling='labor', got {self.weight_attr!r}: leave it "
                                "out, or draw by weight with sampling='uniform'")  # fmt: skip
        lists = self._opened.parts.lists
        if lists is not None:
            raise ArgumentError(f"sampling must be 'uniform' for neighbor lists in a file ({lists.indices.file.path}), "
                                "got 'labor', which reads them whole: give lists in memory")  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """True if a plan of one node type and uniform draws supports all options."""
        return not self.exclude_target_edges and self._is_uniform()

    def _is_uniform(self) -> bool:
        """Check if a homogeneous graph is sampled uniformly; excluded edges do not matter here."""
        is_directional = self._subgraph_type == SubgraphType.directional and self.sample_direction == "forward"
        return (isinstance(self.data, Data) and not self.disjoint and is_directional and self.weight_attr is None
                and not {"edge_index", "adj_t"}.isdisjoint(self.data._store._mapping))  # fmt: skip

    def open_plan(self, unique_seeds: bool = False, windows: bool = False) -> Any:
        """Open the plan of these options, once; copies of the sampler share it.

        Args:
            unique_seeds: Seeds that repeat become one, and stand ascending, if the sampler `is_plain`.
            windows: Each seed has two times, an earliest and a latest one.
        """
        held = (id(self._num_neighbors), self._subgraph_type, self.replace, self._disjoint, self.temporal_strategy,
                self.time_comparison, self.time_window, self.is_plain, unique_seeds, windows, self.sampling,
                self.layer_dependency)  # fmt: skip
        _, plan = self._opened.quick.get(held, (None, None))
        if plan is None:
            plan = self._make_plan(unique_seeds, windows)
            self._opened.quick[held] = self._num_neighbors, plan
        return plan

    def _make_plan(self, unique_seeds: bool, windows: bool = False) -> Any:
        """Check the attributes and make a plan from them; copies of the sampler share it."""
        recipe, is_plain = self._read_recipe(), self.is_plain
        if windows:
            recipe = replace_fields(recipe, seed_windows=True)
        fanouts = recipe.fanouts
        shape = tuple(fanouts) if isinstance(fanouts, list) else tuple((k, tuple(v)) for k, v in fanouts.items())  # type: ignore[union-attr]
        key = (is_plain, shape, recipe.replace, recipe.disjoint, recipe.subgraph_type, recipe.temporal_strategy,
               recipe.time_comparison, recipe.time_window, recipe.seed_windows, unique_seeds, self.sampling,
               self.layer_dependency)  # fmt: skip
        plan = self._opened.plans.get(key)
        if plan is None:
            topology = self._open_topology()
            if is_plain:
                placed = topology.place(self.placement, self.device, topology_cache=self.topology_cache)
                own = Recipe(tuple(fanouts), recipe.replace, sampling=self.sampling,  # type: ignore[arg-type]
                             layer_dependency=self.layer_dependency, unique_seeds=unique_seeds)  # fmt: skip
                plan = open_plan(placed, own)
            else:
                plan = GeneralPlan(topology.place(self.placement, self.device), recipe)
            self._opened.plans[key] = plan
        return plan

    def _open_topology(self) -> Any:
        if self.is_plain:
            topology: Any = read_topology(self.data, self.device)
        else:
            direction = "in" if self.sample_direction == "forward" else "out"
            topology = self._opened.parts.open(direction, self.is_sorted)
        if not any(topology is kept for kept in self._opened.kept):
            self._opened.kept.append(topology)
        return topology

    def _forget_plans(self) -> None:
        self.placement, self.topology_cache = "auto", None
        self._opened = Opened(read_parts(self.data, self.time_attr, self.weight_attr))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._chooses_device:
            self.device = resolve_device(None)
        self._opened = Opened(read_parts(self.data, self.time_attr, self.weight_attr))

    def __copy__(self) -> NeighborSampler:
        # Copies share the opened state: PyG copies a sampler to change its fanouts.
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_fanouts(self._num_neighbors)
        kind = self._subgraph_type.value
        yield from show_options(subgraph_type=None if kind == "directional" else kind, replace=self.replace,
                                disjoint=self.disjoint, time_attr=self.time_attr, weight_attr=self.weight_attr,
                                seed=self.seed)  # fmt: skip
        yield str(self.device)


def _by_type(index: NodeSamplerInput, is_hetero: bool) -> tuple[Any, Any]:
    """Return seeds and their times, by type in a graph with types."""
    if index.input_type is None:
        return index.node, index.time
    if not is_hetero:
        raise ArgumentError(f"input_type must be None for a graph without types, got {index.input_type!r}")
    return {index.input_type: index.node}, None if index.time is None else {index.input_type: index.time}


def has_windows(time: Any) -> bool:
    """Check if times of seeds, or of one type of seeds, are windows: an earliest and a latest time for each."""
    if isinstance(time, Mapping):
        return any(map(has_windows, time.values()))
    return isinstance(time, Tensor) and time.dim() == 2


def check_choices(temporal_strategy: str, time_comparison: str, time_window: int | None) -> None:
    """Refuse options of times for a graph without times; `temporal_strategy` only warns, as PyG accepts it."""
    GeneralRecipe([], temporal_strategy=temporal_strategy, time_comparison=time_comparison, time_window=time_window)
    if time_window is not None:
        raise ArgumentError(f"time_window needs time_attr, the name of the times, got None and {time_window!r}")
    if time_comparison != "<=":
        raise ArgumentError(f"time_comparison={time_comparison!r} needs time_attr, the name of the times, got None")
    if temporal_strategy != "uniform":
        warn_unused({"temporal_strategy": temporal_strategy}, "there are no times: time_attr is None")
