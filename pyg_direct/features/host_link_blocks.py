"""How many blocks of a grid keep the link to host memory busy: more would only take the place of a model's.

A block has 1,024 threads, as many as take a whole multiprocessor (`kernels/rows/gather.py`).
"""

from __future__ import annotations

import math
import time
from functools import partial

import torch
from torch import Tensor

from pyg_direct.cache_folder import recall
from pyg_direct.kernels.rows.gather import PIECE, WIDE
from pyg_direct.ops.rows.gather import gather_rows, group_bits
from pyg_direct.profiling import time_on_stream
from pyg_direct.runtime.cuda.device import abilities

DEFAULT_BLOCKS = 4
_CANDIDATES = (2, 3, 4, 6, 8, 12, 16)
# The fewest blocks that come this close to the best rate are taken.
_ENOUGH = 0.98
# Of the rows read, the share that is taken to come from host memory at least; of the blocks that as many waits take
# beside hot rows, how many times those without are all taken, and the share of those beyond.
_LEAST_MISSES, _ENOUGH_BESIDE_HOT, _MORE_BESIDE_HOT = 1 / 16, 1.15, 0.05
# Where rows of other GPUs come too, which are longer under way than own ones: the share of those blocks that is taken
# where few rows miss, and how many times those without at most.
_ENOUGH_BESIDE_PEERS, _MOST_BESIDE_PEERS = 0.35, 5.3
# So many that all blocks take many turns, as some take one more than others.
_PROBE_BYTES, _PROBE_ROWS = 32 << 20, 1 << 16
_LEAST_TABLE = 256 << 20
_MOST_SECONDS = 0.03
_REPEATS = 3

_KNOWN: dict[tuple[int, str], int] = {}


def find_link_blocks(table: Tensor, placement: str) -> int:
    """Blocks that read rows of `table` as fast as many would, where rows keep all threads busy (`blocks_for_rows`
    serves the others); measured once for a GPU model, a driver and a placement.

    The measurement takes some 20 ms, and is kept in `link_blocks.json` in the package's cache folder. A table too small
    to measure with gets a number that is right on the GPUs known.

    Args:
        table: `[N, ...]`, a GPU's view of rows in host memory.
        placement: `unified` or `pinned`.
    """
    index = table.get_device()
    known = _KNOWN.get((index, placement))
    if known is not None:
        return known
    if table.numel() * table.element_size() < _LEAST_TABLE or torch.cuda.is_current_stream_capturing():
        return DEFAULT_BLOCKS
    name = f"{torch.cuda.get_device_name(index)} | driver {abilities(index).driver_version} | {placement} | {WIDE}"
    with torch.cuda.device(index):
        blocks: int = recall("link_blocks", name, lambda: _measure(table), _CANDIDATES.__contains__)
    _KNOWN[index, placement] = blocks
    return blocks


def blocks_for_rows(blocks: int, stored_bytes: int, row_bytes: int) -> int:
    """Blocks that have as many bytes under way as `blocks` have of rows that keep all threads busy.

    Args:
        blocks: As of `find_link_blocks`.
        stored_bytes: Bytes of a row where it lies.
        row_bytes: Bytes of a row where it is wanted.
    """
    lanes = 1 << group_bits(row_bytes)
    room = -(-row_bytes // (PIECE * lanes)) * PIECE * lanes
    return math.ceil(blocks * room / max(1, stored_bytes))


def blocks_beside_hot(blocks: int, misses: float, has_peers: bool = False) -> int:
    """Blocks that read rows `misses` of which are on the host, others in GPU memory, with `has_peers` that of others.

    As many waits for the link take 1 / `misses` times as many blocks. But where few rows miss, the link is not what a
    step waits for, and each block takes a multiprocessor from a model's. A replayed step of GraphSAGE on an H200, whose
    products leave 6 of them, in one run: 20 % cached, 0.58 of the reads hit, 2.50 ms beside 3 blocks, 2.11 beside 4,
    2.12 beside 5, 2.15 beside 6, 2.32 beside 8 (the rows alone take 2.23, 1.72, 1.50, 1.47 and 1.47 ms); 60 %, 0.93,
    2.09 beside 4, 2.07 beside 6, 2.08 beside 12; 5 %, 0.23, 2.86 beside 4 and 2.80 beside 6; none, 3.92 beside 2, 3.65
    beside 3, 3.60 beside 4.

    On four H200, each of which caches 20 % of the rows for all, 0.045 of the reads miss, and 6, 8, 12, 16 and 32 blocks
    read 185, 232, 289, 300 and 315 GB/s; epochs of 60 batches of 4,096 seeds take 176, 159, 147, 145 and (24) 165 ms.
    Where each caches 10 %, 0.244 miss, and 4, 6, 16 and 32 blocks read 99, 102, 104 and 107 GB/s.
    """
    needed = 1 / max(misses, _LEAST_MISSES)
    enough = _ENOUGH_BESIDE_HOT + _MORE_BESIDE_HOT * (needed - _ENOUGH_BESIDE_HOT)
    if has_peers:
        enough = max(enough, min(_ENOUGH_BESIDE_PEERS * needed, _MOST_BESIDE_PEERS))
    return math.ceil(blocks * min(needed, enough))


def _measure(table: Tensor) -> int:
    """The fewest blocks that come near the best rate, reading rows all over the table in ascending order."""
    rows = table.view(len(table), -1).view(torch.uint8)
    stored_bytes = rows.shape[1]
    count = min(len(rows), -(-_PROBE_BYTES // stored_bytes), _PROBE_ROWS)
    step = len(rows) // count
    first_ids = torch.arange(count, device=table.device) * step
    out = torch.empty(count, stored_bytes, dtype=torch.uint8, device=table.device)
    best = dict.fromkeys(_CANDIDATES, float("inf"))
    # The first read only loads the kernel.
    gather_rows(rows, first_ids, out=out, max_blocks=DEFAULT_BLOCKS)
    torch.cuda.current_stream(table.device).synchronize()
    begin = time.perf_counter()
    for number, blocks in enumerate(_REPEATS * _CANDIDATES):
        if number >= len(_CANDIDATES) and time.perf_counter() - begin > _MOST_SECONDS:
            break
        # Other rows each time: a GPU keeps what it has read from the host in its L2.
        ids = first_ids + number % step
        most = blocks_for_rows(blocks, stored_bytes, stored_bytes)
        best[blocks] = min(best[blocks], time_on_stream(partial(gather_rows, rows, ids, out=out, max_blocks=most)))
    return next(blocks for blocks in _CANDIDATES if _ENOUGH * best[blocks] <= min(best.values()))
