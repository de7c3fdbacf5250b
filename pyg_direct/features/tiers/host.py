"""Rows in host memory, which a GPU reads in place over its link."""

from __future__ import annotations

from torch import Tensor

from pyg_direct.features.tiers.base import TableTier
from pyg_direct.runtime.cuda.memory import Block


class HostTier(TableTier):
    """Rows in host memory.

    Args:
        table: `[M, ...]`, contiguous, as the GPU that reads them sees them; on the CPU if no GPU reads them.
        block: The memory that a GPU reads; None for ordinary memory.
        max_blocks: Cap of the grid of one read.
    """

    def __init__(self, table: Tensor, block: Block | None = None, max_blocks: int | None = None) -> None:
        super().__init__(table, "cpu" if block is None else block.placement, block=block, max_blocks=max_blocks)
        self.title = f"host memory ({self.placement})"
