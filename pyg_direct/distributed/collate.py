"""Batches of a graph in parts: rows of nodes and edges are fetched from their owners in one exchange per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.exchange_plan import PlainSample
from pyg_direct.distributed.row_exchange import RowExchange, Wanted
from pyg_direct.distributed.row_foresight import PlannedRows
from pyg_direct.graph.hetero_topo import LINKS, NODES
from pyg_direct.loader.collate.data import copy_data
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.loader.prefetch.drivers import note_memory
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.local_ids.relabel_nodes import unite
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.sampling_options import Sample

# Rows of a batch by attribute, for each kind of its nodes and edges.
Rows = list[dict[str, Tensor]]
Share = Callable[[Mapping[str, Tensor]], list[dict[str, Tensor]]]
# Share of the rows of a group that are distinct, above which they travel for each batch, as rows that travel once are
# copied once more in memory. An assumption, not a measured optimum.
_MOST_DISTINCT = 0.7


class DistAttributes:
    """Builder of batches; does the work of `Attributes` and `HeteroAttributes` for a graph in parts.

    Args:
        is_distinct: True if a batch has each node once: trees share nodes.
    """

    def __init__(self, graph: DistGraph, is_distinct: bool = False) -> None:
        self._graph, self._is_distinct = graph, is_distinct
        self.marks = Marks([table.rows for table in graph.part.tables.values()])
        self._target = 2 if graph.part.manifest.direction == "in" else 0
        # Batches begin as copies of it.
        self._blank = Data()
        self._sampled: GeneralSample | None = None
        self._read: Rows | None = None

    def knowing(self, sampled: GeneralSample | None, read: Rows | None = None) -> DistAttributes:
        """Copy the builder for one batch.

        Args:
            sampled: Sample from which its edges, in both directions, were made; None for others.
            read: Its rows from `read_together`; None to fetch them.
        """
        made = copy(self)
        made._sampled, made._read = sampled, read
        return made

    def read_together(self, outs: Sequence[SamplerOutput | HeteroSamplerOutput]) -> list[Rows]:
        """Fetch the rows of several batches by the exchange of one; a node that several of them have travels once if
        there are many.

        Returns:
            For each batch its rows, which `build` takes.
        """
        joined = [self._join(own) for own in zip(*map(self.list_wanted, outs), strict=True)]
        found = self._graph.rows.fetch([wanted for wanted, _ in joined])
        split = [share(rows) for rows, (_, share) in zip(found, joined, strict=True)]
        return [list(own) for own in zip(*split, strict=True)]

    def read_planned(self, outs: Sequence[SamplerOutput | HeteroSamplerOutput], planned: PlannedRows) -> list[Rows]:
        """Fetch the rows of the next planned batches, as `read_together`; without one, take part in the exchange."""
        asked, num_kinds = [self.list_wanted(out) for out in outs], len(self._graph.node_types)
        none = torch.empty(0, dtype=torch.int64, device=self._graph.device)
        of_edges = [own[num_kinds:] for own in asked] or [
            [one for edge_type in self._graph.edge_types for one in self._edges(edge_type, None, none)]]  # fmt: skip
        joined = [self._join(own) for own in zip(*of_edges, strict=True)]
        of_nodes, found = planned.fetch(asked, [wanted for wanted, _ in joined])
        split = [share(rows) for rows, (_, share) in zip(found, joined, strict=True)]
        return [[*own, *(rows[number] for rows in split)] for number, own in enumerate(of_nodes)]

    def list_nodes(self, out: SamplerOutput | HeteroSamplerOutput) -> list[Wanted]:
        """List the rows of the nodes of a batch, by type."""
        if not isinstance(out, HeteroSamplerOutput):
            return [Wanted(self._graph.node_types[0], out.node, is_distinct=self._is_distinct)]
        none = torch.empty(0, dtype=torch.int64, device=self._graph.device)
        return [
            Wanted(kind, out.node.get(kind, none), is_distinct=self._is_distinct) for kind in self._graph.node_types
        ]

    def list_wanted(self, out: SamplerOutput | HeteroSamplerOutput) -> list[Wanted]:
        """List the rows of a batch: of nodes by type, then of edges."""
        if isinstance(out, HeteroSamplerOutput):
            return self._list_hetero(out)
        return self.knowing(getattr(out, "sampled", None))._list_rows(out.node, (out.row, out.col), out.edge)

    def add_edge_rows(self, rows: Rows, out: SamplerOutput | HeteroSamplerOutput) -> Rows:
        """Fetch the rows of the edges of a sample that came with the rows of its nodes.

        Returns:
            All of its rows, which `build` takes.
        """
        if len(self._graph.part.tables) == len(self._graph.node_types):
            return rows
        return [*rows, *self._graph.rows.fetch(self.list_wanted(out)[len(rows) :])]

    def _join(self, wanted: Sequence[Wanted]) -> tuple[Wanted, Share]:
        """Join the requests of batches for one kind: (the request, function that shares out its rows)."""
        assert isinstance(self._graph.rows, RowExchange)
        first, sizes = wanted[0], [one.ids.numel() for one in wanted]
        if first.owned is None and len(wanted) > 1 and self._graph.rows.names(first.kind):
            union = unite([one.ids for one in wanted], self._graph.part.books[first.kind].num_nodes)
            if not first.is_distinct or union.ids.numel() <= _MOST_DISTINCT * sum(sizes):
                places = [union.find(one.ids) for one in wanted]
                return (
                    first._replace(ids=union.ids, is_distinct=True),
                    lambda rows: [{name: gather_rows(value, at) for name, value in rows.items()} for at in places],
                )
        owned = None if first.owned is None else (first.owned[0], torch.cat([one.owned[1] for one in wanted]))  # type: ignore[index]

        def split(rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
            parts = {name: value.split(sizes) for name, value in rows.items()}
            return [{name: value[number] for name, value in parts.items()} for number in range(len(sizes))]

        return first._replace(ids=torch.cat([one.ids for one in wanted]), owned=owned), split

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
              memory: list[Any] | None = None, counts_seeds: bool = True, read: Rows | None = None
              ) -> Any:  # fmt: skip
        """Build the batch of a sample: a `Data` for a `Sample`, a `HeteroData` for PyG's output.

        The owners of a planned batch's memory are added to `memory`. `read` are rows of a `HeteroData` that are there
        already. With `counts_seeds` a `Data` holds the number of its seeds.
        """
        if isinstance(sample, HeteroSamplerOutput):
            return self._build_hetero(sample, read)
        assert input_id is not None
        batch = self._build(sample, input_id, sample.e_id.numel() == sample.edge_index.shape[1], memory)
        if counts_seeds:
            batch._store["batch_size"] = input_id.numel()
        return batch

    def _build(self, sample: Sample, input_id: Tensor, has_ids: bool, memory: list[Any] | None) -> Data:
        rows = self._read
        if rows is None:
            wanted = self._list_rows(sample.n_id, sample.edge_index, sample.e_id if has_ids else None)
            rows = self._graph.rows.fetch(wanted)
        if memory is not None and sample.memory:
            memory += [*sample.memory, *(value for found in rows for value in found.values())]
        # PyG's own constructor and setters take as long as the launch of several kernels.
        batch = copy_data(self._blank)
        mapping = batch._store._mapping
        mapping.update(edge_index=sample.edge_index, num_nodes=sample.n_id.numel())
        for own in rows[: 2 if has_ids else 1]:
            mapping.update(own)
        mapping.update(n_id=sample.n_id, e_id=sample.e_id, num_sampled_nodes=sample.num_sampled_nodes,
                       num_sampled_edges=sample.num_sampled_edges, input_id=input_id)  # fmt: skip
        return batch

    def build_plain(self, sample: PlainSample, input_id: Tensor) -> Data:
        """Build the batch of a sample that has all of its rows, and note its memory and the order of its edges."""
        batch = copy_data(self._blank)
        num_nodes, num_edges = sample.num_sampled_nodes, sample.num_sampled_edges
        batch._store._mapping.update(
            edge_index=sample.edge_index, num_nodes=sample.node_counts[-1], **sample.rows, n_id=sample.n_id,
            e_id=sample.e_id, num_sampled_nodes=num_nodes, num_sampled_edges=num_edges, input_id=input_id,
            batch_size=input_id.numel())  # fmt: skip
        if self._target == 2:
            register_hops(batch, num_nodes, num_edges, sample.max_degree)
        if sample.n_id.is_cuda:
            note_memory(batch, [*sample.memory, *sample.rows.values()])
        return batch

    def _list_rows(self, nodes: Tensor, ends: Any, edges: Tensor | None) -> list[Wanted]:
        """List the rows of a batch without types; `ends` are rows and columns of edges, `edges` their ids or None."""
        wanted = [Wanted(self._graph.node_types[0], nodes, is_distinct=self._is_distinct)]
        edge_type = self._graph.edge_types[0]
        if edge_type in self._graph.part.tables:
            # Owners are not needed if the graph lies in one memory.
            expanded = nodes[:0] if self._graph.whole is not None else self._find_expanded(nodes, ends, edges)
            wanted += self._edges(edge_type, edges, expanded)
        return wanted

    def _find_expanded(self, nodes: Tensor, ends: Any, edges: Tensor | None) -> Tensor:
        """Find the expanded node of each edge, whose owner has the edge's rows, int64 `[E']`."""
        end = 1 if self._target == 2 else 0
        if self._sampled is None or edges is None:
            return nodes[ends[end]]
        # A reversed edge has the id of the other direction.
        ids, order = self._sampled.edge[LINKS].sort()  # type: ignore[union-attr]
        nodes = self._sampled.node[NODES][self._sampled.edge_index[LINKS][end]][order]
        return nodes[torch.searchsorted(ids, edges).clamp_(max=max(0, ids.numel() - 1))]

    def _list_hetero(self, out: HeteroSamplerOutput) -> list[Wanted]:
        """List the rows of a batch with types."""
        none, wanted = torch.empty(0, dtype=torch.int64, device=self._graph.device), self.list_nodes(out)
        for edge_type in self._graph.edge_types:
            ids = (out.edge or {}).get(edge_type)
            ends = (out.col if self._target == 2 else out.row).get(edge_type, none)
            ends = out.node[edge_type[self._target]][ends] if ends.numel() else none
            wanted += self._edges(edge_type, ids if ids is not None and ids.numel() == ends.numel() else None, ends)
        return wanted

    def _build_hetero(self, out: HeteroSamplerOutput, rows: Rows | None) -> HeteroData:
        rows = self._graph.rows.fetch(self._list_hetero(out)) if rows is None else rows
        owned = [edge_type for edge_type in self._graph.edge_types if edge_type in self._graph.part.tables]
        none = torch.empty(0, dtype=torch.int64, device=self._graph.device)
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
