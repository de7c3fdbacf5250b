"""`RandomNodeLoader`: parts of all nodes with the edges among them, after PyG's loader of that name, on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import RandomNodeLoader as PygRandomNodeLoader
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.induced_loader import TypedInducedLoader
from pyg_direct.loader.option_types import ShuffledOptions
from pyg_direct.loader.prefetch.batch_groups import Work
from pyg_direct.loader.sampler_loader import read_positions
from pyg_direct.object_text import show_options
from pyg_direct.ops.argument_checks import check_count, checks_keywords
from pyg_direct.sampler.graph_reader import describe_other, read_topology
from pyg_direct.sampling.induced_plan import PendingInducedGroup
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device


class RandomNodeLoader(TypedInducedLoader, PygRandomNodeLoader):  # type: ignore[misc]
    """Batches of a share of all nodes, with all edges among them, after PyG's `RandomNodeLoader`, on `device`.

    With `shuffle=True` each epoch divides the nodes of all types differently. A batch has PyG's attributes; its nodes
    are in the order of the epoch, its edges by target. Without a `seed`, nodes are shuffled exactly as by PyG's loader
    under the same `torch.manual_seed`.

    Args:
        data: `Data` or `HeteroData`.
        num_parts: Batches per epoch, at least 1: each has ceil(nodes / num_parts) nodes, the last possibly fewer.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader` except `batch_size`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = RandomNodeLoader(ring, num_parts=2, seed=0, device="cpu")
        >>> [batch.num_nodes for batch in loader]
        [2, 2]
    """

    @checks_keywords
    def __init__(self, data: Data | HeteroData, num_parts: int, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[ShuffledOptions]
                 ) -> None:  # fmt: skip
        if not isinstance(data, (Data, HeteroData)):
            raise ArgumentTypeError(f"data must be a Data or a HeteroData, got {describe_other(data)}")
        self.num_parts = check_count("num_parts", num_parts)
        given: Mapping[str, Any] = kwargs
        if "batch_size" in given:
            raise ArgumentError(f"batch_size must not be given, as it follows from num_parts, got "
                                f"{given['batch_size']!r}")  # fmt: skip
        self.num_nodes = self._note_types(data)
        if self.num_nodes == 0:
            raise ArgumentError("data must have nodes, got none")
        self._open_induced(data, self.num_nodes, math.ceil(self.num_nodes / num_parts), device, placement,
                           topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven,
                           kwargs)  # fmt: skip

    _item = ("node", None)
    _orders_as_torch = True
    _makes_groups = True

    def _list_options(self) -> Iterator[str]:
        yield from show_options(num_parts=self.num_parts)

    def _open_topology(self) -> CSRTopo:
        self._check_nodes()
        return read_topology(self.data, self.device)

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return self._start(seeds.positions)

    def _submit_group(self, key: EpochKey, work: Sequence[Work]) -> PendingInducedGroup:
        assert self._plan is not None
        return self._plan.submit_sets([seeds.positions for _, seeds in work])

    def _start(self, nodes: Tensor) -> Any:
        """Start to find the subgraph of nodes in PyG's numbering, all types consecutively."""
        if self._typed_plan is not None:
            return self._start_typed(nodes)
        assert self._plan is not None
        return self._plan.submit(nodes)

    def _collate_items(self, index: Any) -> Any:
        """Make the batch of these nodes (PyG's hook).

        Args:
            index: Nodes in PyG's numbering, all types consecutively, int64 `[B]` or a list.
        """
        self._prepare()
        return self._build_any(self._start(read_positions(index, self.num_nodes)).finish())
