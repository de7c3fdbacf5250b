"""Number of blocks of a grid that keep the link to host memory busy: more blocks would only displace a model's.

A block has 1,024 threads, as many as take a whole multiprocessor (`kernels/rows/gather.py`).
"""

from __future__ import annotations

import math

from pyg_direct.kernels.rows.gather import PIECE
from pyg_direct.ops.rows.gather_rows import group_bits

# Blocks that read rows which keep all threads busy, from unified and from page-locked memory. On an H100 and an H200
# more were less than 2 % faster.
DEFAULT_BLOCKS = 4
# Lowest share of the read rows that is assumed to come from host memory. If more blocks are needed beside hot rows than
# without: the multiple up to which all are taken, and the share beyond it.
_LEAST_MISSES, _ENOUGH_BESIDE_HOT, _MORE_BESIDE_HOT = 1 / 16, 1.15, 0.05
# For rows from other GPUs too, whose latency is higher. The share of the needed blocks if few rows miss, and the
# highest multiple of the blocks without hot rows.
_ENOUGH_BESIDE_PEERS, _MOST_BESIDE_PEERS = 0.35, 5.3


def blocks_for_rows(blocks: int, stored_bytes: int, row_bytes: int) -> int:
    """Return the number of blocks that have as many bytes in flight as `blocks` for rows that keep all threads busy.

    Args:
        blocks: Blocks for rows that keep all threads busy, such as `DEFAULT_BLOCKS`.
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
