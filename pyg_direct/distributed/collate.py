"""Batches of a graph in parts: rows of nodes and edges are fetched from their owners in one exchange per batch."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput

from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.row_exchange import Wanted
from pyg_direct.graph.hetero_topo import LINKS, NODES
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.sampling_options import Sample


class DistAttributes:
    """Builder of batches; does the work of `Attributes` and `HeteroAttributes` for a graph in parts.

    Args:
        graph: The graph.
        is_distinct: True if a batch has each node once: trees share nodes.
    """

    def __init__(self, graph: DistGraph, is_distinct: bool = False) -> None:
        self._graph, self._is_distinct = graph, is_distinct
        self.marks = Marks([table.rows for table in graph.part.tables.values()])
        self._target = 2 if graph.part.manifest.direction == "in" else 0
        self._sampled: GeneralSample | None = None

    def knowing(self, sampled: GeneralSample | None) -> DistAttributes:
        """Copy the builder for a batch whose edges, in both directions, were made from this sample."""
        made = copy(self)
        made._sampled = sampled
        return made

    def describe(self) -> dict[str, Any]:
        """Return the part's own rows by name."""
        return dict(self._graph.rows.describe())

    def summarise(self) -> list[Any]:
        """Return an empty list: nothing is chosen automatically."""
        return []

    def _edges(self, edge_type: Any, ids: Tensor | None, ends: Tensor) -> list[Wanted]:
        """Request rows of edges; an edge belongs to the owner of its expanded node."""
        if edge_type not in self._graph.part.tables:
            return []
        if ids is None:
            # All processes must take part in the exchange.
            ids = ends = ends[:0]
        return [Wanted(edge_type, ids, owned=(edge_type[self._target], ends))]

    def build(self, data: Any, sample: Any, input_id: Tensor | None = None, *, checked: bool = True,
              memory: list[Any] | None = None, counts_seeds: bool = True, read: None = None) -> Any:  # fmt: skip
        """Build the batch of a sample: a `Data` for a `Sample`, a `HeteroData` for PyG's output.

        The owners of a planned batch's memory are added to `memory`. `read` is None, as a batch is one exchange. With
        `counts_seeds` a `Data` holds the number of its seeds.
        """
        if isinstance(sample, HeteroSamplerOutput):
            return self._build_hetero(sample)
        assert input_id is not None
        batch = self._build(sample, input_id, sample.e_id.numel() == sample.edge_index.shape[1], memory)
        if counts_seeds:
            batch._store["batch_size"] = input_id.numel()
        return batch

    def _build(self, sample: Sample, input_id: Tensor, has_ids: bool, memory: list[Any] | None) -> Data:
        kind, edge_type = self._graph.node_types[0], self._graph.edge_types[0]
        edges = []
        if edge_type in self._graph.part.tables:
            # Owners are not needed if the graph lies in one memory.
            is_whole = self._graph.whole is not None
            expanded = sample.n_id[:0] if is_whole else self._find_expanded(sample)
            edges = self._edges(edge_type, sample.e_id if has_ids else None, expanded)
        rows = self._graph.rows.fetch([Wanted(kind, sample.n_id, is_distinct=self._is_distinct), *edges])
        if memory is not None and sample.memory:
            memory += [*sample.memory, *(value for found in rows for value in found.values())]
        batch = Data(edge_index=sample.edge_index, num_nodes=sample.n_id.numel())
        store = batch._store
        for name, value in rows[0].items():
            store[name] = value
        for name, value in rows[1].items() if edges and has_ids else ():
            store[name] = value
        store["n_id"], store["e_id"] = sample.n_id, sample.e_id
        store["num_sampled_nodes"], store["num_sampled_edges"] = sample.num_sampled_nodes, sample.num_sampled_edges
        store["input_id"] = input_id
        return batch

    def _find_expanded(self, sample: Sample) -> Tensor:
        """Find the expanded node of each edge, whose owner has the edge's rows, int64 `[E']`."""
        end = 1 if self._target == 2 else 0
        if self._sampled is None:
            return sample.n_id[sample.edge_index[end]]
        # A reversed edge has the id of the other direction.
        ids, order = self._sampled.edge[LINKS].sort()  # type: ignore[union-attr]
        nodes = self._sampled.node[NODES][self._sampled.edge_index[LINKS][end]][order]
        return nodes[torch.searchsorted(ids, sample.e_id).clamp_(max=max(0, ids.numel() - 1))]

    def _build_hetero(self, out: HeteroSamplerOutput) -> HeteroData:
        none = torch.empty(0, dtype=torch.int64, device=self._graph.device)
        wanted = [
            Wanted(kind, out.node.get(kind, none), is_distinct=self._is_distinct) for kind in self._graph.node_types
        ]
        owned = []
        for edge_type in self._graph.edge_types:
            ids = (out.edge or {}).get(edge_type)
            ends = (out.col if self._target == 2 else out.row).get(edge_type, none)
            ends = out.node[edge_type[self._target]][ends] if ends.numel() else none
            edges = self._edges(edge_type, ids if ids is not None and ids.numel() == ends.numel() else None, ends)
            owned += [edge_type] * len(edges)
            wanted += edges
        rows = self._graph.rows.fetch(wanted)
        batch = HeteroData()
        for kind, found in zip(self._graph.node_types, rows, strict=False):
            batch[kind].num_nodes = out.node.get(kind, none).numel()
            for name, value in found.items():
                batch[kind][name] = value
        for edge_type in self._graph.edge_types:
            batch[edge_type].edge_index = torch.stack([out.row.get(edge_type, none), out.col.get(edge_type, none)])
        for edge_type, found in zip(owned, rows[len(self._graph.node_types) :], strict=True):
            if (out.edge or {}).get(edge_type) is not None or edge_type not in out.row:
                for name, value in found.items():
                    batch[edge_type][name] = value
        return batch
