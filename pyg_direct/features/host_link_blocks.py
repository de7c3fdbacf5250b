"""Number of blocks of a grid that keep the link to host memory busy: more blocks would only displace a model's.

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
from pyg_direct.ops.rows.gather_rows import gather_rows, group_bits
from pyg_direct.profiling import time_on_stream
from pyg_direct.runtime.cuda.device import abilities

DEFAULT_BLOCKS = 4
_CANDIDATES = (2, 3, 4, 6, 8, 12, 16)
# The fewest blocks that come this close to the best rate are taken.
_ENOUGH = 0.98
# Lowest share of the read rows that is assumed to come from host memory. If more blocks are needed beside hot rows than
# without: the multiple up to which all are taken, and the share beyond it.
_LEAST_MISSES, _ENOUGH_BESIDE_HOT, _MORE_BESIDE_HOT = 1 / 16, 1.15, 0.05
# For rows from other GPUs too, whose latency is higher. The share of the needed blocks if few rows miss, and the
# highest multiple of the blocks without hot rows.
_ENOUGH_BESIDE_PEERS, _MOST_BESIDE_PEERS = 0.35, 5.3
# Enough rows that all blocks take many turns, because some take one turn more than others.
_PROBE_BYTES, _PROBE_ROWS = 32 << 20, 1 << 16
_LEAST_TABLE = 256 << 20
_MOST_SECONDS = 0.03
_REPEATS = 3

_KNOWN: dict[tuple[int, str], int] = {}


def find_link_blocks(table: Tensor, placement: str) -> int:
    """Return the number of blocks that read rows of `table` as fast as many would, for rows that keep all threads busy.
    `blocks_for_rows` serves other rows. The number is measured once for a GPU model, a driver and a placement.

    The measurement takes some 20 ms, and is kept in `link_blocks.json` in the package's cache folder. If a table is too
    small to measure, it gets a number that is right on the known GPUs.

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
    """Return the number of blocks that have as many bytes in flight as `blocks` for rows that keep all threads busy.

    Args:
        blocks: As returned by `find_link_blocks`.
        stored_bytes: Bytes of a stored row.
        row_bytes: Bytes of a row in the result.
    """
    lanes = 1 << group_bits(row_bytes)
    room = -(-row_bytes // (PIECE * lanes)) * PIECE * lanes
    return math.ceil(blocks * room / max(1, stored_bytes))


def blocks_beside_hot(blocks: int, misses: float, has_peers: bool = False) -> int:
    """Return the number of blocks for reads with the share `misses` on the host. The rest is in GPU memory, including
    peers' memory if `has_peers`.

    As many waits for the link take 1 / `misses` times as many blocks. But if few rows miss, the link does not limit a
    step, and each block takes a multiprocessor from the model. Measured in one run on an H200, with a replayed step of
    GraphSAGE whose products leave 6 multiprocessors (ms a step; ms of the rows alone in parentheses):

    - 20 % cached, 0.58 of the reads hit: 3 blocks 2.50 (2.23), 4 blocks 2.11 (1.72), 5 blocks 2.12 (1.50), 6 blocks
      2.15 (1.47), 8 blocks 2.32 (1.47).
    - 60 % cached, 0.93 hit: 4 blocks 2.09, 6 blocks 2.07, 12 blocks 2.08.
    - 5 % cached, 0.23 hit: 4 blocks 2.86, 6 blocks 2.80.
    - None cached: 2 blocks 3.92, 3 blocks 3.65, 4 blocks 3.60.

    Measured on four H200 that cache for each other; GB/s, and ms of epochs of 60 batches of 4,096 seeds in parentheses
    (the last one with 24 blocks):

    - Each caches 20 %, 0.045 of the reads miss: 6 blocks 185 (176), 8 blocks 232 (159), 12 blocks 289 (147), 16 blocks
      300 (145), 32 blocks 315 (24 blocks: 165).
    - Each caches 10 %, 0.244 miss: 4 blocks 99, 6 blocks 102, 16 blocks 104, 32 blocks 107.
    """
    needed = 1 / max(misses, _LEAST_MISSES)
    enough = _ENOUGH_BESIDE_HOT + _MORE_BESIDE_HOT * (needed - _ENOUGH_BESIDE_HOT)
    if has_peers:
        enough = max(enough, min(_ENOUGH_BESIDE_PEERS * needed, _MOST_BESIDE_PEERS))
    return math.ceil(blocks * min(needed, enough))


def _measure(table: Tensor) -> int:
    """Return the fewest blocks that come near the best rate for rows all over the table in ascending order."""
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
        # Other rows each time: a GPU keeps rows from the host in its L2.
        ids = first_ids + number % step
        most = blocks_for_rows(blocks, stored_bytes, stored_bytes)
        best[blocks] = min(best[blocks], time_on_stream(partial(gather_rows, rows, ids, out=out, max_blocks=most)))
    return next(blocks for blocks in _CANDIDATES if _ENOUGH * best[blocks] <= min(best.values()))
