"""Loaders of sets of nodes for graphs with and without types: a set is a list of ids over the nodes of all types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.loader.base_loader import ALONE
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.collate.hetero_data import HeteroAttributes
from pyg_direct.loader.induced_loader import InducedLoader
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.prefetch.gpu_streams import note_memory
from pyg_direct.sampler.graph_reader import count_nodes, read_parts
from pyg_direct.sampler.keyed_sampler import Drawn, Output, to_general_output
from pyg_direct.sampling.captured_plan import PendingOutput
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe, Sample


class TypedInducedLoader(InducedLoader):
    """Batches of subgraphs that sets of nodes induce in a `Data` or a `HeteroData`.

    With types, a subclass calls `_note_types` first, and `_start_typed` in `_submit`; edges of batches are sorted by
    target.
    """

    _typed_plan: GeneralPlan | None = None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data | HeteroData]: ...

    def _note_types(self, data: Data | HeteroData) -> int:
        """Note the types of a graph with the numbers of their nodes; return the sum.

        Raises:
            ArgumentError: the number of nodes cannot be read from any attribute.
        """
        sizes = count_types(data)
        self._kinds = list(sizes)
        # First id of each type among all nodes, in PyG's numbering.
        self._type_begins = np.cumsum([0, *sizes.values()])
        return sum(sizes.values())

    def _check_nodes(self) -> None:
        """Check that the graph still has the same number of nodes.

        Raises:
            ArgumentError: it has another number.
        """
        sizes = count_types(self.data)
        if list(sizes) != self._kinds or np.any(np.cumsum([0, *sizes.values()]) != self._type_begins):
            raise ArgumentError(f"data must have the {self._type_begins[-1]} nodes that it had when the loader was "
                                f"made, got {sum(sizes.values())}: make a new one")  # fmt: skip

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

    def _start_typed(self, nodes: Tensor) -> PendingOutput:
        """Start to find the subgraph of nodes as PyG numbers them, all types in a row, int64 `[M]` on the CPU."""
        assert self._typed_plan is not None
        pending = self._typed_plan.submit_together([(self._split(nodes), None)], [0])
        return PendingOutput(pending, lambda samples: Drawn(to_general_output(samples[0], is_hetero=True)))

    def _split(self, nodes: Tensor) -> dict[str, Tensor]:
        """Split ids by type, and convert them to ids within their types, in the given order."""
        ids = nodes.numpy()
        owners = np.searchsorted(self._type_begins, ids, side="right") - 1
        by_type = np.argsort(owners, kind="stable")
        parts = np.split(ids[by_type], np.searchsorted(owners[by_type], np.arange(1, len(self._kinds))))
        return {kind: torch.from_numpy(part - begin)
                for kind, part, begin in zip(self._kinds, parts, self._type_begins, strict=False)}  # fmt: skip

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return self._build_any(sample)

    def _build_any(self, made: Any) -> Any:
        """Build the batch of a sample, with types or without."""
        return self._build(made) if isinstance(made, Sample) else self._build_typed(made.out)

    def _build_typed(self, out: Output) -> HeteroData:
        memory: list[Any] = []
        batch: HeteroData = self._general.build(self.data, out, memory=memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch


def count_types(data: Data | HeteroData) -> dict[str, int]:
    """Count the nodes of each type; a `Data` has one type without a name.

    Raises:
        ArgumentError: the number of nodes cannot be read from any attribute.
    """
    if isinstance(data, Data):
        return {"": count_nodes(data)}
    sizes = {store._key: store.num_nodes for store in data.node_stores}
    for kind, size in sizes.items():
        if size is None:
            raise ArgumentError(f"data must know the number of {kind!r} nodes; set data[{kind!r}].num_nodes")
    return {kind: int(size) for kind, size in sizes.items()}
