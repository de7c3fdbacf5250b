"""Rows in the memory of the device itself."""

from __future__ import annotations

from torch import Tensor

from pyg_direct.features.tiers.base import TableTier


class DeviceTier(TableTier):
    """Rows in GPU memory.

    Args:
        table: `[M, ...]`, contiguous, on the GPU.
    """

    title, is_gpu_memory = "GPU memory", True

    def __init__(self, table: Tensor) -> None:
        super().__init__(table, table.device.type)
