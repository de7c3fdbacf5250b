"""`HGTLoader`: a fixed number of nodes of each type per layer, after PyG's class, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.data import HeteroData
from torch_geometric.loader import HGTLoader as PygHGTLoader
from typing_extensions import Unpack

from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.loader.arguments import TorchOptions
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.node_loader import NodeLoader
from pyg_direct.ops.argument_checks import checks_keywords
from pyg_direct.sampler.graph_reader import InputNodes, settle_filter
from pyg_direct.sampler.hgt_sampler import HGTSampler, Samples
from pyg_direct.sampler.keyed_sampler import Drawn, is_own
from pyg_direct.sampling.captured_plan import PendingOutput
from pyg_direct.sampling.hgt_sampling import MOST_NEIGHBORS
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device


class HGTLoader(NodeLoader, PygHGTLoader):  # type: ignore[misc]
    """Batches of HGT's layer-wise sampling (Hu et al., WWW 2020, algorithm 2), after PyG's class, on `device`.

    Torch-sparse is not needed. A layer takes `num_samples` nodes of each type among the neighbors of the nodes so far.
    The probability of a node is proportional to a square. Its base is the sum of 1 / (number of neighbors) over the
    nodes that have it as a neighbor. A batch has the edges among its nodes. Nodes are drawn without replacement,
    exactly `num_samples` if there are as many. Batches are equal on every device, except for ties in the last bit of a
    logarithm.

    Args:
        data: A `HeteroData`; or our `FeatureStore`, whose tables may lie in files, and a `HeteroData` with the edges.
        num_samples: Nodes of each type in each layer, or these for every type that edges join.
        input_nodes: Seeds: a node type, or (type, ids or mask).
        is_sorted: Accepted and unused; edges in any order are compressed once.
        transform, transform_sampler_output, filter_per_worker: See `NeighborLoader`.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ahead: See `NeighborLoader`.
        most_neighbors: Limit of candidates per node and relation, -1 for no limit; of more neighbors, this many are
            drawn. The default is 50, as in torch-sparse.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        NotImplementedError: a `Data`, or a pair of stores without a `HeteroData`, as in PyG.

    Example:
        >>> data = HeteroData({"author": {"x": torch.eye(2)}, "paper": {"x": torch.eye(3)},
        ...                    "author__wrote__paper": {"edge_index": torch.tensor([[0, 0, 1], [0, 1, 2]])}})
        >>> (batch,) = HGTLoader(data, [2], ("paper", torch.tensor([0, 2])), batch_size=2, device="cpu")
        >>> batch["author"].n_id.tolist(), batch["wrote"].edge_index.tolist()
        ([0, 1], [[0, 1], [0, 1]])
    """

    @checks_keywords
    def __init__(self, data: HeteroData | tuple[FeatureStore, HeteroData], num_samples: Samples,
                 input_nodes: InputNodes, is_sorted: bool = False, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None,
                 *, device: Device = None, placement: str = "auto", topology_placement: str | None = None,
                 feature_cache: int | str | None = None, store_dtype: torch.dtype | None = None,
                 seed: int | None = None, prefetch: int = 1, most_neighbors: int = MOST_NEIGHBORS,
                 ahead: int | str | None = None, **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        self._settle(device, placement, topology_placement, feature_cache, 1, seed, prefetch, ahead=ahead)
        in_stores = isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], HeteroData)
        # Of stores the sampler has the second.
        self._made_sampler = not in_stores
        graph: Any = data[1] if in_stores else data  # type: ignore[index]
        sampler = HGTSampler(graph, num_samples, is_sorted, device=device, placement=self.topology_placement,
                             seed=self.seed, most_neighbors=most_neighbors)  # fmt: skip
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        self._open_general(data, sampler, input_nodes, None, transform, transform_sampler_output, None, None,
                           store_dtype, options)  # fmt: skip

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        # A sampler of a class of its own may draw in another way than ours.
        if not is_own(self._sampler, HGTSampler):
            return super()._submit(key, number, seeds)
        index = self.input_data[seeds.positions]
        return PendingOutput(self._sampler.submit_from_nodes(index, key=key.of_batch(number)), Drawn)
