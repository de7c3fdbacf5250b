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
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.linear import add_up, multiply_exactly, multiply_tall
from pyg_direct.nn.sorted_edges import SortedBatch, may_wait
from pyg_direct.ops.aggregate.sum_rows import Transposed, check_edges
from pyg_direct.ops.local_ids.build_csr import compress_ids
from pyg_direct.ops.run_kernel import is_heard, runs_on_gpu


class Relation(NamedTuple):
    """Convolution of a layer, and its inputs.

    Attributes:
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
    """Edges of all relations, sorted by relation, then target, in the words of `ops.aggregate.sum_rows`.

    Attributes:
        indptr, row, target: Sources begin at the given starts; the targets of all relations are concatenated.
        max_degree: Upper bound of the edges of a target, None if it is not known.
        batch, key: Batch that remembers results for them, and the key of these.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    sizes: list[int]
    counts: list[int]
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
               pairs: Sequence[tuple[Tensor, Tensor]] | None = None, more: int = 0,
               sizes: Sequence[int] | None = None) -> JoinedEdges:  # fmt: skip
    """Join the edges of relations, whose sources begin at `starts` among so many.

    Args:
        starts: First source of each.
        name: Name of the joined edges, if they differ from the given ones.
        pairs: (source, target) of the edges of each relation, if they are others.
        more: Number of edges of a target that those may have in addition.
        sizes: Targets of each relation, if they are not all own rows.
    """
    sizes = [relation.own.shape[0] for relation in relations] if sizes is None else list(sizes)
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
    return JoinedEdges(*edges, sizes, [len(row) for row, _ in given()], num_sources, bound, batch, key)


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


class ReadSources(NamedTuple):
    """Sources that edges read, and the edges from them, relation after relation.

    Attributes:
        rows: Rows of each relation's sources that have an edge, each once, ascending, `[sum of these]`; None if every
            relation has all rows.
        sizes: Number of sources of each relation. In a captured graph it is an upper bound, and the remaining rows are
            0.
        has_all: For each relation, True if its sources are all rows, which `rows` then leaves out.
    """

    rows: Tensor | None
    sizes: list[int]
    edges: JoinedEdges
    has_all: Sequence[bool] = ()

    def split(self) -> list[Tensor | None]:
        """Return the rows of each relation; None for all rows."""
        if self.rows is None:
            return [None] * len(self.sizes)
        has_all = self.has_all or [False] * len(self.sizes)
        sizes = [size for size, is_whole in zip(self.sizes, has_all, strict=True) if not is_whole]
        parts = iter(self.rows.split(sizes))
        return [None if is_whole else next(parts) for is_whole in has_all]


# Sources over an upper bound of those with edges, from which on only these are multiplied: on a GPU the host waits for
# their number.
_SPARSE = 2
# Share of a relation's sources with edges, from which on all are multiplied: to copy rows, and to add their gradients
# in other places, takes a GPU longer than products with the others.
_MOSTLY = 0.6


def read_sources(relations: Sequence[Relation], sizes: Sequence[int]) -> ReadSources:
    """Find the sources that the edges of each relation read, once for the layers that share the edges.

    Most nodes of a batch are read by the relation that found them alone, so that others need no product with them.
    """
    begins, num_sources = begin_apart(relations)
    edges = join_edges(relations, begins, num_sources, sizes=sizes)
    counts = [len(relation.sources) for relation in relations]
    most = [min(r.edge_index.shape[1], count) for r, count in zip(relations, counts, strict=True)]
    if num_sources < _SPARSE * sum(most) or is_heard(edges.row):
        return ReadSources(None, counts, edges)
    key = "read", *edges.key
    made: ReadSources = edges.batch.remember(key, lambda: _find_read(edges, key, begins, most))
    return made


def _find_read(edges: JoinedEdges, key: tuple[Any, ...], begins: list[int], most: list[int]) -> ReadSources:
    row, num_sources = edges.row, edges.num_sources
    is_read = torch.zeros(num_sources, dtype=torch.bool, device=row.device).index_fill_(0, row, True)
    # Sources with an edge before each source.
    before = row.new_zeros(num_sources + 1)
    torch.cumsum(is_read, 0, dtype=row.dtype, out=before[1:])
    sizes = [end - begin for begin, end in pairwise([*begins, num_sources])]
    if may_wait(row):
        bounds = torch.tensor([*begins, num_sources], device=row.device)
        counts = before.index_select(0, bounds).diff().tolist()
    else:
        # The host cannot know their number: each relation begins where it would with the most sources.
        counts = most
    has_all = [count >= _MOSTLY * size for count, size in zip(counts, sizes, strict=True)]
    counts = [size if is_whole else count for count, size, is_whole in zip(counts, sizes, has_all, strict=True)]
    starts, parts = list(accumulate(counts, initial=0)), row.split(edges.counts)
    picked = [i for i, is_whole in enumerate(has_all) if not is_whole]
    rows, places, shifts = row.new_zeros(sum(counts[i] for i in picked)), list(parts), []
    if picked:
        # Of all these relations at once: launches of a GPU take longer than their work.
        firsts = list(accumulate((counts[i] for i in picked), initial=0))
        chosen, sizes = [parts[i] for i in picked], [edges.counts[i] for i in picked]
        bases = torch._foreach_sub([before[begins[i]] for i in picked], firsts[:-1])
        rank = before.index_select(0, torch.cat(chosen))
        rank -= torch.cat([base.expand(size) for base, size in zip(bases, sizes, strict=True)])
        rows.scatter_(0, rank, torch.cat(torch._foreach_sub(chosen, [begins[i] for i in picked])))
        for i, part in zip(picked, rank.split(sizes), strict=True):
            places[i] = part
    first = 0
    for i, is_whole in enumerate(has_all):
        shifts.append(starts[i] - (begins[i] if is_whole else first))
        first += 0 if is_whole else counts[i]
    places = list(torch._foreach_add(places, shifts))
    edges = edges._replace(row=torch.cat(places), num_sources=starts[-1], key=key)
    return ReadSources(rows, counts, edges, has_all)


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
    """
    if out.requires_grad and torch.is_grad_enabled():
        return list(_Split.apply(out, sizes, used))
    return list(torch.unsafe_split_with_sizes(out, list(sizes)))


def join_apart(parts: Sequence[Tensor], serves: Sequence[Sequence[int]], used: Used) -> Tensor:
    """Concatenate rows of several tables, `[sum of N, C]`; a table that serves no used result gets no gradient.

    Args:
        parts: `[N, C]` each.
        serves: The relations that each of them serves.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        joined: Tensor = _Join.apply(used, serves, *parts)
        return joined
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


# Rows of a table that are multiplied: these, no row twice unless its gradient is zero; a range; None for all.
Picked = Tensor | slice | None


def multiply_apart(tables: Sequence[Tensor], weights: Sequence[Tensor], used: Used,
                   biases: Sequence[Tensor | None] | None = None, *, rows: Sequence[Picked] | None = None,
                   dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """Compute table @ weight.T + bias of each relation, one after the other, `[sum of N, O]`.

    Args:
        tables: Rows, `[N, C]` of any width each.
        weights: A matrix for each, `[O, C]`.
        biases: `[O]` for each that has one; None if none has.
        rows: Rows of each table that are multiplied.
        dtype: Dtype in which rows are read, and weights too unless `out_dtype` is wider; None for the weights' own.
        out_dtype: Dtype of the products; None for `dtype`.
    """
    dtype = weights[0].dtype if dtype is None else dtype
    once = {id(table): table for table in tables}
    places = {key: place for place, key in enumerate(once)}
    plan = _Plan([places[id(table)] for table in tables], [None] * len(tables) if rows is None else list(rows), dtype,
                 dtype if out_dtype is None else out_dtype, len(once))  # fmt: skip
    made: Tensor = _Products.apply(used, plan, *once.values(), *weights, *(biases or [None] * len(tables)))
    return made


class _Plan(NamedTuple):
    """Which rows of which table each product reads, and in which dtypes."""

    places: list[int]
    rows: list[Picked]
    dtype: torch.dtype
    out_dtype: torch.dtype
    num_tables: int


def pick(table: Tensor, rows: Picked) -> Tensor:
    """Return rows of a table; see `Picked`."""
    return table.index_select(0, rows) if isinstance(rows, Tensor) else table if rows is None else table[rows]


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
        parts = zip(grad.split_with_sizes(ctx.sizes), ctx.needs_input_grad[2:], ctx.serves, strict=True)
        return None, None, *(part if wants and any(ctx.used[i] for i in its) else None for part, wants, its in parts)


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, plan: _Plan, *given: Any) -> Tensor:
        count, num_tables, dtype = len(plan.places), plan.num_tables, plan.dtype
        tables, weights, biases = given[:num_tables], given[num_tables : num_tables + count], given[-count:]
        # Once for all relations that read a table.
        read = [table.to(dtype) for table in tables]
        picked = [pick(read[place], rows) for place, rows in zip(plan.places, plan.rows, strict=True)]
        ctx.used, ctx.plan, ctx.sizes = used, plan, [len(part) for part in picked]
        ctx.save_for_backward(*tables, *weights, *picked)
        out = torch.empty(sum(ctx.sizes), len(weights[0]), dtype=plan.out_dtype, device=tables[0].device)
        for part, rows, weight, bias in zip(out.split_with_sizes(ctx.sizes), picked, weights, biases, strict=True):
            if plan.out_dtype != dtype:
                part.copy_(multiply_exactly(rows, weight.t()))
            elif bias is None:
                torch.mm(rows, weight.t().to(dtype), out=part)
            else:
                torch.addmm(bias.to(dtype), rows, weight.t().to(dtype), out=part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # By functions that torch can differentiate again.
        plan, again, saved = ctx.plan, torch.is_grad_enabled(), ctx.saved_tensors
        count, num_tables = len(plan.places), plan.num_tables
        tables, weights, picked = saved[:num_tables], saved[num_tables:-count], saved[-count:]
        wants = ctx.needs_input_grad[2:]
        found: list[Tensor | None] = [None] * len(wants)
        for i, (part, place) in enumerate(zip(grad.split_with_sizes(ctx.sizes), plan.places, strict=True)):
            if not ctx.used[i]:
                continue
            weight, rows = weights[i], picked[i]
            if again:
                rows = pick(tables[place].to(plan.dtype), plan.rows[i])
            if wants[place]:
                found[place] = _add_rows(found[place], tables[place], plan.rows[i], part @ weight.to(part.dtype), again)
            if wants[num_tables + i]:
                found[num_tables + i] = multiply_tall(rows, part).t().to(weight.dtype)
            if wants[num_tables + count + i]:
                found[num_tables + count + i] = part.sum(0, dtype=weight.dtype)
        return None, None, *found


def _add_rows(total: Tensor | None, table: Tensor, rows: Picked, grad: Tensor, again: bool) -> Tensor:
    """Add gradients of rows of a table to the gradient of the table, in place unless torch differentiates again."""
    grad = grad.to(table.dtype)
    if rows is None:
        return grad if total is None else total + grad if again else total.add_(grad)
    if again and isinstance(rows, slice):
        rows = torch.arange(len(table), device=table.device)[rows]
    total = table.new_zeros(table.shape) if total is None else total
    if isinstance(rows, slice):
        # Augmented assignment would also copy the sum to itself.
        total[rows].add_(grad)
        return total
    return total.index_add(0, rows, grad) if again else total.index_add_(0, rows, grad)


class Groups(NamedTuple):
    """Relations whose results are added up.

    Attributes:
        sizes: Targets with a result of each relation, the first of its group.
        dtype: Dtype of the sums.
    """

    relations: Sequence[Sequence[int]]
    counts: Sequence[int]
    sizes: Sequence[int]
    dtype: torch.dtype

    def add_up(self, out: Tensor, biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the sums of each group, `[count, F]`, from all results `[sum of sizes, F]`, and biases `[F]`."""
        parts, totals = out.split_with_sizes(list(self.sizes)), []
        for group, count, bias in zip(self.relations, self.counts, biases, strict=True):
            total = torch.zeros(count, out.shape[1], dtype=self.dtype, device=out.device)
            if bias is not None:
                total.copy_(bias)
            for i in group:
                total.narrow(0, 0, self.sizes[i]).add_(parts[i])
            totals.append(total)
        return tuple(totals)

    def note(self, grads: Sequence[Tensor | None], used: Used) -> None:
        """Set the relations of the sums that received a gradient."""
        for group, grad in zip(self.relations, grads, strict=True):
            for i in group:
                used[i] = grad is not None


def sum_apart(out: Tensor, groups: Groups, used: Used, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Add results of relations up by group, `[count, F]` each.

    Args:
        out: Results `[sum of sizes, F]`, one relation after the other.
        biases: `[F]` for each group that has one.
    """
    return list(_SumApart.apply(out, groups, used, *biases))


class _SumApart(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, groups: Groups, used: Used, *biases: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.used, ctx.like = groups, used, out.new_empty(0, out.shape[1])
        return groups.add_up(out, biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        groups, parts = ctx.groups, [ctx.like] * len(ctx.groups.sizes)
        groups.note(grads, ctx.used)
        for group, grad in zip(groups.relations, grads, strict=True):
            for i in group:
                size = groups.sizes[i]
                parts[i] = ctx.like.new_zeros(size, ctx.like.shape[1]) if grad is None else grad[:size]
        biases = [add_up(grad) if grad is not None and wanted else None
                  for grad, wanted in zip(grads, ctx.needs_input_grad[3:], strict=True)]  # fmt: skip
        if not (ctx.needs_input_grad[0] and any(ctx.used)):
            return None, None, None, *biases
        return torch.cat([part.to(ctx.like.dtype) for part in parts]), None, None, *biases
