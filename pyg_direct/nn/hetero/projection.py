"""Products of a layer with scores of targets, as of GATConv: rows of sources with matrices, scores with vectors.

A score of a target is (x W) . a = x (W a), one number a head. So targets need no product with their matrix. All
relations are one function. A table of rows is read in the dtype of products once, and relations into one type share a
product for their scores. Gradients of a table are added up in one memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.hetero.joined_edges import Picked, Relation, Used, pick
from pyg_direct.nn.linear import (
    multiply_exactly,
    multiply_into,
    multiply_tall,
    multiply_tall_halves,
    multiply_widely,
    split_in_two,
    splits,
    without_autocast,
)
from pyg_direct.ops.run_kernel import is_asked_again, pull_by_torch

# Numbers that a matrix takes a multiple of.
_ALIGNED = 64


def project(relations: Sequence[Relation], weights: Sequence[Tensor], own_weights: Sequence[Tensor],
            vectors: Sequence[Tensor], picked: Sequence[Tensor | None], sizes: Sequence[int], used: Used,
            dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (products of sources `[U, H * C]`, scores of targets `[sum of sizes, H]`), one relation after the other.

    Args:
        weights, own_weights: Matrices of the sources and of the targets of each relation, `[H * C, D]`.
        vectors: `[1, H, C]` of the targets of each; scores have their dtype.
        picked: Rows of the sources of each that are multiplied; None for all.
        sizes: Targets of each that get scores, the first of its own rows.
        used: Is read in the backward pass: a relation that is not used has no part in gradients.
        dtype: Dtype of the products of sources, in which rows are read.
    """
    tables: dict[int, Tensor] = {}
    for relation in relations:
        tables.setdefault(id(relation.sources), relation.sources)
        tables.setdefault(id(relation.own), relation.own)
    places = {key: place for place, key in enumerate(tables)}
    own = [places[id(relation.own)] for relation in relations]
    plan = _Plan([places[id(relation.sources)] for relation in relations], own, list(picked), list(sizes), dtype,
                 len(tables), list(_group(own, sizes)))  # fmt: skip
    made: Tensor
    scores: Tensor
    made, scores = _Project.apply(used, plan, *tables.values(), *weights, *own_weights, *vectors)
    return made, scores


class _Shared(NamedTuple):
    """Relations whose scores are one product: their targets are rows of one table.

    Attributes:
        most: Rows of the table that get a score of one of them.
    """

    table: int
    relations: list[int]
    most: int


def _group(own: Sequence[int], sizes: Sequence[int]) -> Iterator[_Shared]:
    """List relations by the table of their targets."""
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(own):
        groups.setdefault(place, []).append(i)
    for place, numbers in groups.items():
        yield _Shared(place, numbers, max(sizes[i] for i in numbers))


class _Plan(NamedTuple):
    """Tables of sources and of targets of each relation, by number, and which of their rows are read."""

    sources: list[int]
    own: list[int]
    picked: list[Picked]
    sizes: list[int]
    dtype: torch.dtype
    num_tables: int
    groups: list[_Shared]


class _Given(NamedTuple):
    """Tensors of a layer: tables, and of each relation both matrices and the vector of targets."""

    tables: list[Any]
    weights: list[Any]
    own_weights: list[Any]
    vectors: list[Any]

    @classmethod
    def of(cls, plan: _Plan, parts: Sequence[Any]) -> _Given:
        """Split what is given one after the other."""
        bounds = [0, *accumulate([plan.num_tables, *[len(plan.sources)] * 3])]
        return cls(*(list(parts[begin:end]) for begin, end in pairwise(bounds)))


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, plan: _Plan, *given: Tensor) -> tuple[Tensor, Tensor]:
        tables, weights, own_weights, vectors = _Given.of(plan, given)
        # Once for all relations that read a table.
        read = [table.to(plan.dtype) for table in tables]
        picked = [pick(read[place], rows) for place, rows in zip(plan.sources, plan.picked, strict=True)]
        narrow = cast_all(weights, plan.dtype)
        made = torch.empty(sum(map(len, picked)), len(weights[0]), dtype=plan.dtype, device=tables[0].device)
        for part, rows, weight in zip(made.split_with_sizes(list(map(len, picked))), picked, narrow, strict=True):
            torch.mm(rows, weight.t(), out=part)
        folded = _fold_groups(plan, own_weights, vectors)
        scores = _score_targets(plan, read, folded)
        ctx.set_materialize_grads(False)
        ctx.used, ctx.plan = used, plan
        ctx.counts = plan.num_tables, len(weights)
        ctx.save_for_backward(*given, *read, *picked, *narrow, *folded)
        return made, scores

    @staticmethod
    def backward(ctx: Any, to_made: Tensor | None, to_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, saved, wants = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[2:]
        num_tables, count = ctx.counts
        given = saved[: num_tables + 3 * count]
        if is_asked_again([to_made, to_scores]):
            return None, None, *_differentiate(plan, ctx.used, given, (to_made, to_scores), wants)
        read, picked, narrow, folded = _Given.of(plan, saved[len(given) :])
        found = _Given.of(plan, [None] * len(given))
        wanted = _Given.of(plan, wants)
        to_all = None if to_scores is None else [to_scores]
        blocks = [_join_scores(plan, group, to_all, ctx.used) for group in plan.groups]
        parts: list[Any] = [None] * count
        if to_made is not None:
            parts = list(to_made.split_with_sizes(list(map(len, picked))))
        live = [i for i in range(count) if ctx.used[i] and to_made is not None]
        for i in live:
            if wanted.weights[i]:
                found.weights[i] = multiply_tall(parts[i], picked[i]).to(given[num_tables + i].dtype)
        for place in range(num_tables):
            if wanted.tables[place]:
                found.tables[place] = _pull_table(plan, place, given[place], [i for i in live if
                                                  plan.sources[i] == place], parts, narrow, blocks, folded)  # fmt: skip
        halves: list[Tensor | None] = [None] * len(blocks)
        if to_scores is not None and splits(read[0], to_scores.dtype):
            # Split for all groups at once.
            split = split_in_two(to_scores, plan.dtype)
            halves = [_join_scores(plan, group, split, ctx.used) for group in plan.groups]
        _pull_targets(plan, read, blocks, halves, given, wanted, found, ctx.used)
        return None, None, *(part for parts in found for part in parts)


def cast_all(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return matrices in a dtype, by one launch for all on a GPU."""
    if all(weight.dtype == dtype for weight in weights):
        return list(weights)
    # Matrices begin at addresses that products read in large pieces.
    room = [-(-weight.numel() // _ALIGNED) * _ALIGNED for weight in weights]
    flat = torch.empty(sum(room), dtype=dtype, device=weights[0].device)
    narrow = [part[: weight.numel()].view(weight.shape)
              for part, weight in zip(flat.split_with_sizes(room), weights, strict=True)]  # fmt: skip
    torch._foreach_copy_(narrow, list(weights))
    return narrow


def _fold(weights: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Multiply matrices `[H * C, D]` by vectors of each head `[1, H, C]`: `[R * H, D]`."""
    heads, channels = vectors[0].shape[1:]
    with without_autocast(weights[0].device.type):
        rows = torch.stack(list(vectors)).view(-1, 1, channels)
        return torch.bmm(rows, torch.stack(list(weights)).view(len(rows), channels, -1)).view(len(weights) * heads, -1)


def _fold_groups(plan: _Plan, weights: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices that make the scores of each group, `[R * H, D]`."""
    numbers = [group.relations for group in plan.groups]
    if len({weight.shape for weight in weights}) > 1:
        return [_fold([weights[i] for i in its], [vectors[i] for i in its]) for its in numbers]
    order = [i for its in numbers for i in its]
    folded = _fold([weights[i] for i in order], [vectors[i] for i in order])
    return list(folded.split([len(its) * vectors[0].shape[1] for its in numbers]))


def _score_targets(plan: _Plan, read: Sequence[Tensor], folded: Sequence[Tensor]) -> Tensor:
    """Return the scores of the targets of all relations `[sum of sizes, H]`."""
    counts = [len(group.relations) for group in plan.groups]
    heads = len(folded[0]) // counts[0]
    rows = [read[group.table][: group.most] for group in plan.groups]
    if splits(rows[0], folded[0].dtype) and len({matrix.shape[1] for matrix in folded}) == 1:
        # Both parts of all matrices at once.
        parts = [part.view(-1, heads, part.shape[1]) for part in split_in_two(torch.cat(list(folded)), rows[0].dtype)]
        pairs = torch.stack(parts, dim=1).split(counts)
        # In one memory, so that both parts are added up at once.
        sizes = [len(its) * count for its, count in zip(rows, counts, strict=True)]
        made = torch.empty(sum(sizes), 2, heads, dtype=folded[0].dtype, device=rows[0].device)
        for its, count, pair, part in zip(rows, counts, pairs, made.split(sizes), strict=True):
            multiply_widely(its, pair.flatten(0, 2).t(), part.view(len(its), count * 2 * heads))
        both = (made[:, 0] + made[:, 1]).split(sizes)
        blocks = [block.view(len(its), count, heads) for its, count, block in zip(rows, counts, both, strict=True)]
    else:
        blocks = [multiply_exactly(its, matrix.t()).view(len(its), count, heads)
                  for its, matrix, count in zip(rows, folded, counts, strict=True)]  # fmt: skip
    scores: dict[int, Tensor] = {}
    for group, block in zip(plan.groups, blocks, strict=True):
        scores |= {i: block[: plan.sizes[i], k] for k, i in enumerate(group.relations)}
    return torch.cat([scores[i] for i in range(len(plan.own))])


def _unfold(grad: Tensor, weights: Sequence[Tensor], vectors: Sequence[Tensor]
            ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
    """Return the gradients of matrices and of vectors from the gradient of `_fold`, `[R * H, D]`."""
    channels = vectors[0].shape[2]
    with without_autocast(grad.device.type):
        rows = torch.stack(list(vectors)).view(-1, channels, 1)
        matrices = torch.stack(list(weights)).view(len(rows), channels, -1)
        to_weights = (rows * grad.unsqueeze(1)).view(len(weights), -1, grad.shape[1])
        to_vectors = torch.bmm(matrices, grad.unsqueeze(2)).view(len(vectors), *vectors[0].shape)
    return to_weights.unbind(), to_vectors.unbind()


def _pull_targets(plan: _Plan, read: Sequence[Tensor], blocks: Sequence[Tensor | None],
                  halves: Sequence[Tensor | None], given: Sequence[Tensor], wanted: _Given, found: _Given, used: Used
                  ) -> None:  # fmt: skip
    """Set the gradients of the matrices and vectors of targets.

    Args:
        blocks: Gradients of the scores of each group.
        halves: The two parts of each, side by side, if these have been split.
    """
    _, _, weights, vectors = _Given.of(plan, given)
    order, pulled = [], []
    for group, block, both in zip(plan.groups, blocks, halves, strict=True):
        if block is not None and any(wanted.own_weights[i] or wanted.vectors[i] for i in group.relations if used[i]):
            rows = read[group.table][: group.most]
            made = multiply_tall(rows, block) if both is None else multiply_tall_halves(rows, both)
            order.append(group.relations)
            pulled.append(made.to(block.dtype).t())
    if len({part.shape[1] for part in pulled}) == 1:
        order, pulled = [[i for its in order for i in its]], [torch.cat(pulled)]
    for its, grad in zip(order, pulled, strict=True):
        parts = zip(its, *_unfold(grad, [weights[i] for i in its], [vectors[i] for i in its]), strict=True)
        for i, to_weight, to_vector in parts:
            if used[i]:
                found.own_weights[i] = to_weight if wanted.own_weights[i] else None
                found.vectors[i] = to_vector if wanted.vectors[i] else None


def _join_scores(plan: _Plan, group: _Shared, grads: Sequence[Tensor] | None, used: Used) -> Tensor | None:
    """Return gradients of the scores of a group side by side, `[most, R * H]` of each given one, zero where there are
    none; None without any.
    """
    if grads is None or not any(used[i] for i in group.relations):
        return None
    heads = grads[0].shape[1]
    parts = [grad.split_with_sizes(plan.sizes) for grad in grads]
    is_full = all(used[i] and plan.sizes[i] == group.most for i in group.relations)
    if is_full:
        return torch.cat([own[i] for own in parts for i in group.relations], dim=1)
    block = grads[0].new_zeros(group.most, len(grads) * len(group.relations) * heads)
    columns = iter(block.split_with_sizes([heads] * (block.shape[1] // heads), dim=1))
    for own in parts:
        for i, column in zip(group.relations, columns, strict=False):
            if used[i]:
                column.narrow(0, 0, plan.sizes[i]).copy_(own[i])
    return block


def _pull_table(plan: _Plan, place: int, table: Tensor, relations: Sequence[int], parts: Sequence[Tensor | None],
                weights: Sequence[Tensor], blocks: Sequence[Tensor | None], folded: Sequence[Tensor]
                ) -> Tensor | None:  # fmt: skip
    """Return the gradient of a table's rows, added up in fp32 or wider; None if nothing that is used reads it.

    Args:
        relations: Relations that are used and whose sources it has.
        parts: Gradients of products of each relation.
        weights: Matrices of each in the dtype of products.
        blocks, folded: Gradients of the scores of each group, and its vectors.
    """
    scores = [(block, matrix) for group, block, matrix in zip(plan.groups, blocks, folded, strict=True)
              if group.table == place and block is not None]  # fmt: skip
    if not relations and not scores:
        return None
    dtype = torch.promote_types(table.dtype, torch.float32)
    whole = [i for i in relations if plan.picked[i] is None]
    # The first product is written, so that no zeros are.
    total = torch.empty(table.shape, dtype=dtype, device=table.device)
    for number, i in enumerate(whole):
        part = parts[i]
        assert part is not None, "used"
        multiply_into(total, part, weights[i], adds=number > 0)
    if not whole:
        total.zero_()
    for i in relations:
        rows, part = plan.picked[i], parts[i]
        if rows is not None:
            assert isinstance(rows, Tensor)
            assert part is not None, "used"
            made = torch.empty(len(rows), table.shape[1], dtype=dtype, device=table.device)
            multiply_into(made, part, weights[i], adds=False)
            total.index_add_(0, rows, made)
    for block, matrix in scores:
        multiply_into(total.narrow(0, 0, len(block)), block, matrix.to(block.dtype), adds=True)
    return total.to(table.dtype)


def _differentiate(plan: _Plan, used: Used, given: Sequence[Tensor], grads: tuple[Tensor | None, Tensor | None],
                   wants: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the gradients by functions that torch can differentiate again, for callers that ask for their graph."""
    tables = _Given.of(plan, given).tables
    counts = [len(tables[place]) if rows is None else len(rows)  # type: ignore[arg-type]
              for place, rows in zip(plan.sources, plan.picked, strict=True)]  # fmt: skip
    pulled = [None if grad is None else grad.split_with_sizes(list(sizes))
              for grad, sizes in zip(grads, (counts, plan.sizes), strict=True)]  # fmt: skip
    live = [i for i in range(len(plan.sources)) if used[i]]
    with without_autocast(tables[0].device.type):
        return pull_by_torch(partial(_compose, plan, live), given, wants,
                             [None if parts is None else parts[i] for parts in pulled for i in live])  # fmt: skip


def _compose(plan: _Plan, relations: Sequence[int], *given: Tensor) -> list[Tensor]:
    """Return the products of sources of relations, then the scores of their targets."""
    tables, weights, own_weights, vectors = _Given.of(plan, given)
    made = [pick(tables[plan.sources[i]].to(plan.dtype), plan.picked[i]) @ weights[i].t().to(plan.dtype)
            for i in relations]  # fmt: skip
    rows = [tables[plan.own[i]][: plan.sizes[i]].to(plan.dtype).to(vectors[i].dtype) for i in relations]
    folded = [_fold([own_weights[i]], [vectors[i]]).t() for i in relations]
    return [*made, *(part @ matrix for part, matrix in zip(rows, folded, strict=True))]
