"""`RandomNodeLoader`: parts of all nodes with the edges among them, after PyG's loader of that name, on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import RandomNodeLoader as PygRandomNodeLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.loader.base_loader import ALONE
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.collate.hetero_data import HeteroAttributes
from pyg_direct.loader.induced_loader import InducedLoader, check_count
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.prefetch.gpu_streams import note_memory
from pyg_direct.loader.sampler_loader import read_positions
from pyg_direct.sampler.graph_reader import count_nodes, read_parts, read_topology
from pyg_direct.sampler.keyed_sampler import Drawn, Output, to_general_output
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import GeneralRecipe, Sample
from pyg_direct.typing import Device


class RandomNodeLoader(InducedLoader, PygRandomNodeLoader):  # type: ignore[misc]
    """Batches of a share of all nodes each, and all edges among them, after PyG's `RandomNodeLoader`, on `device`.

    With `shuffle=True` each epoch cuts the nodes of all types into other parts. A batch has the attributes that PyG's
    has; its nodes stand in the order of the epoch, its edges by target.

    Args:
        data: `Data` or `HeteroData`.
        num_parts: Batches of an epoch, at least 1: each has ceil(nodes / num_parts) nodes but the last.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader` but `batch_size`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """

    _typed_plan: GeneralPlan | None = None

    def __init__(self, data: Data | HeteroData, num_parts: int, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Any) -> None:  # fmt: skip
        if not isinstance(data, (Data, HeteroData)):
            raise ArgumentTypeError(f"data must be a Data or a HeteroData, got {type(data).__name__}")
        self.num_parts = check_count("num_parts", num_parts)
        if "batch_size" in kwargs:
            raise ArgumentError(f"batch_size must not be given, as it follows from num_parts, got "
                                f"{kwargs['batch_size']!r}")  # fmt: skip
        sizes = _count_types(data)
        self.num_nodes = sum(sizes.values())
        if self.num_nodes == 0:
            raise ArgumentError("data must have nodes, got none")
        self._kinds = list(sizes)
        # Where each type begins among all nodes, as PyG numbers them.
        self._begins = np.cumsum([0, *sizes.values()])
        self._open_induced(data, self.num_nodes, math.ceil(self.num_nodes / num_parts), device, placement,
                           topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven,
                           kwargs)  # fmt: skip

    def _open_topology(self) -> CSRTopo:
        self._check_nodes()
        return read_topology(self.data, self.device)

    def _check_nodes(self) -> None:
        """Check that the graph still has the nodes that parts are made of.

        Raises:
            ArgumentError: it has another number.
        """
        sizes = _count_types(self.data)
        if list(sizes) != self._kinds or np.any(np.cumsum([0, *sizes.values()]) != self._begins):
            raise ArgumentError(f"data must have the {self.num_nodes} nodes that it had when the loader was made, got "
                                f"{sum(sizes.values())}: make a new one")  # fmt: skip

    def _prepare(self) -> Any:
        if isinstance(self.data, Data):
            return super()._prepare()
        self._check_nodes()
        topology = read_parts(self.data).open("in", False)
        if self._typed_plan is None or self._sampled_topology is not topology:
            placed = topology.place(self.topology_placement, self.device)
            self._typed_plan = GeneralPlan(placed, GeneralRecipe([], subgraph_type="induced"))
            self._sampled_topology: HeteroTopo | None = topology
        self._renew_rows()
        return self._general

    def _renew_rows(self) -> None:
        if isinstance(self.data, Data):
            super()._renew_rows()
        else:
            self._general = HeteroAttributes(self.data, self._sampled_topology, self.device, self.placement,
                                             self.feature_cache, self.store_dtype)  # fmt: skip

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if isinstance(self.data, Data):
            return super()._list_places()
        attributes = self._prepare() if self._general is None else self._general
        return [f"topology: {self._sampled_topology}"], attributes.describe()

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return self._start(seeds.positions)

    def _start(self, nodes: Tensor) -> Any:
        """Start to find the subgraph of nodes as PyG numbers them, all types in a row."""
        if self._typed_plan is None:
            assert self._plan is not None
            return self._plan.submit(nodes)
        return Drawn(to_general_output(self._typed_plan.sample(self._split(nodes), 0), is_hetero=True))

    def _split(self, nodes: Tensor) -> dict[str, Tensor]:
        """Ids within their types, in the order given."""
        ids = nodes.numpy()
        owners = np.searchsorted(self._begins, ids, side="right") - 1
        by_type = np.argsort(owners, kind="stable")
        parts = np.split(ids[by_type], np.searchsorted(owners[by_type], np.arange(1, len(self._kinds))))
        return {kind: torch.from_numpy(part - begin)
                for kind, part, begin in zip(self._kinds, parts, self._begins, strict=False)}  # fmt: skip

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return self._build(sample) if isinstance(sample, Sample) else self._build_typed(sample.out)

    def _build_typed(self, out: Output) -> HeteroData:
        memory: list[Any] = []
        batch: HeteroData = self._general.build(self.data, out, memory=memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch

    def _collate_items(self, index: Any) -> Any:
        """The batch of these nodes (PyG's hook).

        Args:
            index: Nodes as PyG numbers them, all types in a row, int64 `[B]` or a list.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `index`, rule and value.
        """
        self._prepare()
        made = self._start(read_positions(index, self.num_nodes)).finish()
        return self._build(made) if isinstance(made, Sample) else self._build_typed(made.out)


def _count_types(data: Data | HeteroData) -> dict[str, int]:
    """The number of nodes of each type; of one without a name for a `Data`.

    Raises:
        ArgumentError: nothing that the graph holds tells.
    """
    if isinstance(data, Data):
        return {"": count_nodes(data)}
    sizes = {store._key: store.num_nodes for store in data.node_stores}
    for kind, size in sizes.items():
        if size is None:
            raise ArgumentError(f"data must know the number of {kind!r} nodes; set data[{kind!r}].num_nodes")
    return {kind: int(size) for kind, size in sizes.items()}
