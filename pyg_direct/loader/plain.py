"""Which loaders sample a `Data` uniformly, and from which seeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput, NumNeighbors, SamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.options import say_unused
from pyg_direct.loader.output import to_output
from pyg_direct.ops.check import in_short
from pyg_direct.sampling.options import GeneralRecipe


def is_plain(data: Any, num_neighbors: Any, neighbor_sampler: Any, time_attr: str | None, weight_attr: str | None,
             disjoint: bool, subgraph_type: Any, directed: bool) -> bool:  # fmt: skip
    """Whether the captured plan of a homogeneous graph makes these batches."""
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors = num_neighbors.values
    is_directional = getattr(subgraph_type, "value", subgraph_type) == "directional" and directed
    return (isinstance(data, Data) and not isinstance(num_neighbors, dict) and neighbor_sampler is None
            and time_attr is None and weight_attr is None and not disjoint and is_directional)  # fmt: skip


def check_choices(temporal_strategy: str, time_comparison: str, time_window: int | None) -> None:
    """Refuse words of times where there are none, also unknown ones; PyG takes a strategy then, which is said.

    Raises:
        ArgumentError: named argument, rule and value.
    """
    GeneralRecipe([], temporal_strategy=temporal_strategy, time_comparison=time_comparison, time_window=time_window)
    if time_window is not None:
        raise ArgumentError(f"time_window needs time_attr, the name of the times, got None and {time_window!r}")
    if time_comparison != "<=":
        raise ArgumentError(f"time_comparison={time_comparison!r} needs time_attr, the name of the times, got None")
    if temporal_strategy != "uniform":
        say_unused({"temporal_strategy": temporal_strategy}, "there are no times: time_attr is None")


class NodeSampler:
    """What PyG's `NodeLoader` asks of a sampler; edge ids are final, so there is no permutation."""

    edge_permutation = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @classmethod
    def serves(cls, sampler: Any) -> bool:
        """Whether a sampler is one of these, and no program has put anything in its place, or in that of its method."""
        return (type(sampler) is cls and "sample_from_nodes" not in sampler.__dict__
                and cls.sample_from_nodes is _SAMPLE_FROM_NODES)  # fmt: skip

    @property
    def num_neighbors(self) -> list[int]:
        """Fanout of each hop; can be set, with effect on the next epoch."""
        return self._loader.num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        self._loader._choose_fanouts(num_neighbors)

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput:
        """Sample around nodes, under the next key of the loader's direct calls."""
        seeds = index.node
        sample = self._loader._sample_now(seeds)
        input_id = torch.arange(seeds.numel(), device="cpu") if index.input_id is None else index.input_id
        return to_output(sample, input_id)


_SAMPLE_FROM_NODES = NodeSampler.sample_from_nodes


def read_input_nodes(input_nodes: Any, name: str = "input_nodes", kind: str | None = None) -> Tensor | None:
    """Ids or a mask as a tensor; PyG would read a mask in NumPy or a list, or ids that are not whole, as ids.

    Args:
        input_nodes: Them.
        name: Of the argument that they are.
        kind: Their node type; None without types.
    """
    if input_nodes is None:
        return None
    try:
        nodes = input_nodes if isinstance(input_nodes, Tensor) else torch.tensor(input_nodes, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        first = input_nodes[0] if isinstance(input_nodes, (list, tuple)) and len(input_nodes) else input_nodes
        hint = ": node types are those of a HeteroData" if kind is None and isinstance(first, str) else ""
        raise ArgumentTypeError(f"{name} must be ids or a mask, got {in_short(input_nodes)}{hint}") from error
    if nodes.dim() != 1:
        raise ArgumentError(f"{name} must have one dimension, got shape {tuple(nodes.shape)}")
    # Of no ids the type tells nothing: an empty list makes floats. A mask has the length of the graph even so.
    is_mask = nodes.dtype == torch.bool and isinstance(input_nodes, Tensor)
    return nodes if nodes.numel() > 0 or is_mask else nodes.long()
