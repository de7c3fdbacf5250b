"""`NeighborSampler`: PyG's sampler on the device, for any loader that asks a `BaseSampler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType

from pyg_direct.errors import ArgumentError, LoaderWarning, warn
from pyg_direct.graph.relation import EdgeType
from pyg_direct.kernels.state import MAX_HOPS
from pyg_direct.loader.fanouts import keep_fanouts, read_fanouts
from pyg_direct.loader.graph import read_parts
from pyg_direct.loader.linked import LinkedSampler
from pyg_direct.loader.opened import Opened
from pyg_direct.loader.output import to_general_output, to_output
from pyg_direct.loader.placement import PLACES, check_place
from pyg_direct.loader.plain import check_choices
from pyg_direct.loader.pyg import read_topology
from pyg_direct.loader.targets import check_exclusion
from pyg_direct.ops.check import check_flag, check_ids
from pyg_direct.ops.upload import upload_parts
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.size import parse_size
from pyg_direct.sampling.excluded import Excluded
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.key import check_seed
from pyg_direct.sampling.open import open_plan
from pyg_direct.sampling.options import GeneralRecipe
from pyg_direct.sampling.sample import Recipe, check_hops
from pyg_direct.typing import Device

DIRECTIONS = ("forward", "backward")


class NeighborSampler(LinkedSampler):
    """Samples around nodes and links, after PyG's class of that name; results are on `device`.

    All its arguments but `data` and those of placement are attributes that can be set, with effect on the next call.
    Copies share topology and plans. The n-th call under one `seed` gives equal results on every device; in a worker of
    a loader of PyG's it also depends on the seed that torch gives the worker, so that workers and epochs differ.

    Args:
        data: `Data`, `HeteroData` or (`FeatureStore`, `GraphStore`).
        num_neighbors: Fanout of each hop, -1 for all; for each relation in a dict or `NumNeighbors`.
        subgraph_type: `directional`, `bidirectional` or `induced`.
        replace: Draw with replacement.
        disjoint: Each seed gets a tree of its own. Always so with times.
        temporal_strategy: `uniform`, or `last` for the latest neighbors.
        time_attr: Name of the times of nodes, or of edges: only neighbors up to the time of the seed are sampled.
        weight_attr: Name of edge weights that neighbors are drawn by.
        is_sorted: Neighbors are sorted by time already, which is checked.
        share_memory: Accepted; there are no worker processes to share with.
        directed: Deprecated in PyG; False means `subgraph_type="induced"`.
        sample_direction: `forward` follows edges back to their sources; `backward` to their targets.
        device: Where to sample; None is the current GPU if there is one, else the CPU.
        placement, topology_cache: Where the topology lives; see `NeighborLoader`.
        seed: Seed of all draws; with None each call draws one number from torch's generator, and follows from it.
        time_comparison: `<=` allows neighbors of the time of the seed, as PyG does; `<` only earlier ones.
        time_window: Only neighbors after the time of the seed minus this; None for no limit.
        strict_negatives: Negative links are neither edges nor positive links of the loader (in an undirected graph, nor
            these turned round); after 32 tries one is kept, with a warning. See `LinkNeighborLoader`.
        exclude_target_edges: True: sample as if the graph had no edges between the ends of the links that are sampled
            around; `"reverse"`: nor their reverse edges. See `LinkNeighborLoader`.
        rev_edge_type: The relation of the reverse edges, where it is not known; see `LinkNeighborLoader`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
        NotImplementedError: combinations that PyG refuses so: times backward, weights of stores.
    """

    def __init__(self, data: Any, num_neighbors: Any, subgraph_type: Any = "directional", replace: bool = False,
                 disjoint: bool = False, temporal_strategy: str = "uniform", time_attr: str | None = None,
                 weight_attr: str | None = None, is_sorted: bool = False, share_memory: bool = False,
                 directed: bool = True, sample_direction: str = "forward", *, device: Device = None,
                 placement: str = "auto", seed: int | None = None, time_comparison: str = "<=",
                 time_window: int | None = None, strict_negatives: bool = False,
                 exclude_target_edges: bool | str = False, topology_cache: int | str | None = None,
                 rev_edge_type: EdgeType | None = None) -> None:  # fmt: skip
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
            parse_size(topology_cache, 0, "topology_cache")
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
        if topology_cache not in (None, "auto"):
            if not self._is_uniform():
                raise ArgumentError(
                    f"topology_cache={topology_cache!r} needs a Data that is sampled uniformly, without other options"
                )
            if not self._is_plain():
                warn(f"topology_cache={topology_cache!r} has no effect with exclude_target_edges", LoaderWarning)
        # Times and weights are read now, so that what is wrong with them is said here.
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
        """Which edges among the sampled nodes a sample has."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, subgraph_type: Any) -> None:
        known = [kind.value for kind in SubgraphType]
        if getattr(subgraph_type, "value", subgraph_type) not in known:
            raise ArgumentError(f"subgraph_type must be one of {', '.join(known)}, got {subgraph_type!r}")
        self._subgraph_type = SubgraphType(subgraph_type)

    @property
    def disjoint(self) -> bool:
        """Whether each seed gets a tree of its own."""
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, disjoint: bool) -> None:
        self._disjoint = check_flag("disjoint", disjoint)

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has types."""
        return self._opened.parts.is_hetero

    @property
    def is_temporal(self) -> bool:
        """Whether nodes or edges have times."""
        return self._opened.parts.is_temporal

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """Number of nodes, by type where there are types."""
        return self._opened.parts.num_nodes

    @property
    def node_time(self) -> Any:
        """Times of nodes, by type where there are types; None without."""
        return self._opened.parts.node_time

    def refresh(self) -> None:
        """Read the graph anew, so that edits of a `Data` or `HeteroData` take effect, and writes to tensors of a store.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: edges, times or weights of the graph are none.
        """
        is_stored = isinstance(self.data, (tuple, list))
        # A store is asked once; what it has handed out may be its own.
        parts = self._opened.parts if is_stored else read_parts(self.data, self.time_attr, self.weight_attr)
        if self._is_plain():
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
            ArgumentError, ArgumentTypeError: it is of another kind, or has no times or weights of these names.
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
        out = self._sample(*_by_type(index, self.is_hetero), key=key)
        out.metadata = (index.input_id, None if index.time is None else index.time.to(self.device))
        return out

    def sample_together(self, inputs: Sequence[NodeSamplerInput], keys: Sequence[int]
                        ) -> list[SamplerOutput | HeteroSamplerOutput]:  # fmt: skip
        """Sample around the nodes of several batches in as many steps as for one; as `sample_from_nodes` for each.

        Args:
            inputs: At least one, each as of `sample_from_nodes`.
            keys: A key for each.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        plan = self._open_plan()
        if not isinstance(plan, GeneralPlan):
            return [self.sample_from_nodes(index, key=key) for index, key in zip(inputs, keys, strict=True)]
        requests = [
            (seed, time if self.is_temporal else None)
            for seed, time in (_by_type(index, self.is_hetero) for index in inputs)
        ]
        outs = [to_general_output(sample, self.is_hetero) for sample in plan.sample_together(requests, keys)]
        times = upload_parts([index.time for index in inputs], self.device)
        for out, index, time in zip(outs, inputs, times, strict=True):
            out.metadata = (index.input_id, time)
        return outs

    def _sample(self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, *, key: int | None = None,
                excluded: Excluded | None = None) -> SamplerOutput | HeteroSamplerOutput:  # fmt: skip
        """Sample around seeds, by type where there are types; metadata is left to the caller."""
        plan = self._open_plan()
        key = self._next_key() if key is None else key
        if isinstance(seed, Tensor) and not seed.numel():
            # An empty tensor that was made of a list holds floats.
            seed = seed.long()
        if not isinstance(plan, GeneralPlan):
            assert isinstance(seed, Tensor)
            seeds = check_ids("seeds", seed, int(self._opened.parts.num_nodes)).long()  # type: ignore[arg-type]
            if self.device.type == "cpu":
                seeds = seeds.cpu()
            sample = plan.sample(seeds, key)
            return to_output(sample)
        times = seed_time if self.is_temporal else None
        return to_general_output(plan.sample(seed, key, seed_time=times, excluded=excluded), self.is_hetero)

    def _fanouts(self) -> Any:
        """Fanouts per hop, or per relation in the order of the graph."""
        return read_fanouts(self._num_neighbors, list(self._opened.parts.edges) if self.is_hetero else None)

    def _read_recipe(self) -> GeneralRecipe:
        fanouts = self._fanouts()
        check_hops(
            fanouts if isinstance(fanouts, list) else next(iter(fanouts.values()), []), MAX_HOPS, "num_neighbors"
        )
        return GeneralRecipe(fanouts, replace=check_flag("replace", self.replace), disjoint=self._disjoint,
                             subgraph_type=self._subgraph_type.value, temporal_strategy=self.temporal_strategy,
                             time_comparison=self.time_comparison, time_window=self.time_window)  # fmt: skip

    def _is_plain(self) -> bool:
        """Whether the captured plan of a homogeneous graph does what is asked."""
        return not self.exclude_target_edges and self._is_uniform()

    def _is_uniform(self) -> bool:
        """Whether a homogeneous graph is sampled uniformly, whatever a batch leaves out."""
        is_directional = self._subgraph_type == SubgraphType.directional and self.sample_direction == "forward"
        return (isinstance(self.data, Data) and not self.disjoint and is_directional and self.weight_attr is None
                and not {"edge_index", "adj_t"}.isdisjoint(self.data._store._mapping))  # fmt: skip

    def _open_plan(self, unique_seeds: bool = False) -> Any:
        held = (id(self._num_neighbors), self._subgraph_type, self.replace, self._disjoint, self.temporal_strategy,
                self.time_comparison, self.time_window, self._is_plain(), unique_seeds)  # fmt: skip
        _, plan = self._opened.quick.get(held, (None, None))
        if plan is None:
            plan = self._make_plan(unique_seeds)
            self._opened.quick[held] = self._num_neighbors, plan
        return plan

    def _make_plan(self, unique_seeds: bool) -> Any:
        """The plan for what the attributes hold, checked; copies of the sampler share it."""
        recipe, is_plain = self._read_recipe(), self._is_plain()
        fanouts = recipe.fanouts
        shape = tuple(fanouts) if isinstance(fanouts, list) else tuple((k, tuple(v)) for k, v in fanouts.items())  # type: ignore[union-attr]
        key = (is_plain, shape, recipe.replace, recipe.disjoint, recipe.subgraph_type, recipe.temporal_strategy,
               recipe.time_comparison, recipe.time_window, unique_seeds)  # fmt: skip
        plan = self._opened.plans.get(key)
        if plan is None:
            topology = self._open_topology()
            if is_plain:
                placed = topology.place(self.placement, self.device, topology_cache=self.topology_cache)
                own = Recipe(tuple(fanouts), recipe.replace, unique_seeds=unique_seeds)  # type: ignore[arg-type]
                plan = open_plan(placed, own)
            else:
                plan = GeneralPlan(topology.place(self.placement, self.device), recipe)
            self._opened.plans[key] = plan
        return plan

    def _open_topology(self) -> Any:
        if self._is_plain():
            topology: Any = read_topology(self.data, self.device)
        else:
            direction = "in" if self.sample_direction == "forward" else "out"
            topology = self._opened.parts.open(direction, self.is_sorted)
        if not any(topology is kept for kept in self._opened.kept):
            self._opened.kept.append(topology)
        return topology

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._chooses_device:
            self.device = resolve_device(None)
        self._opened = Opened(read_parts(self.data, self.time_attr, self.weight_attr))

    def __copy__(self) -> NeighborSampler:
        # One that shares what is opened already, as PyG copies samplers to change their fanouts.
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_neighbors={self._num_neighbors.values}, device={self.device})"


def _by_type(index: NodeSamplerInput, is_hetero: bool) -> tuple[Any, Any]:
    """Seeds and their times, by type where there are types."""
    if index.input_type is None:
        return index.node, index.time
    if not is_hetero:
        raise ArgumentError(f"input_type must be None for a graph without types, got {index.input_type!r}")
    return {index.input_type: index.node}, None if index.time is None else {index.input_type: index.time}
