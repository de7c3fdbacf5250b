"""What the kernels of snapshots read, counted from structures as the kernels walk through them (PiPAD, Fig. 11).

No GPU is asked: a request is one instruction by which a warp reads rows, a sector 32 bytes of memory that the rows of
one edge lie in, and threads at work are those of a warp that a request brings numbers. Caches are left aside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.ops.snapshots.sliced_csr import SlicedCSR

_WARP, _SECTOR = 32, 8
# Slices that the narrow kernel works on at once, and numbers that a thread of the wide one reads.
_COALESCED, _PIECE = 16, 4


class Reads(NamedTuple):
    """Reads of rows in one pass.

    Attributes:
        requests: Instructions of warps.
        sectors: 32-byte sectors.
        numbers: fp32 numbers that are needed.
        places: Numbers that so many requests could bring, if every thread of each took part.
    """

    requests: int
    sectors: int
    numbers: int
    places: int

    def __add__(self, other: object) -> Reads:
        assert isinstance(other, Reads)
        return Reads(*(a + b for a, b in zip(self, other, strict=True)))


def count_reads(piece: SlicedCSR, size: int, channels: int, kernel: str, whole: bool = False) -> Reads:
    """Reads of rows `[N, size, channels]` by a structure.

    Args:
        piece: Of snapshots 0 to `size`.
        size, channels: S, F.
        kernel: "plain", "narrow", "wide" or "rows", as `ops.snapshots.aggregate.choose_kernel` tells.
        whole: Whether one group of threads sees to all slices of a row, as with CSR.
    """
    counts = piece.offsets.diff().long()
    is_wide = kernel in ("wide", "rows")
    if whole or kernel == "rows":
        counts = _join_runs(piece, counts)
    width = channels if piece.snapshot is not None else size * channels
    per_thread = _PIECE if is_wide else 1
    if kernel == "narrow":
        slices, tiles = min(_COALESCED, _WARP // width), 1
    else:
        lanes = min(_WARP, 1 << max(0, width // per_thread - 1).bit_length())
        slices, tiles = _WARP // lanes, -(-(width // per_thread) // lanes)
    # Groups of threads of a wide row stand side by side in a warp, those of a plain one follow each other.
    groups = counts.repeat_interleave(tiles) if is_wide else counts
    warps = torch.nn.functional.pad(groups, (0, -groups.numel() % slices)).view(-1, slices)
    requests = int(warps.amax(1).sum()) * (1 if is_wide else tiles) if warps.numel() else 0
    patterns = _find_patterns(piece, size)
    numbers = int((patterns.unsqueeze(1) >> torch.arange(size, device=patterns.device) & 1).sum()) * channels
    sectors = _count_sectors(piece.cols.long(), patterns, size, channels)
    return Reads(requests, sectors, numbers, requests * _WARP * per_thread)


def _join_runs(piece: SlicedCSR, counts: Tensor) -> Tensor:
    """Edges of the slices of one row, or of one row in one snapshot, at the first of them; 0 at the others."""
    key = piece.rows.long() & (2**31 - 1)
    if piece.snapshot is not None:
        key = key * piece.num_snapshots + piece.snapshot
    begins = torch.ones_like(key, dtype=torch.bool)
    begins[1:] = key[1:] != key[:-1]
    run = begins.cumsum(0) - 1
    total = torch.zeros_like(counts).index_add_(0, run, counts)
    return torch.where(begins, total[run], 0)


def _find_patterns(piece: SlicedCSR, size: int) -> Tensor:
    """Bits of the snapshots that each edge is read for."""
    if piece.presence is not None:
        return piece.presence.long()
    if piece.snapshot is None:
        return torch.full_like(piece.cols, (1 << size) - 1, dtype=torch.int64)
    return torch.repeat_interleave(1 << piece.snapshot.long(), piece.offsets.diff())


def _count_sectors(sources: Tensor, patterns: Tensor, size: int, channels: int) -> int:
    """Sectors of the rows of edges: of all whose rows begin at one place of a sector and that bring equal snapshots as
    many.
    """
    begin = sources * (size * channels) % _SECTOR
    kinds, counts = torch.unique(begin * 256 + patterns, return_counts=True)
    total = 0
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        place, pattern = divmod(kind, 256)
        touched = set()
        for snapshot in (t for t in range(size) if pattern >> t & 1):
            first = place + snapshot * channels
            touched |= set(range(first // _SECTOR, (first + channels - 1) // _SECTOR + 1))
        total += count * len(touched)
    return total
