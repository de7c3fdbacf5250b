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
# 1.11, 2.02 and 7.46. With weights the first take 1.13, 1.57 and 2.58 with 4, 8 and 16 instead of 0.95, 1.57 and 2.75,
# and 45 million of one each over CSR 3.72, 5.43 and 9.02 with 16, 32 and 64 instead of 2.72, 4.57 and 8.27. Under a
# mask on an H200, 43 million with 2.3 million nodes take 1.06, 1.12 and 1.40 with 2, 4 and 8 instead of 0.94, 1.37 and
# 2.12; 17 million with weights 0.66 and 0.82 with 4 and 8 instead of 0.65 and 1.03.
WIDE_ROW, WIDE_ROW_MASKED, WIDE_ROW_ALONE = (16, 32), (16, 16), (16, 128)
# Edges of a target in the mean below which half as many numbers of the first two are enough: with 2.9 edges on an H200,
# rows of 8 take 0.38 ms instead of 0.50, and 0.36 instead of 0.48 under a mask.
_SHORT_ROW = 6
# Numbers that all edges bring, and those under a mask, below which slices are faster: a sum over CSR takes 15 to 25 us
# more of the host's time, and 100 where a structure was sent for it. On an H100, 8, 15 and 30 million numbers take 106,
# 131 and 212 us over CSR, and 78, 128 and 241 as slices; under a mask on an H200 21, 35, 42 and 83 million 46, 49, 48
# and 75 instead of 35, 49, 52 and 100.
MANY_NUMBERS, MANY_MASKED = 2**24, 2**25
# Numbers of all sums under a mask below which they keep too few threads of a GPU busy over CSR: those of 5,000 nodes,
# 512 each, take 86 us instead of 40, and 64 each of 50,000 56 instead of 63.
MANY_SUMS = 3_000_000
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
    if piece.weight is not None and piece.weight.dtype != torch.float32:
        return False
    if piece.presence is not None and not leaves_bits(piece.num_rows, piece.num_snapshots):
        return False
    weighted = piece.weight is not None
    if piece.snapshot is not None:
        num_sums = piece.num_rows * piece.num_snapshots
        is_wide = is_summed_over_csr("one", piece.num_edges, num_sums, channels, weighted)
        return size == piece.num_snapshots and (is_wide or deterministic)
    whose = "all" if piece.presence is None else "mask"
    is_wide = is_summed_over_csr(whose, piece.num_edges, piece.num_rows, size * channels, weighted)
    if not is_wide and not deterministic:
        return False
    return piece.weight is None or piece.weight.shape[1] == 1 or channels % 4 == 0


def leaves_bits(num_rows: int, num_snapshots: int) -> bool:
    """Whether ids of 32 bits have one left for each snapshot, which tells over CSR whether it has an edge."""
    return num_rows <= 1 << 32 - num_snapshots


def is_summed_over_csr(whose: str, num_edges: int, num_sums: int, numbers: int, weighted: bool) -> bool:
    """Whether so many edges are, which bring so many numbers each to one of the sums.

    Args:
        whose: Edges that "all" snapshots have, that have a "mask", or that belong to "one".
        num_edges: Edges.
        num_sums: Rows of sums.
        numbers: Numbers of a row.
        weighted: Whether edges have weights.
    """
    wide_rows = {"all": WIDE_ROW, "mask": WIDE_ROW_MASKED, "one": WIDE_ROW_ALONE}
    least = wide_rows[whose][weighted]
    if whose != "one" and num_edges < _SHORT_ROW * num_sums:
        least //= 2
    if whose == "mask" and num_sums * numbers < MANY_SUMS:
        return False
    return numbers >= least and num_edges * numbers >= (MANY_MASKED if whose == "mask" else MANY_NUMBERS)
