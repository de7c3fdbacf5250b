"""Reads of the kernels of snapshots, counted by walking through the structures as the kernels do (PiPAD, Fig. 11).

No GPU is needed. A request is one instruction by which a warp reads rows. A sector is 32 bytes of memory with rows of
one edge. Active threads are the threads of a warp for which a request brings numbers. Caches are ignored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.ops.snapshots.slice_csr import SlicedCSR

_WARP, _SECTOR = 32, 8
# Slices that the narrow kernel processes at once, and numbers that a thread of the wide kernel reads.
_COALESCED, _PIECE = 16, 4


class Reads(NamedTuple):
    """Reads of rows in one pass.

    Attributes:
        requests: Instructions of warps.
        sectors: 32-byte sectors.
        numbers: fp32 numbers that are needed.
        places: Numbers that as many requests could bring, with all threads active.
    """

    requests: int
    sectors: int
    numbers: int
    places: int

    def __add__(self, other: object) -> Reads:
        assert isinstance(other, Reads)
        return Reads(*(a + b for a, b in zip(self, other, strict=True)))


def count_reads(piece: SlicedCSR, size: int, channels: int, kernel: str, whole: bool = False) -> Reads:
    """Count reads of rows `[N, size, channels]` by a structure.

    Args:
        piece: Structure of snapshots 0 to `size`.
        size, channels: S, F.
        kernel: "plain", "narrow", "wide" or "rows", a result of `ops.snapshots.aggregate.choose_kernel`.
        whole: True if one group of threads processes all slices of a row, as with CSR.
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
    # In a warp, groups of threads of a wide row are parallel; groups of a plain row are consecutive.
    groups = counts.repeat_interleave(tiles) if is_wide else counts
    warps = torch.nn.functional.pad(groups, (0, -groups.numel() % slices)).view(-1, slices)
    requests = int(warps.amax(1).sum()) * (1 if is_wide else tiles) if warps.numel() else 0
    patterns = _find_patterns(piece, size)
    numbers = int((patterns.unsqueeze(1) >> torch.arange(size, device=patterns.device) & 1).sum()) * channels
    sectors = _count_sectors(piece.cols.long(), patterns, size, channels)
    return Reads(requests, sectors, numbers, requests * _WARP * per_thread)


def _join_runs(piece: SlicedCSR, counts: Tensor) -> Tensor:
    """Count edges of the slices of one row, or of one row in one snapshot, at the first of them; 0 at the others."""
    key = piece.rows.long() & (2**31 - 1)
    if piece.snapshot is not None:
        key = key * piece.num_snapshots + piece.snapshot
    begins = torch.ones_like(key, dtype=torch.bool)
    begins[1:] = key[1:] != key[:-1]
    run = begins.cumsum(0) - 1
    total = torch.zeros_like(counts).index_add_(0, run, counts)
    return torch.where(begins, total[run], 0)


def _find_patterns(piece: SlicedCSR, size: int) -> Tensor:
    """Find the bits of the snapshots for which each edge is read."""
    if piece.presence is not None:
        return piece.presence.long()
    if piece.snapshot is None:
        return torch.full_like(piece.cols, (1 << size) - 1, dtype=torch.int64)
    return torch.repeat_interleave(1 << piece.snapshot.long(), piece.offsets.diff())


def _count_sectors(sources: Tensor, patterns: Tensor, size: int, channels: int) -> int:
    """Count sectors of the rows of edges; rows with the same offset in a sector and the same snapshots take equally
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
