"""Which kernel sums the edges of a structure of snapshots on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.ops.sliced import SlicedCSR

# Numbers of a row from which sums over CSR are faster than those of slices, where all snapshots have all edges, where
# edges are under a mask, and where they belong to one; and where edges have weights. With GCN's factors on an H100, of
# 4 snapshots with 880,000 nodes, 9.5 million edges that all have and as slices 14 million of one each take 0.75 ms with
# 4 numbers a snapshot, and 0.81 if all are slices; over CSR these take 1.11, 1.84 and 6.39 with 8, 16 and 64 instead of
# 1.11, 2.02 and 7.46; 17 million under a mask 0.85, 1.06 and 1.76 with 4, 8 and 16 instead of 0.65, 1.11 and 2.06. With
# weights the first take 1.13, 1.57 and 2.58 with 4, 8 and 16 instead of 0.95, 1.57 and 2.75, and 45 million of one each
# over CSR 3.72, 5.43 and 9.02 with 16, 32 and 64 instead of 2.72, 4.57 and 8.27.
WIDE_ROW, WIDE_ROW_MASKED, WIDE_ROW_ALONE = (16, 32), (32, 64), (16, 128)
# Edges of a target in the mean below which half as many numbers of the first two are enough: with 2.9 edges on an H200,
# rows of 8 take 0.38 ms instead of 0.50; under a mask on an H100, of 16 0.57 ms instead of 0.78.
_SHORT_ROW = 6
# Numbers that all edges bring, and those under a mask, below which slices are faster: a sum over CSR takes 25 us more
# of the host's time, and 100 where a structure was sent for it. On an H100, 8, 15 and 30 million numbers take 106, 131
# and 212 us over CSR, and 78, 128 and 241 as slices; under a mask 54, 65 and 108 million 111, 199 and 176 instead of
# 101, 227 and 190.
MANY_NUMBERS, MANY_MASKED = 2**24, 60_000_000
# Numbers a thread group that works on narrow rows stages for; wider rows are read in pieces.
NARROW = min(32, THREADS)
# Counters of 32 bits run a few rows ahead.
_MOST = 2**31 - 8
_PIECE = 16


def choose_kernel(z: Tensor, piece: SlicedCSR, deterministic: bool) -> str:
    """Which kernel sums a structure's edges on a GPU: "rows" of CSR, or its slices "wide", "narrow" or "plain"."""
    size, channels = z.shape[1:]
    width = channels if piece.snapshot is not None else size * channels
    # The pieces of a slice of one snapshot begin where that snapshot's numbers do.
    aligned = (size * channels) % 4 == 0 and width % 4 == 0 and z.data_ptr() % _PIECE == 0
    if z.dtype == torch.float32 and aligned and not SIMULATED:
        return "rows" if _has_rows(piece, size, channels, deterministic) else "wide"
    return "narrow" if 1 < width <= NARROW and not deterministic else "plain"


def _has_rows(piece: SlicedCSR, size: int, channels: int, deterministic: bool) -> bool:
    """Whether rows are wide enough and many, and edges bring all numbers, or all of one snapshot, with one weight for
    four.

    Where equal calls must give equal results, slices take several times as long, of any width.
    """
    if max(piece.num_rows * piece.num_snapshots, piece.num_edges) >= _MOST:
        return False
    weighted = piece.weight is not None
    if piece.snapshot is not None:
        is_wide = is_summed_over_csr(piece.num_edges, channels, WIDE_ROW_ALONE[weighted])
        return size == piece.num_snapshots and (is_wide or deterministic)
    least = (WIDE_ROW if piece.presence is None else WIDE_ROW_MASKED)[weighted]
    if piece.num_edges < _SHORT_ROW * piece.num_rows:
        least //= 2
    is_wide = is_summed_over_csr(piece.num_edges, size * channels, least, piece.presence is not None)
    if not is_wide and not deterministic:
        return False
    return piece.weight is None or piece.weight.shape[1] == 1 or channels % 4 == 0


def is_summed_over_csr(num_edges: int, numbers: int, least: int, is_masked: bool = False) -> bool:
    """Whether so many edges that bring so many numbers each are, where rows are wide that have `least`."""
    return numbers >= least and num_edges * numbers >= (MANY_MASKED if is_masked else MANY_NUMBERS)
