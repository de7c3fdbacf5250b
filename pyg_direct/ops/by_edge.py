"""Aggregation of snapshots edge by edge, by torch's functions: for rows that are a batch, which loops of our own cannot
read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.ops.sliced import SlicedCSR

Factors = tuple[Tensor | None, Tensor | None, Tensor | None]


def aggregate_by_edge(x: Tensor, pieces: tuple[SlicedCSR, ...], factors: Factors, low: int, transposed: bool) -> Tensor:
    """d * x + a * (W (b * x)), or with `transposed` d * x + b * (W^T (a * x)).

    Args:
        x: Rows of each node in each snapshot, fp32 or float64 `[N, S', F]`.
        pieces: Structures whose sum is W, edges by target.
        factors: a, b and d of these snapshots, `[N, S']`.
        low: The group's first snapshot that `x` holds.
        transposed: Whether edges are gone over backwards.

    Returns:
        `[N, S', F]`.
    """
    row, column, diagonal = (None if factor is None else factor.unsqueeze(2) for factor in factors)
    before, behind = (row, column) if transposed else (column, row)
    z = x if before is None else x * before
    total = torch.zeros_like(z)
    for piece in pieces:
        total = total + _sum_piece(z, piece, low, transposed)
    total = total if behind is None else total * behind
    return total if diagonal is None else total + x * diagonal


def _sum_piece(z: Tensor, piece: SlicedCSR, low: int, transposed: bool) -> Tensor:
    ends = piece.cols.long(), piece.expand_rows()
    weight = torch.ones(1, 1, device=ends[0].device) if piece.weight is None else piece.weight
    weight = weight.to(z.dtype).expand(piece.num_edges, piece.num_snapshots)
    numbers = torch.arange(piece.num_snapshots, device=weight.device)
    if piece.presence is not None:
        weight = weight * ((piece.presence.long().unsqueeze(1) >> numbers) & 1)
    owner = piece.list_owners()
    if owner is not None:
        weight = weight * (owner.unsqueeze(1) == numbers)
    sources, targets = ends[::-1] if transposed else ends
    shares = weight[:, low : low + z.shape[1]].unsqueeze(2)
    return torch.zeros_like(z).index_add(0, targets, z.index_select(0, sources) * shares)
