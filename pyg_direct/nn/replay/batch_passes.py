"""Recorded passes over places for batches of up to some size: sampled ones (`PaddedPasses`), and batches of many small
graphs (`GraphPasses`).

Before a recording is used, results of the padded batch are compared with those of the batch itself, with loud numbers
in the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from operator import lt
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.pool import glob

from pyg_direct.errors import describe
from pyg_direct.nn.replay.guards import CONTAINERS, find_norm_over_nodes, left_as_it_was
from pyg_direct.nn.replay.host_reads import HostReads
from pyg_direct.nn.replay.model_call import Call, fill_in, name_rows, take_tensors
from pyg_direct.nn.replay.padded_batch import (
    EDGES,
    NODES,
    Counts,
    GraphSizes,
    HopRows,
    PaddedEdges,
    PaddedGraphs,
    Sizes,
    copy_hops,
    find_other_norm,
    masked_norms,
)
from pyg_direct.nn.replay.recorded_passes import RecordedPasses, Rules, is_near

# How much larger than the seen batches batches may be: graphs differ more than samples do.
_MARGIN, _MARGIN_OF_GRAPHS = 0.02, 0.05
# Factor of a node's numbers in padding rows, for a test whether others read them.
_LOUD = 100


class BatchPasses(RecordedPasses):
    """Passes over places for batches of up to some size; a subclass has the places."""

    _is_padded = True
    # Places of the edges, and the arguments that the model is given.
    _edges: Any
    _args: Any
    _kwargs: dict[str, Any]
    # Rows of each hop in the gradients of the last pass; None for one that is zero, or without padding.
    _spread_counts: Sequence[Counts | None] = ()

    # What a subclass has.

    def _fill_edges(self, call: Call) -> bool:
        """Copy the edges of a pass; False if they do not fit."""
        raise NotImplementedError

    def _list_rows(self, call: Call) -> Iterator[HopRows]:
        """List the rows of a pass."""
        raise NotImplementedError

    def _list_hops(self, call: Call) -> list[tuple[Counts, Counts] | None]:
        """List rows of each hop in the results for a batch, and their room; None for a result without padding."""
        raise NotImplementedError

    # For both.

    def fill(self, call: Call) -> bool:
        """Copy the arguments of a pass; False if they do not fit."""
        if not self._fill_edges(call):
            return False
        with torch.no_grad():
            copy_hops(self._list_rows(call))
        return True

    def _prepare(self) -> None:
        self._edges.register()

    def _compute(self) -> Any:
        model: Any = self._model()
        return type(model).forward(model, *self._args, **self._kwargs)

    def _find_reason(self, model: Any, call: Call) -> str | None:
        found = self._find_norm(model)
        if found is not None:
            return f"the model has a norm over all nodes, {found}"
        return super()._find_reason(model, call)

    def _find_norm(self, model: Any) -> str | None:
        """Return a norm of the model that would read padding; None without one."""
        return find_norm_over_nodes(model)

    def _find_misfit(self) -> str | None:
        if self._nest is None:
            return "the model gives results of other kinds than tensors"
        if not self._rules.is_graded and any(part.requires_grad for part in self._made):
            return "forward asks for gradients by itself"
        return None

    def _find_difference(self, model: Any, call: Call) -> str | None:
        """Return why rows of nodes differ from those for the batch itself, in evaluation, or buffers from those without
        padding; None if neither.
        """
        reason = self._find_written(model, call)
        if reason is not None:
            return reason
        for part in model.modules():
            part.training = False
        graded, self._graded = self._graded, []
        expected: list[Tensor] = []
        try:
            with torch.no_grad():
                args, kwargs = fill_in(call.nest, iter(call.tensors), call.sizes)
                nest = take_tensors(type(model).forward(model, *args, **kwargs), expected)
                self._fill_up(call, _LOUD)
                self._run()
                found = self.cut(self._made, call)
        except Exception as error:  # Any error of a model about its arguments.
            return describe(error)
        finally:
            self._made, self._graded = [], graded
            self._fill_up(call, 1)
        pairs = list(zip(expected, found, strict=False))
        if nest != self._nest or any(theirs.shape != ours.shape for theirs, ours in pairs):
            return "the model gives other rows for a batch that is filled up"
        if not all(is_near(ours, theirs) for theirs, ours in pairs):
            return "rows of nodes depend on nodes that are not their neighbors"
        return None

    def _find_written(self, model: Any, call: Call) -> str | None:
        """Return why a buffer that forward writes depends on padding; None if none does."""
        if next(model.buffers(), None) is None:
            return None
        found: list[list[Tensor]] = []
        try:
            for factor in (1, _LOUD):
                self._fill_up(call, factor)
                # Random numbers are the same both times.
                with left_as_it_was(model, self._device), torch.no_grad(), self._answered():
                    self._compute()
                    found.append([part.detach().clone() for part in model.buffers()])
        except Exception as error:  # Any error of a model about its arguments.
            return describe(error)
        finally:
            self._fill_up(call, 1)
        return None if all(map(is_near, *found)) else "a buffer of the model depends on all rows of a batch"

    def _fill_up(self, call: Call, factor: int) -> None:
        """Fill padding rows with the numbers of the batch's first rows, times a factor."""
        for rows, place, counts, room in self._list_rows(call):
            first, begin = rows.detach()[:1], 0
            if rows.is_floating_point():
                most = torch.finfo(rows.dtype).max
                wide = first.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
                first = (wide * factor).clamp_(-most, most).to(rows.dtype)
            for count, size in zip(counts, room, strict=True):
                if count < size and len(first):
                    place.narrow(0, begin + count, size - count).copy_(first)
                begin += size

    def cut(self, made: Sequence[Tensor], call: Call) -> list[Tensor]:
        """Return the rows of a batch, in new memory."""
        found = []
        for rows, hops in zip(made, self._list_hops(call), strict=True):
            if hops is None:
                found.append(rows.clone())
                continue
            parts, begin = [], 0
            for count, room in zip(*hops, strict=True):
                parts.append(rows.narrow(0, begin, count))
                begin += room
            found.append(parts[0].clone() if len(parts) == 1 else torch.cat(parts))
        return found

    def _spread(self, grads: Sequence[Tensor | None], call: Call) -> None:
        hops, before = self._list_hops(call), self._spread_counts or [None] * len(grads)
        self._spread_counts = []
        for place, grad, number, last in zip(self._grads, grads, self._graded, before, strict=True):
            own = hops[number]
            # Padding nodes get none. They have none yet if the batch before was no larger in any hop.
            if grad is None or (own is not None and (last is None or any(map(lt, own[0], last)))):
                place.zero_()
            self._spread_counts.append(None if grad is None or own is None else own[0])
            if grad is None:
                continue
            if own is None:
                place.copy_(grad)
            else:
                copy_hops([HopRows(grad, place, *own)])


def _make_place(rows: Tensor, known: Tensor | None, count: int) -> Tensor:
    """Make a place for rows; padding holds values that a model is made for, which no row of this batch may have."""
    first = rows.detach()[:1] if known is None else known
    return first.expand(count, *rows.shape[1:]).clone() if len(first) else rows.new_zeros(count, *rows.shape[1:])


# Nest of a result that is one tensor.
_ONE = take_tensors(torch.empty(0), [])


def _list_ends(places: Counts) -> dict[int, int]:
    """Return how many hops have so many places together."""
    return {sum(places[: hop + 1]): hop + 1 for hop in reversed(range(len(places)))}


class PaddedPasses(BatchPasses):
    """Passes over places for sampled batches.

    Args:
        largest: Nodes and edges of each hop of the largest batches known.
        known: A row of each tensor, by its place in the call, if a batch had one.
    """

    def __init__(self, model: Any, rules: Rules, call: Call, largest: Sizes, known: Mapping[int, Tensor]) -> None:
        super().__init__(model, rules, call.tensors[0].device)
        self._largest, self._seeds, self._known = largest, call.seeds, known
        self._has_types = EDGES not in largest.edges
        num_seeds = None if self._has_types else largest.nodes[NODES][0]
        self._edges = PaddedEdges(call.pair_edges(), largest, _MARGIN, num_seeds)
        self._places = []
        for number, ((key, is_edges), tensor) in enumerate(zip(call.roles, call.tensors, strict=True)):
            count = sum(self._edges.places.find(key))
            self._places.append(self._edges.edge_index[key] if is_edges
                                else _make_place(tensor, known.get(number), count))  # fmt: skip
        self._args, self._kwargs = fill_in(call.nest, iter(self._places), self._edges.places)
        places = self._edges.places
        rows = [accumulate(counts) for part in places for counts in part.values()]
        self._reads = HostReads(self._device, frozenset(chain.from_iterable(rows)))
        # Of each result the type of its rows and how many hops they are; 0 for the seeds alone.
        self._results: list[tuple[str, int]] = []

    def make_again(self, call: Call) -> PaddedPasses:
        """Make other places for the arguments of a pass."""
        again = PaddedPasses(self._model(), self._rules, call, self._largest, self._known)
        again._results = self._results
        return again

    def _list_given(self) -> list[Tensor]:
        return self._places

    def _fill_edges(self, call: Call) -> bool:
        return self._edges.fill(call.pair_edges(), call.sizes)

    def _list_rows(self, call: Call) -> Iterator[HopRows]:
        for (key, is_edges), rows, place in zip(call.roles, call.tensors, self._places, strict=True):
            if not is_edges:
                yield HopRows(rows, place, call.sizes.find(key), self._edges.places.find(key))

    def _find_misfit(self) -> str | None:
        made: Any = self._made[0] if len(self._made) == 1 and self._nest == _ONE else None
        if self._has_types:
            found = super()._find_misfit()
            if found is not None:
                return found
        elif made is None or made.dim() == 0 or made.requires_grad != self._rules.is_graded:
            return "the model gives other results than one tensor of rows of nodes"
        self._results = []
        for key, made in zip(self._list_keys(self._nest), self._made, strict=True):
            rows = made.shape[0] if made.dim() > 0 else -1
            end = next((end for end in self._list_type_ends(key) if end[0] == rows), None)
            if end is None:
                place = "a type in some hops" if self._has_types else "some hops"
                return f"the model gives {rows} rows, which are not those of the nodes of {place}"
            self._results.append(end[1])
        return self._find_results()

    def _list_keys(self, nest: Any, key: Any = None) -> Iterator[Any]:
        """List the type of each tensor of the results; None without one."""
        kind, *rest = nest
        if kind in CONTAINERS:
            names = rest[1] if kind is dict else [key] * len(rest[0])
            for name, part in zip(names, rest[0], strict=True):
                yield from self._list_keys(part, name if name in self._edges.places.nodes else key)
        elif not rest:
            yield key

    def _list_type_ends(self, key: Any) -> Iterator[tuple[int, tuple[str, int]]]:
        """List numbers of rows that a result may have, with the type and the hops; the type of the seeds first."""
        nodes = self._edges.places.nodes
        first = self._seeds[0] if self._seeds is not None else None
        for kind in [key] if key is not None else sorted(nodes, key=lambda name: name != first):
            if kind == first and self._seeds is not None:
                yield self._seeds[1], (kind, 0)
            for rows, hops in _list_ends(nodes[kind]).items():
                yield rows, (kind, hops)

    def _list_hops(self, call: Call) -> list[tuple[Counts, Counts] | None]:
        return [(call.sizes.nodes[kind][:hops], self._edges.places.nodes[kind][:hops]) if hops else None
                for kind, hops in self._results]  # fmt: skip


class GraphPasses(BatchPasses):
    """Passes over places for batches of as many graphs; unused places belong to one more graph.

    Args:
        largest: Nodes and edges of the largest batches known, and the graphs of each.
    """

    def __init__(self, model: Any, rules: Rules, call: Call, largest: GraphSizes) -> None:
        super().__init__(model, rules, call.tensors[-1].device)
        self._largest = largest
        names = [name_rows(place, role) for place, role in enumerate(call.roles)]
        self._padded = PaddedGraphs(
            call.join(),
            largest,
            _MARGIN_OF_GRAPHS,
            [name for name, role in zip(names, call.roles, strict=True) if name != role],
        )
        self._edges = self._padded._edges
        self._places = [self._padded.data._store._mapping[name] for name in names]
        self._args, self._kwargs = fill_in(call.nest, iter(self._places), self._padded.places)
        self._reads = HostReads(self._device, frozenset(self._padded.places))
        # Rows of each result: of nodes or of graphs.
        self._results: list[bool] = []

    def make_again(self, call: Call) -> GraphPasses:
        """Make other places for the arguments of a pass."""
        again = GraphPasses(self._model(), self._rules, call, self._largest)
        again._results = self._results
        return again

    def fill(self, call: Call) -> bool:
        """Copy the arguments of a pass; False if they do not fit."""
        with torch.no_grad():
            return self._padded.fill(call.join(), is_replayed=True)

    def _list_given(self) -> list[Tensor]:
        masks = [part for pair in self._padded.masks.values() for part in pair]
        return [*self._places, *masks]

    def _list_rows(self, call: Call) -> Iterator[HopRows]:
        for place, role, rows in zip(self._places, call.roles, call.tensors, strict=True):
            if role in ("node", "edge"):
                at = int(role == "edge")
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

    def _find_norm(self, model: Any) -> str | None:
        return find_other_norm(model)

    def _find_misfit(self) -> str | None:
        found = super()._find_misfit()
        if found is not None:
            return found
        places = self._padded.places
        self._results = []
        for made in self._made:
            rows = made.shape[0] if made.dim() > 0 else -1
            # Edges are in another order.
            if rows not in (places.nodes, places.graphs):
                return f"the model gives {rows} rows, which are neither those of graphs nor those of nodes"
            self._results.append(rows == places.nodes)
        return self._find_results()

    def _list_hops(self, call: Call) -> list[tuple[Counts, Counts] | None]:
        places, sizes = self._padded.places, call.sizes
        return [((sizes.nodes,), (places.nodes,)) if is_of_nodes else ((sizes.graphs,), (places.graphs,))
                for is_of_nodes in self._results]  # fmt: skip
