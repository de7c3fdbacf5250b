"""A group of consecutive snapshots as one set of matrices: its form, and the form of its weights.

Groups lie at absolute times: group g of size S is snapshots [g * S, (g + 1) * S) for every frame, so that frames share
their structures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.dynamic.sequence_edges import Factors
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.argument_checks import check_choice
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices
from pyg_direct.ops.snapshots.slice_csr import (
    EdgeUnion,
    SlicedCSR,
    slice_apart,
    slice_exclusives,
    slice_keys,
    slice_union,
    unite,
)

GROUP_SIZES = (1, 2, 4, 8)
FORMS = ("split", "mask")
VALUE_MODES = ("ones", "shared", "stacked", "move")


def check_groups(group_size: int | str, form: str) -> None:
    """Raise unless so many snapshots can be aggregated at once, in this form."""
    if isinstance(group_size, bool) or group_size not in ("auto", *GROUP_SIZES):
        raise ArgumentError(f"group_size must be one of auto, 1, 2, 4, 8, got {group_size}")
    _check_form(form)


def _check_form(form: str) -> None:
    check_choice("form", form, FORMS)


def stack_weights(union: EdgeUnion, weights: Sequence[Tensor | None]) -> Tensor | None:
    """Return weights of a union's edges in each snapshot, `[U, S]`, 0 for absent edges; None if all are ones."""
    known = [weight for weight in weights if weight is not None]
    if all(bool((weight == 1).all()) for weight in known):
        return None
    columns = []
    for t, weight in enumerate(weights):
        has = union.has(t)
        # Both lists of edges ascend, so that weights come in the order of the present edges.
        columns.append(has.to(known[0].dtype) if weight is None
                       else weight.new_zeros(has.numel()).masked_scatter_(has, weight))  # fmt: skip
    return torch.stack(columns, 1)


def find_equal(union: EdgeUnion, stacked: Tensor) -> Tensor:
    """Return a mask of the edges that have equal weights in all snapshots that have them, bool `[U]`."""
    bits = torch.arange(union.num_snapshots, device=stacked.device)
    has = (union.presence.unsqueeze(1) >> bits & 1).bool()
    largest = stacked.masked_fill(~has, -torch.inf).amax(1)
    smallest = stacked.masked_fill(~has, torch.inf).amin(1)
    return largest == smallest


def choose_values(equality: float, weighted: bool) -> str:
    """Choose the mode that sends the fewest bytes. Stacked weights take 4 + 4 S an edge, and moving unequal edges to
    the exclusives takes 8 q + 8 S (1 - q). So stacked weights win if less than half of the edges are equal.
    """
    if not weighted:
        return "ones"
    if equality == 1:
        return "shared"
    return "stacked" if equality < 0.5 else "move"


def build_group(factors: Sequence[Factors], num_nodes: int, form: str = "split", values: str | None = None,
                union: EdgeUnion | None = None) -> SnapshotMatrices:  # fmt: skip
    """Build the matrices of one group.

    Args:
        factors: Factors of each of 1 to 8 snapshots, in order, on one device.
        form: "split" into the overlap and the exclusive edges of each snapshot, or the union under a "mask".
        values: Value mode of shared edges: "ones" (no weights), "shared" (one an edge), "stacked" (one a snapshot),
            "move" (edges of unequal weights are exclusive). None takes the smallest that is exact.
        union: Union of the keys of `factors`, if it exists already.
    """
    _check_form(form)
    if values is not None and values not in VALUE_MODES:
        raise ArgumentError(f"values must be one of {', '.join(VALUE_MODES)}, got {values!r}")
    if union is None:
        union = unite([f.keys for f in factors])
    stacked = stack_weights(union, [f.weight for f in factors])
    equal = None if stacked is None else find_equal(union, stacked)
    shared = union.presence == union.full
    if equal is None:
        equality = 1.0
    else:
        counted = equal if form == "mask" else equal[shared]
        equality = float(counted.float().mean()) if counted.numel() else 1.0
    if values is None:
        values = choose_values(equality, stacked is not None)
        values = "stacked" if form == "mask" and values == "move" else values
    _check_mode(values, form, stacked, equality)
    pieces: tuple[SlicedCSR, ...]
    if form == "mask" or union.num_snapshots == 1:
        weight = stacked
        if stacked is not None and values in ("shared", "move"):
            # Absent edges have weight 0, so the extreme farther from 0 belongs to a present edge.
            weight = torch.where(stacked.amax(1) > 0, stacked.amax(1), stacked.amin(1)).unsqueeze(1)
        pieces = (slice_union(union, num_nodes, weight),)
    else:
        if values == "move" and equal is not None:
            shared = shared & equal
        weight = None if stacked is None else stacked[shared]
        if weight is not None and values in ("shared", "move"):
            weight = weight[:, :1].contiguous()
        overlap = slice_keys(union.keys[shared], num_nodes, weight, None, union.num_snapshots)
        rest = ~shared
        exclusive = slice_exclusives(union.keys[rest], union.presence[rest], num_nodes, union.num_snapshots,
                                     None if stacked is None else stacked[rest])  # fmt: skip
        # An empty structure would be sent all the same.
        pieces = tuple(piece for piece in (overlap, exclusive) if piece.num_edges > 0) or (overlap,)
    row = _stack([f.row for f in factors], 1.0)
    column = row if _is_alike(factors) else _stack([f.column for f in factors], 1.0)
    diagonal = _stack([f.diagonal for f in factors], 0.0)
    return SnapshotMatrices(pieces, row, column, diagonal, num_nodes, union.num_snapshots)


def lay_apart(factors: Sequence[Factors], num_nodes: int) -> SnapshotMatrices:
    """Build the matrices of snapshots as one graph without edges between them: node i of snapshot t is t * N + i.

    Shared edges are not searched for, which would take longer than aggregating them once.

    Args:
        factors: Factors of each snapshot, in order, on one device.
    """
    weights = _fill([f.weight for f in factors], 1.0, [f.keys for f in factors])
    piece = slice_apart([f.keys for f in factors], num_nodes, None if weights is None else torch.cat(weights))

    def join(given: Sequence[Tensor | None], default: float) -> Tensor | None:
        filled = _fill(given, default)
        return None if filled is None else torch.cat(filled).unsqueeze(1)

    row = join([f.row for f in factors], 1.0)
    column = row if _is_alike(factors) else join([f.column for f in factors], 1.0)
    diagonal = join([f.diagonal for f in factors], 0.0)
    return SnapshotMatrices((piece,), row, column, diagonal, len(factors) * num_nodes, 1)


def describe_edges(matrices: SnapshotMatrices) -> str:
    """Describe the form of a group, the weights of its edges (of shared ones, if there are any), and its bytes."""
    piece = matrices.pieces[0]
    form = "split" if piece.presence is None else "mask"
    weights = "weights of one"
    if piece.weight is not None:
        weights = "a weight an edge" if piece.weight.shape[1] == 1 else "a weight an edge and snapshot"
    return f"{form}, {weights}, {matrices.num_bytes:,} bytes"


def _check_mode(values: str, form: str, stacked: Tensor | None, equality: float) -> None:
    if values == "ones" and stacked is not None:
        raise ArgumentError("values must not be 'ones' where edges have weights")
    if values == "shared" and equality < 1:
        raise ArgumentError(f"values must not be 'shared' where only {equality:.1%} of the shared edges weigh the same")
    if values == "move" and form == "mask":
        raise ArgumentError("values must not be 'move' for form='mask', which has no exclusives")


def _is_alike(factors: Sequence[Factors]) -> bool:
    """Report whether rows and columns are scaled by the same numbers."""
    return all(f.column is f.row for f in factors)


def _fill(given: Sequence[Tensor | None], default: float, like: Sequence[Tensor] | None = None) -> list[Tensor] | None:
    """Return the tensors, with `default` in every number of missing ones; None if all are missing.

    Args:
        given: `[N]` each, or None.
        like: Tensors of the same length; None if all are missing.
    """
    known = next((f for f in given if f is not None), None)
    if known is None:
        return None
    lengths = [known] * len(given) if like is None else like
    return [known.new_full(other.shape, default) if f is None else f for f, other in zip(given, lengths, strict=True)]


def _stack(factors: Sequence[Tensor | None], default: float) -> Tensor | None:
    """Stack factors of several snapshots, `[N, S]`; None if there are none."""
    filled = _fill(factors, default)
    return None if filled is None else torch.stack(filled, dim=1)
