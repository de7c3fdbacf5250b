"""`SubGraphLoader`: all edges among the nodes of a few hops, after GraphLearn-for-PyTorch's loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.sampler import BaseSampler
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.option_types import SubGraphOptions
from pyg_direct.sampler.argument_types import FanoutsOf, Graph, InputNodes
from pyg_direct.sampler.keyed_sampler import Output


class SubGraphLoader(NeighborLoader):
    """Batches of induced subgraphs around seeds, with `mapping`: positions of the seeds among the nodes, int64 `[B]`.

    A batch equals one of `NeighborLoader(subgraph_type="induced")`.

    Args:
        data: See `NeighborLoader`.
        input_nodes: Seeds: ids, a mask, or None for all nodes; with types, a type or (type, seeds).
        num_neighbors: Fanout of each hop; None for the seeds only.
        neighbor_sampler: A sampler with PyG's interface to use instead.
        **kwargs: Further arguments of `NeighborLoader`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> data = Data(x=torch.eye(3), edge_index=torch.tensor([[1, 2, 1], [0, 0, 2]]))
        >>> (batch,) = SubGraphLoader(data, torch.tensor([0]), [-1], device="cpu")
        >>> batch.n_id.tolist(), batch.edge_index.tolist()  # with the edge between two neighbors
        ([0, 1, 2], [[1, 2, 1], [0, 0, 2]])
    """

    def __init__(self, data: Graph, input_nodes: InputNodes = None, num_neighbors: FanoutsOf | None = None,
                 neighbor_sampler: BaseSampler | None = None,
                 **kwargs: Unpack[SubGraphOptions]) -> None:  # fmt: skip
        given: Mapping[str, Any] = kwargs
        if "subgraph_type" in given:
            raise ArgumentError(f"subgraph_type must be 'induced', which it is, got {given['subgraph_type']!r}")
        super().__init__(data, [] if num_neighbors is None else num_neighbors, input_nodes,
                         neighbor_sampler=neighbor_sampler,
                         subgraph_type="induced" if neighbor_sampler is None else "directional", **kwargs)  # fmt: skip

    def _place_inputs(self, batch: Any, out: Output) -> None:
        super()._place_inputs(batch, out)
        part = batch if self.input_data.input_type is None else batch[self.input_data.input_type]
        # Seeds come first, in the order given.
        part.mapping = torch.arange(part.batch_size, device=self.device)
