"""A loop for each target of sorted edges, and GCN's weights (see `kernels/aggregate/self_loops.py`).

Two launches at most, and no wait for the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.aggregate import self_loops as kernels
from pyg_direct.ops.argument_checks import check_ids, check_same_device
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu, runs_on_gpu


class Looped(NamedTuple):
    """Edges sorted by target, the last of each target its loop.

    Attributes:
        indptr: Offsets of the targets, `[T + 1]`.
        row, target: Source and target of each edge, `[E + T]`.
        weight: Symmetric weights, `[E + T]`, or None.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    weight: Tensor | None


def add_loops(indptr: Tensor, row: Tensor, target: Tensor, num_targets: int,
              dtype: torch.dtype | None = None) -> Looped:  # fmt: skip
    """Append a loop to the edges of each target.

    Args:
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row, target: Source and target of each edge, `[E]`, of the dtype of `indptr`. Every target is below T.
        num_targets: T.
        dtype: Also weigh the edges as GCN does, in float32 or float64: 1 / sqrt(d_source * d_target). The degree d
            counts the edges of a target that are no loops, and one loop. Existing loops stay, with weight 0.

    Returns:
        New edges; existing edges keep their order.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    row, target, indptr = check_ids("row", row), check_ids("target", target), check_ids("indptr", indptr)
    check_same_device("row", row, "indptr", indptr)
    if not row.dtype == target.dtype == indptr.dtype or row.shape != target.shape:
        raise ArgumentError(f"row, target and indptr must be of one dtype, and the first two of one length, got "
                            f"{row.dtype} {tuple(row.shape)}, {target.dtype} {tuple(target.shape)}, "
                            f"{indptr.dtype}")  # fmt: skip
    if not 0 <= num_targets < indptr.numel():
        raise ArgumentError(f"num_targets must lie in [0, {indptr.numel() - 1}], got {num_targets}")
    num_edges = row.numel()
    on_gpu = runs_on_gpu(row)
    # No wait for a GPU.
    if num_edges > (num_edges * num_targets if on_gpu else int(indptr[num_targets])):
        raise ArgumentError(f"indptr must give every one of the {num_edges} edges a target below {num_targets=}")
    num_looped = num_edges + num_targets
    out_row, out_target, out_indptr = row.new_empty(2 * num_looped + num_targets + 1).split(
        [num_looped, num_looped, num_targets + 1]
    )
    if num_targets == 0:
        out_indptr.zero_()
    scale = torch.empty(0 if dtype is None else num_targets, dtype=dtype or torch.float32, device=row.device)
    if on_gpu:
        run_gpu(kernels.add_loops_gpu, grid_for(max(num_edges, num_targets), row), indptr, row, target, num_edges,
                num_targets, out_indptr, out_row, out_target, scale)  # fmt: skip
    else:
        run_cpu(kernels.add_loops_cpu, indptr, row, num_edges, out_indptr, out_row, out_target, scale)
    weight = None
    if dtype is not None:
        weight = torch.empty(num_looped, dtype=dtype, device=row.device)
        arrays = out_indptr, out_row, out_target, scale, weight
        if on_gpu:
            run_gpu(kernels.weigh_loops_gpu, grid_for(weight.numel(), row), *arrays)
        else:
            run_cpu(kernels.weigh_loops_cpu, *arrays)
    return Looped(out_indptr, out_row, out_target, weight)
