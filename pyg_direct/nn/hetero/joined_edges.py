"""Edges of the relations of a layer, one relation after the other: one launch for all instead of one each.

They are joined once for the layers that share them, and kept as long as the batch of the first relation. Products and
results of several relations are also concatenated in one memory (`multiply_apart`, `split_apart`).

If the result of a relation is unused by the loss, its inputs get no gradient. Optimizers treat this differently from
zeros. The step in between is one for all relations and cannot see the difference. So the last step leaves a note for
the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.sorted_edges import SortedBatch
from pyg_direct.ops.aggregate.sum import Transposed, check_edges
from pyg_direct.ops.local_ids.csr import compress_ids
from pyg_direct.ops.run_kernel import runs_on_gpu


class Relation(NamedTuple):
    """Convolution of a layer, and its inputs.

    Attributes:
        conv: The convolution.
        batch: The known batch of its edges, which fit its rows.
        edge_index: (source, target), `[2, E]`.
        sources, own: Rows of its sources `[N, C]` and of its targets `[T, D]`.
        edge_rows: Rows of its edges, `[E, F]`, if it takes them.
    """

    conv: Any
    batch: SortedBatch
    edge_index: Tensor
    sources: Tensor
    own: Tensor
    edge_rows: Any = None


class Tables(NamedTuple):
    """Rows of sources by type, each once.

    Attributes:
        tables: Rows of each type, `[N, C]`.
        place_of: Number of a tensor's table, by its identity: relations of one type are given one tensor.
        places: Table of the sources of each relation.
        starts: First row of each table if the tables are concatenated.
        num_rows: Rows of all tables.
    """

    tables: list[Tensor]
    place_of: dict[int, int]
    places: list[int]
    starts: list[int]
    num_rows: int

    @classmethod
    def of(cls, relations: Sequence[Relation]) -> Tables:
        """Collect the sources of relations."""
        tables = list({id(relation.sources): relation.sources for relation in relations}.values())
        place_of = {id(table): place for place, table in enumerate(tables)}
        begins = list(accumulate((len(table) for table in tables), initial=0))
        places = [place_of[id(relation.sources)] for relation in relations]
        return cls(tables, place_of, places, [begins[place] for place in places], begins[-1])

    def serve(self) -> list[list[int]]:
        """Return the relations whose sources each table has."""
        return [[i for i, its in enumerate(self.places) if its == place] for place in range(len(self.tables))]

    def add_own(self, relations: Sequence[Relation]) -> list[int]:
        """Return the table with the own rows of the targets of each relation; tables without sources come last."""
        for relation in relations:
            if self.place_of.setdefault(id(relation.own), len(self.tables)) == len(self.tables):
                self.tables.append(relation.own)
        return [self.place_of[id(relation.own)] for relation in relations]


class _Edges(NamedTuple):
    """Edges of all relations, sorted by relation, then target."""

    indptr: Tensor
    row: Tensor
    target: Tensor


class JoinedEdges(NamedTuple):
    """Edges of all relations, sorted by relation, then target, in the words of `ops.aggregate.sum`.

    Attributes:
        indptr, row, target: Sources begin at the given starts; the targets of all relations are concatenated.
        sizes: Targets of each relation.
        num_sources: Rows that edges may come from.
        max_degree: Upper bound of the edges of a target, None if it is not known.
        batch, key: Batch that remembers results for them, and the key of these.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    sizes: list[int]
    num_sources: int
    max_degree: int | None
    batch: SortedBatch
    key: tuple[Any, ...]

    def transpose(self, tracked: bool) -> Transposed | None:
        """Return the edges by source, if a gradient of the sources needs them: on a GPU only for one in a fixed
        order.
        """
        if not tracked or (runs_on_gpu(self.row) and not torch.are_deterministic_algorithms_enabled()):
            return None
        made: Transposed = self.batch.remember(
            ("by source", *self.key), lambda: Transposed.of(self.row, self.target, self.num_sources)
        )
        return made


def join_edges(relations: Sequence[Relation], starts: Sequence[int], num_sources: int, *, name: str = "joined",
               pairs: Sequence[tuple[Tensor, Tensor]] | None = None, more: int = 0) -> JoinedEdges:  # fmt: skip
    """Join the edges of relations, whose sources begin at `starts` among so many.

    Args:
        relations: Relations of one launch.
        starts: First source of each.
        num_sources: Sources in all.
        name: Name of the joined edges, if they differ from the given ones.
        pairs: (source, target) of the edges of each relation, if they are others.
        more: Number of edges of a target that those may have in addition.
    """
    sizes = [relation.own.shape[0] for relation in relations]
    batch, degrees = relations[0].batch, [relation.batch.max_degree for relation in relations]
    # Batches distinguish their edges from others that came to the same memory, and must not keep each other alive.
    key = (
        name,
        num_sources,
        *(
            (weakref.ref(r.batch), r.edge_index.shape[1], start, size)
            for r, start, size in zip(relations, starts, sizes, strict=True)
        ),
    )
    given: Callable[[], Any] = lambda: (  # noqa: E731
        [relation.edge_index.unbind(0) for relation in relations] if pairs is None else pairs
    )
    edges: _Edges = batch.remember(key, lambda: _join(given(), starts, sizes, num_sources))
    bound = None if None in degrees else max(degree for degree in degrees if degree is not None) + more
    return JoinedEdges(*edges, sizes, num_sources, bound, batch, key)


def _join(pairs: Sequence[Any], starts: Sequence[int], sizes: Sequence[int], num_sources: int) -> _Edges:
    """Join edges whose sources begin at `starts` among so many and whose targets take `sizes`."""
    rows, targets = zip(*pairs, strict=True)
    ends = list(accumulate(sizes, initial=0))
    row = torch.cat(torch._foreach_add(rows, list(starts)))
    target = torch.cat(torch._foreach_add(targets, ends[:-1]))
    joined = _Edges(compress_ids(target, ends[-1]), row, target)
    if not runs_on_gpu(row):
        # No wait for a GPU.
        check_edges(joined.indptr, row, num_sources, ends[-1])
    return joined


def begin_apart(relations: Sequence[Relation]) -> tuple[list[int], int]:
    """Return the first source of each relation if each has rows of its own, and their number."""
    begins = list(accumulate((len(relation.sources) for relation in relations), initial=0))
    return begins[:-1], begins[-1]


# For each relation, True if its result received a gradient in the last backward pass.
Used = list[bool]


def split_apart(out: Tensor, sizes: Sequence[int], used: Used) -> list[Tensor]:
    """Return the results of relations, `[T, ...]` each, from `[sum of T, ...]` in memory of their own; they may be
    written to.

    Args:
        out: Results, one relation after the other.
        sizes: Rows of each.
        used: Is set in a backward pass.
    """
    if out.requires_grad and torch.is_grad_enabled():
        return list(_Split.apply(out, sizes, used))
    return list(torch.unsafe_split_with_sizes(out, list(sizes)))


def join_apart(parts: Sequence[Tensor], serves: Sequence[Sequence[int]], used: Used) -> Tensor:
    """Concatenate rows of several tables, `[sum of N, C]`; a table that serves no used result gets no gradient.

    Args:
        parts: `[N, C]` each.
        serves: The relations that each of them serves.
        used: Is read in a backward pass.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        joined: Tensor = _Join.apply(used, serves, *parts)
        return joined
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def multiply_apart(tables: Sequence[Tensor], weights: Sequence[Tensor], used: Used,
                   biases: Sequence[Tensor | None] | None = None) -> Tensor:  # fmt: skip
    """Compute table @ weight.T + bias of each relation, one after the other, `[sum of N, O]`.

    Args:
        tables: Rows, `[N, C]` of any width each.
        weights: A matrix for each, `[O, C]`, of the same dtype.
        used: Is read in a backward pass.
        biases: `[O]` for each that has one; None if none has.
    """
    out: Tensor = _Products.apply(used, *tables, *weights, *(biases or [None] * len(tables)))
    return out


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, sizes: Sequence[int], used: Used) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes, ctx.used = out.shape[1:], sizes, used
        return tuple(torch.unsafe_split_with_sizes(out, list(sizes)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.used[:] = [grad is not None for grad in grads]
        first = next((grad for grad in grads if grad is not None), None)
        if first is None:
            return None, None, None
        parts = [first.new_zeros(size, *ctx.shape) if grad is None else grad
                 for grad, size in zip(grads, ctx.sizes, strict=True)]  # fmt: skip
        return torch.cat(parts), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, serves: Sequence[Sequence[int]], *parts: Tensor) -> Tensor:
        ctx.used, ctx.serves, ctx.sizes = used, serves, [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(grad.split(ctx.sizes), ctx.needs_input_grad[2:], ctx.serves, strict=True)
        return None, None, *(part if wants and any(ctx.used[i] for i in its) else None for part, wants, its in parts)


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, *given: Any) -> Tensor:
        count = len(given) // 3
        tables, weights, biases = given[:count], given[count : 2 * count], given[2 * count :]
        ctx.save_for_backward(*tables, *weights)
        ctx.used = used
        sizes = [len(table) for table in tables]
        out: Tensor = tables[0].new_empty(sum(sizes), len(weights[0]))
        for part, table, weight, bias in zip(out.split(sizes), tables, weights, biases, strict=True):
            if bias is None:
                torch.mm(table, weight.t(), out=part)
            else:
                torch.addmm(bias, table, weight.t(), out=part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # By functions that torch can differentiate again.
        given, wants = ctx.saved_tensors, ctx.needs_input_grad[1:]
        count = len(given) // 2
        tables, weights = given[:count], given[count:]
        found: list[Tensor | None] = [None] * (3 * count)
        for i, part in enumerate(grad.split([len(table) for table in tables])):
            if ctx.used[i]:
                found[i] = part @ weights[i] if wants[i] else None
                found[count + i] = part.t() @ tables[i] if wants[count + i] else None
                found[2 * count + i] = part.sum(0) if wants[2 * count + i] else None
        return None, *found
