"""Choice of the tier that holds rows: by their memory, and by the device that reads them. A new tier gets its line
here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers.base import TableTier, Tier
from pyg_direct.features.tiers.disk import DiskTier, StagedTier
from pyg_direct.features.tiers.in_memory import DeviceTier, HostTier, PeerTier
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.cuda.peer_memory import Spread


def open_table(table: Tensor, block: Block | None = None, spread: Spread | None = None) -> TableTier:
    """Open the tier of rows that kernels read in place.

    Args:
        table: `[M, ...]`, contiguous, as the device that reads them sees them.
        block, spread: Memory of the host, or of several GPUs, in which a GPU reads them.
    """
    if spread is not None:
        return PeerTier(spread, table)
    return DeviceTier(table) if table.is_cuda and block is None else HostTier(table, block)


def open_file(file: RowFile, device: torch.device) -> Tier:
    """Open the tier of rows that stay in a file, for results on a device."""
    disk = DiskTier(file)
    return StagedTier(disk, device) if device.type == "cuda" else disk
