"""Places of ids in a table that holds the rows of some (see `kernels/locate.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels import locate as kernels
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.gather import Directory
from pyg_direct.ops.launch import grid_for, run_cpu, run_gpu, runs_on_gpu


def locate_ids(ids: Tensor, directory: Directory, num_ids: int) -> Tensor:
    """Rank of each id among those of a directory, int64 `[n]`; -1 where it is not there, or outside [0, num_ids).

    Args:
        ids: int32 or int64 `[n]`, on the device of the directory.
        directory: Which ids are there.
        num_ids: N, which ids the directory can tell apart.
    """
    ids = check_ids("ids", ids)
    out = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    if ids.numel() == 0:
        return out
    if runs_on_gpu(ids):
        run_gpu(kernels.locate_items_gpu, grid_for(ids.numel(), ids), ids, num_ids, *directory, out)
    else:
        run_cpu(kernels.locate_items_cpu, ids, num_ids, *directory, out)
    return out
