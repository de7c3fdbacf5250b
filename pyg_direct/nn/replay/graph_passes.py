"""Recorded passes over batches of many small graphs (`GraphPasses`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.pool import glob

from pyg_direct.nn.replay.batch_passes import BatchPasses
from pyg_direct.nn.replay.graphs_call import EDGE, NODE, GraphsCall, fill_in_graphs
from pyg_direct.nn.replay.padded_batch import HopRows
from pyg_direct.nn.replay.padded_graphs import GraphSizes, PaddedGraphs, find_other_norm, masked_norms
from pyg_direct.nn.replay.recorded_passes import RecordedPasses, Rules

# How much larger than the seen batches batches may be: graphs differ more than samples do.
_MARGIN = 0.05


class GraphPasses(BatchPasses):
    """Passes over places for batches of as many graphs; unused places belong to one more graph.

    Args:
        largest: Nodes and edges of the largest batches known, and the graphs of each.
    """

    def __init__(self, model: Any, rules: Rules, call: GraphsCall, largest: GraphSizes) -> None:
        super().__init__(model, rules, call.begins.device)
        self._largest = largest
        names = [f"rows_{place}" for place, role in enumerate(call.roles) if role in (NODE, EDGE)]
        self._padded = PaddedGraphs(call.join(), largest, _MARGIN, names)
        self._edges = self._padded._edges
        data = self._padded.data._store._mapping
        self._places = [data[f"rows_{place}" if role in (NODE, EDGE) else role]
                        for place, role in enumerate(call.roles)]  # fmt: skip
        self._args, self._kwargs = fill_in_graphs(call.nest, iter(self._places), self._padded.places.graphs)
        # Rows of each result: of nodes or of graphs.
        self._results: list[bool] = []

    def make_again(self, call: GraphsCall) -> GraphPasses:
        """Make other places for the arguments of a pass."""
        again = GraphPasses(self._model(), self._rules, call, self._largest)
        again._results = self._results
        return again

    def fill(self, call: GraphsCall) -> bool:
        """Copy the arguments of a pass; False if they do not fit."""
        with torch.no_grad():
            return self._padded.fill(call.join())

    def _list_given(self) -> list[Tensor]:
        masks = [part for pair in self._padded.masks.values() for part in pair]
        return [*self._places, self._padded.data.ptr, *masks]

    def _list_rows(self, call: GraphsCall) -> Iterator[HopRows]:
        for place, role, rows in zip(self._places, call.roles, call.tensors, strict=True):
            if role in (NODE, EDGE):
                at = int(role is EDGE)
                yield HopRows(rows, place, call.sizes[at : at + 1], self._padded.places[at : at + 1])

    def _compute(self) -> Any:
        model: Any = self._model()
        with masked_norms(model, self._padded.masks), self._known_size():
            return type(model).forward(model, *self._args, **self._kwargs)

    @contextmanager
    def _known_size(self) -> Iterator[None]:
        """Let PyG's `global_add_pool` and its like know the number of graphs, for which they would wait for a GPU."""
        before, vector, graphs = glob.scatter, self._padded.data.batch, self._padded.places.graphs

        def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum"
                    ) -> Tensor:  # fmt: skip
            size = graphs if dim_size is None and index is vector else dim_size
            summed: Tensor = before(src, index, dim=dim, dim_size=size, reduce=reduce)
            return summed

        glob.scatter = scatter  # type: ignore[assignment]
        try:
            yield
        finally:
            glob.scatter = before

    def _compute_for(self, model: Any, call: GraphsCall) -> Any:
        args, kwargs = fill_in_graphs(call.nest, iter(call.tensors), call.sizes.graphs)
        return type(model).forward(model, *args, **kwargs)

    def _find_reason(self, model: Any, call: GraphsCall) -> str | None:
        found = find_other_norm(model)
        if found is not None:
            return f"the model has a norm over all nodes, {found}"
        return RecordedPasses._find_reason(self, model, call)

    def _find_misfit(self) -> str | None:
        if self._nest is None:
            return "the model gives results of other kinds than tensors"
        if not self._rules.is_graded and any(part.requires_grad for part in self._made):
            return "forward asks for gradients by itself"
        places = self._padded.places
        self._results = []
        for made in self._made:
            rows = made.shape[0] if made.dim() > 0 else -1
            # Edges are in another order.
            if rows not in (places.nodes, places.graphs):
                return f"the model gives {rows} rows, which are neither those of graphs nor those of nodes"
            self._results.append(rows == places.nodes)
        return self._find_results()

    def _list_hops(self, call: GraphsCall) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
        places, sizes = self._padded.places, call.sizes
        return [((sizes.nodes,), (places.nodes,)) if is_of_nodes else ((sizes.graphs,), (places.graphs,))
                for is_of_nodes in self._results]  # fmt: skip
