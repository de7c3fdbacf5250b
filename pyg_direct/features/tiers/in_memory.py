"""Rows in memory that kernels read in place: of the GPU, of several GPUs that read each other's, or of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.features.tier_report import TierReport
from pyg_direct.features.tiers.base import TableTier
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.cuda.peer_memory import Spread

# Positions of a list of ids that are read at once if rows lie on several GPUs. Ascending ids read from one GPU after
# the other, and all GPUs would then read from the same one. On four H200s 1,024 read at 0.74 of the rate of copies, 64
# at 0.80.
STRANDS = 64


class PeerTier(TableTier):
    """Rows in the memories of a clique of GPUs.

    Args:
        table: The rows `[M, ...]`, contiguous, as the GPU that reads them sees them.
    """

    title, is_gpu_memory = "GPU memory", True
    _far: FarRows | None = None

    def __init__(self, spread: Spread, table: Tensor) -> None:
        super().__init__(table, "peer")
        self.spread = spread

    def count_served(self, on: bool) -> None:
        """Count from zero the rows that lie on other GPUs, or stop."""
        self._far = FarRows(self.spread, self.table, self.device) if on else None

    def note_read(self, places: Tensor) -> None:
        """Count a read of rows at these positions, int64 `[n]`; positions outside [0, M) are ignored."""
        if self._far is not None:
            is_row = (places >= 0) & (places < self.shape[0])
            self._far.count(torch.where(is_row, places.long(), -1))

    def describe(self, num_rows: int, num_read: int | None, link: str | None) -> list[TierReport]:
        """Return a line for the memory of this GPU, and one for the memory of others if reads are counted."""
        num_far, far_read = (0, 0) if self._far is None else (self._far.num_rows, self._far.num_read)
        own_read = None if num_read is None else num_read - far_read
        lines = super().describe(num_rows - num_far, own_read, None) if num_rows > num_far else []
        return [*lines, TierReport("memory of other GPUs", num_far, far_read, "NVLink")] if num_far > 0 else lines


class FarRows:
    """Counts the rows that are read out of the memory of other GPUs.

    Args:
        rows: The rows that lie in it, `[H, ...]`.
    """

    def __init__(self, spread: Spread, rows: Tensor, device: torch.device) -> None:
        self._row_bytes, self._chunk_bytes = rows[0].numel() * rows.element_size(), spread.chunks[0].num_bytes
        is_far = [chunk.owner != device.index for chunk in spread.chunks]
        # A row belongs to the chunk that it begins in.
        firsts = [min(len(rows), -(-i * self._chunk_bytes // self._row_bytes)) for i in range(len(is_far) + 1)]
        self.num_rows = sum(end - begin for far, begin, end in zip(is_far, firsts, firsts[1:], strict=False) if far)
        # The last one stands for the position -1.
        self._is_far = torch.tensor([*is_far, False], device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, places: Tensor) -> None:
        """Count a read of rows at these positions, int64 `[n]`; -1 is ignored."""
        chunks = torch.div(places * self._row_bytes, self._chunk_bytes, rounding_mode="floor")
        self._count += self._is_far[chunks].sum()

    @property
    def num_read(self) -> int:
        """Rows counted so far; waits for the GPU."""
        return int(self._count)


class DeviceTier(TableTier):
    """Rows in GPU memory.

    Args:
        table: `[M, ...]`, contiguous, on the GPU.
    """

    title, is_gpu_memory = "GPU memory", True

    def __init__(self, table: Tensor) -> None:
        super().__init__(table, table.device.type)


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
