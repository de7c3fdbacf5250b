"""One budget of GPU memory for the hot rows of several tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.runtime.size import parse_size


class Demand(NamedTuple):
    """A table whose hot rows want GPU memory: how often a batch reads each row, `[N]`, and the bytes of one."""

    reads: Tensor
    row_bytes: int


def share_budget(demands: Mapping[Any, Demand], budget: int | str) -> dict[Any, int]:
    """Bytes for hot rows of each table: those with the most expected reads a byte of all tables, until the first that
    does not fit; of equals, those of earlier tables first. It takes about 40 bytes a row, on the device of the scores.

    Args:
        demands: By key, on one device; `reads` in one unit.
        budget: For all of them together: bytes, `"2G"`, or a share of their bytes such as `"20%"`.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    reads, row_bytes = [demand.reads for demand in demands.values()], [demand.row_bytes for demand in demands.values()]
    whole = sum(size * len(scores) for scores, size in zip(reads, row_bytes, strict=True))
    most = parse_size(budget, whole, "feature_cache")
    if not demands:
        return {}
    device, lengths = reads[0].device, torch.tensor([len(scores) for scores in reads], device="cpu")
    densities = torch.cat([scores.float() / max(1, size) for scores, size in zip(reads, row_bytes, strict=True)])
    order = densities.sort(descending=True, stable=True).indices
    table = torch.arange(len(reads), device=device).repeat_interleave(lengths.to(device))[order]
    sizes = torch.tensor(row_bytes, device=device)
    counts = torch.bincount(table[sizes[table].cumsum(0) <= most], minlength=len(reads))
    return dict(zip(demands, (counts * sizes).tolist(), strict=True))
