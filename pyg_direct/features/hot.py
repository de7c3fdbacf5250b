"""Hot rows of a `Feature`: how much GPU memory they get, and their copy there."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.errors import PlacementWarning, warn
from pyg_direct.progress import show_wait
from pyg_direct.runtime.device import free_bytes

_FREE_SHARE = 0.9
# Rows that are copied to GPU memory at once.
_PIECE = 1 << 18


def fit_budget(budget: int, asked: int | str, device: torch.device) -> int:
    """As many of `budget` bytes as are free on the GPU; a warning names `asked`, the `device_cache_size`, if fewer."""
    most = int(_FREE_SHARE * free_bytes(device.index or 0))
    if budget > most:
        warn(f"device_cache_size={asked!r} is more than the free memory of {device}; "
             f"{most} bytes are used instead", PlacementWarning)  # fmt: skip
    return min(budget, most)


def copy_to_gpu(rows: Tensor, ids: Tensor | None, device: torch.device) -> Tensor | None:
    """All rows or those of `ids` in GPU memory; None when it ran out."""
    try:
        hot = torch.empty((len(rows) if ids is None else len(ids), *rows.shape[1:]), dtype=rows.dtype, device=device)
    except torch.OutOfMemoryError:
        return None
    with show_wait("copying rows to GPU memory", items=hot.numel()):
        if ids is None:
            return hot.copy_(rows)
        # In pieces, so that the host holds no second copy of the hot rows.
        for part, ids_of_part in zip(hot.split(_PIECE), ids.split(_PIECE), strict=True):
            part.copy_(rows[ids_of_part])
    return hot


def shrink_budget(budget: int, asked: int | str) -> int:
    """Half of `budget` bytes, which the GPU had no memory for; a warning names `asked`, the `device_cache_size`."""
    torch.cuda.empty_cache()
    warn(
        f"device_cache_size={asked!r}: GPU memory ran out for {budget} bytes of "
        f"hot rows; {budget // 2} are tried instead",
        PlacementWarning,
    )
    return budget // 2
