"""Nodes grouped by the parts that own them (see `kernels/sampling/split_by_owner.py`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pyg_direct.kernels.sampling import split_by_owner as kernels
from pyg_direct.kernels.sampling.split_by_owner import group_buckets_cpu
from pyg_direct.ops.run_kernel import cpu_chunks, grid_for, run_cpu, run_gpu, runs_on_gpu


def make_keys(num_ids: int, num_buckets: int, device: torch.device) -> Tensor:
    """Allocate the keys of ids that fall into so many buckets, uint8 or int32 `[num_ids]`."""
    return torch.empty(num_ids, dtype=torch.uint8 if num_buckets <= 255 else torch.int32, device=device)


def find_buckets(ids: Tensor, num_parts: int, bounds: Tensor, table: Tensor, own: int, scale: int, add: int,
                 keys: Tensor) -> None:  # fmt: skip
    """Write the key of the bucket of each id.

    Args:
        ids: int64 `[n]`; one outside the table counts as one of part 0.
        num_parts: P.
        bounds: First ids of all parts but the first, int64 `[P - 1]`; empty without ranges.
        table: Part of each id, uint8 or int16 `[N]`; empty without a table. Without both a hash decides.
        own: The part that asks, whose bucket is the last; -1 for none.
        scale, add: The key is bucket * scale + add.
        keys: Output, `[n]` of `make_keys`.
    """
    if ids.numel() == 0:
        return
    arguments = ids, num_parts, bounds, table, own, scale, add, keys
    if runs_on_gpu(ids):
        run_gpu(kernels.find_buckets_gpu, grid_for(ids.numel(), ids), *arguments)
    else:
        run_cpu(kernels.find_buckets_cpu, *arguments)


def group_keys(keys: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Return (positions of the keys, bucket after bucket, int64 `[n]`; first position of each bucket, and the end,
    int64 `[B + 1]`).

    Within a bucket they keep their order.
    """
    device = keys.device
    if runs_on_gpu(keys):
        ordered, order = keys.sort(stable=True)
        return order, torch.searchsorted(ordered, _count_up(num_buckets + 1, keys.dtype, device))
    chunks = cpu_chunks()
    counts = torch.zeros(chunks, num_buckets, dtype=torch.int64, device="cpu")
    order = torch.empty(keys.numel(), dtype=torch.int64, device="cpu")
    bounds = torch.zeros(num_buckets + 1, dtype=torch.int64, device="cpu")
    if keys.numel() > 0:
        run_cpu(group_buckets_cpu, keys, counts, order)
        # Each count has become the end of its bucket.
        bounds[1:] = counts[-1]
    return order, bounds


@functools.cache
def _count_up(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)
