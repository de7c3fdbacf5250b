"""GINEConv over several relations: the messages of all of them made and summed at once, then the network of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.nn.apart import join_apart, split_apart
from pyg_direct.nn.gine import sum_messages
from pyg_direct.nn.joined_edges import Relation, Tables, join_edges
from pyg_direct.nn.propagate import find_reduce, wins_on_cpu
from pyg_direct.nn.trimmed import is_linear
from pyg_direct.ops.aggregate import DTYPES
from pyg_direct.ops.launch import runs_on_gpu

# Bytes of the messages of all relations, above which a CPU makes those of each by itself; see `joined_gin`.
_MOST_BYTES = 32 << 20


def read(module: Any, x: Tensor, own: Tensor, edge_rows: Tensor) -> Hashable:
    """What relations must have in common to be summed with this one; None where it is summed by itself.

    Args:
        module: A GINEConv.
        x, own: Rows of its sources and of its targets, `[N, C]` and `[T, C]`.
        edge_rows: What belongs to its edges, `[E, D]`.
    """
    if (
        x.dtype not in DTYPES
        # Items of other dtypes, or of other widths, meet by torch's rules.
        or not x.dtype == own.dtype == edge_rows.dtype == module.eps.dtype
        or not x.device == edge_rows.device == module.eps.device
        or x.shape[1] != own.shape[1]
        or edge_rows.dim() != 2
        or not _fits(module.lin, x, edge_rows)
        or torch.is_autocast_enabled(x.device.type)
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return find_reduce(module), x.shape[1], x.dtype


def _fits(matrix: Any, x: Tensor, edge_rows: Tensor) -> bool:
    """Whether a matrix, or none, gives edges rows as wide as those of their sources."""
    if matrix is None:
        return edge_rows.shape[1] == x.shape[1]
    return (
        is_linear(matrix)
        and tuple(matrix.weight.shape) == (x.shape[1], edge_rows.shape[1])
        and matrix.weight.dtype == x.dtype
    )


def convolve(relations: Sequence[Relation]) -> list[Tensor] | None:
    """What each convolution gives its network: aggregate(relu(sources + edges)) + (1 + eps) * own, `[T, C]`; None where
    each is faster by itself.
    """
    first = relations[0].sources
    num_edges = sum(relation.edge_index.shape[1] for relation in relations)
    if not runs_on_gpu(first) and num_edges * first.shape[1] * first.element_size() > _MOST_BYTES:
        return None
    tables, used = Tables.of(relations), [True] * len(relations)
    edges = join_edges(relations, tables.starts, tables.num_rows)
    rows = join_apart(tables.tables, tables.serve(), used)
    along = join_apart([relation.edge_rows if relation.conv.lin is None else relation.conv.lin(relation.edge_rows)
                        for relation in relations], [[i] for i in range(len(relations))], used)  # fmt: skip
    out = sum_messages(rows, along, edges.indptr, edges.row, edges.target, sum(edges.sizes),
                       reduce=find_reduce(relations[0].conv), max_degree=edges.max_degree)  # fmt: skip
    pieces = split_apart(out, edges.sizes, used)
    return [piece + (1 + relation.conv.eps) * relation.own for piece, relation in zip(pieces, relations, strict=True)]
