"""`HGTSampler`: a fixed number of nodes of each type per layer, after PyG's class, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.object_text import one_line, show_fanouts, show_options
from pyg_direct.ops.argument_checks import check_fanouts, check_flag
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampler.graph_reader import describe_other, read_parts
from pyg_direct.sampler.keyed_sampler import OwnSampler, to_general_output
from pyg_direct.sampling.captured_plan import PendingOutput
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.hgt_sampling import MOST_NEIGHBORS, HgtPlan
from pyg_direct.sampling.random_key import check_seed
from pyg_direct.typing import Device

Samples = Sequence[int] | Mapping[str, Sequence[int]]


class HGTSampler(OwnSampler):
    """Sampler of a number of nodes per type and layer, as in `HGTLoader` (Hu et al., WWW 2020).

    After PyG's class of that name; results are on `device`.

    Args:
        data: A `HeteroData`.
        num_samples: Nodes of each type in each layer, or these for every type that edges join.
        is_sorted: Accepted and unused; edges in any order are compressed once.
        share_memory: Accepted and unused; there are no worker processes to share with.
        device, placement, seed: See `NeighborLoader`.
        most_neighbors: Limit of candidates per node and relation, -1 for no limit; of more neighbors, this many are
            drawn.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
        NotImplementedError: a `Data` or a pair of stores, as in PyG.

    Example:
        >>> from torch_geometric.sampler import NodeSamplerInput
        >>> data = HeteroData({"author": {"x": torch.eye(2)}, "paper": {"x": torch.eye(3)},
        ...                    "author__wrote__paper": {"edge_index": torch.tensor([[0, 0, 1], [0, 1, 2]])}})
        >>> sampler = HGTSampler(data, [2], device="cpu")
        >>> out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0, 2]), input_type="paper"))
        >>> {kind: ids.tolist() for kind, ids in out.node.items()}
        {'author': [0, 1], 'paper': [0, 2]}
    """

    _same: list[int] | None = None

    def __init__(self, data: HeteroData, num_samples: Samples, is_sorted: bool = False, share_memory: bool = False, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None,
                 most_neighbors: int = MOST_NEIGHBORS) -> None:  # fmt: skip
        if not isinstance(data, HeteroData):
            given = describe_other(data)
            if isinstance(data, Data):
                given = f"{type(data).__name__}: NeighborLoader takes graphs without types"
            raise NotImplementedError(f"data must be a HeteroData for HGT sampling, as in PyG, got {given}")
        check_flag("is_sorted", is_sorted)
        check_flag("share_memory", share_memory)
        self.data, self.device, self.placement = data, resolve_device(device), placement
        self._chooses_device = device is None
        self.seed, self._num_calls = check_seed(seed), 0
        self.num_samples = _read_samples(num_samples, data)
        # Numbers for types that a later edit of the graph adds.
        self._same = None if isinstance(num_samples, Mapping) else check_fanouts("num_samples", num_samples)
        self.most_neighbors = most_neighbors
        self.num_hops = max((len(own) for own in self.num_samples.values()), default=0)
        self._topology: HeteroTopo | None = None
        self._plan: HgtPlan | None = None
        self.refresh()

    @property
    def num_nodes(self) -> dict[str, int]:
        """Number of nodes by type."""
        return self._open_topology().num_nodes

    def refresh(self) -> None:
        """Read the graph again, so that edits take effect.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: the graph has invalid edges, or edges of types without a number.
        """
        topology = read_parts(self.data).open("in", False)
        if topology is not self._topology:
            own = {} if self._same is None else dict.fromkeys(self.data.node_types, self._same)
            self.num_samples = _read_samples({**own, **self.num_samples}, self.data)
            self._topology = topology
            self._plan = HgtPlan(topology.place(self.placement, self.device), self.num_samples, self.most_neighbors)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_fanouts(self.num_samples)
        yield from show_options(seed=self.seed)
        yield str(self.device)

    def _open_topology(self) -> HeteroTopo:
        self.open_plan()
        assert self._topology is not None
        return self._topology

    def open_plan(self) -> HgtPlan:
        """Open the plan of the graph, once."""
        if self._plan is None:
            # The sampler was unpickled in this process.
            self.refresh()
        assert self._plan is not None
        return self._plan

    def sample_from_nodes(self, index: NodeSamplerInput, *, key: int | None = None) -> HeteroSamplerOutput:
        """Sample around nodes.

        Args:
            index: PyG's input: ids and their type.
            key: Draw under this key instead of the sampler's own count of calls.
        """
        out: HeteroSamplerOutput = self.submit_from_nodes(index, key=key).finish()
        return out

    def submit_from_nodes(self, index: NodeSamplerInput, *, key: int | None = None) -> PendingOutput:
        """Start to sample around nodes; as `sample_from_nodes`, but what a captured plan samples is not waited for.

        Args:
            index, key: As of `sample_from_nodes`.

        Returns:
            What `finish()` makes a sample of, once it is waited for.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        self._leave_gpu_in_worker()
        key = self._next_key() if key is None else key

        def give(sample: GeneralSample) -> HeteroSamplerOutput:
            out = to_general_output(sample, is_hetero=True)
            out.metadata = (index.input_id, index.time)
            return out

        return PendingOutput(self.open_plan().submit({index.input_type: index.node}, key), give)

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: Any = None) -> HeteroSamplerOutput:
        """Raise `NotImplementedError`, as PyG does.

        Args:
            index: PyG's input.
            neg_sampling: PyG's `NegativeSampling`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("links with HGT sampling, as in PyG")

    def _forget_plans(self) -> None:
        self.placement, self._topology, self._plan = "auto", None, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_topology": None, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._chooses_device:
            self.device = resolve_device(None)

    def __copy__(self) -> HGTSampler:
        # Copies share the plan and the topology.
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


def _read_samples(num_samples: Any, data: HeteroData) -> dict[str, list[int]]:
    """Read the nodes of each type in each layer, for every type with edges, for equally many layers."""
    node_types = data.node_types
    if not isinstance(num_samples, Mapping):
        return dict.fromkeys(node_types, check_fanouts("num_samples", num_samples))
    made = {kind: check_fanouts(f"num_samples[{kind!r}]", own) for kind, own in num_samples.items()}
    unknown = [kind for kind in made if kind not in node_types]
    if unknown:
        raise ArgumentError(f"num_samples must name known node types, got {unknown} of {list(node_types)}")
    joined = {edge_type[end] for edge_type in data.edge_types for end in (0, -1)}
    missing = [kind for kind in node_types if kind not in made and (kind in joined or not made)]
    if missing:
        # PyG raises here with a message of a C++ table.
        raise ArgumentError("num_samples must have a number of nodes a layer for every node type, got none for "
                            f"{', '.join(map(repr, missing))}: 0 for each layer samples none")  # fmt: skip
    layers = {kind: len(own) for kind, own in made.items()}
    if len(set(layers.values())) > 1:
        told = ", ".join(f"{count} for {kind!r}" for kind, count in layers.items())
        raise ArgumentError(f"num_samples: the number of layers must be the same across all node types, got {told}")
    return made
