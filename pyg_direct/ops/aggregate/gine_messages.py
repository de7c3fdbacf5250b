"""Messages of GINEConv made and summed at once on a GPU; `nn/conv/gine.py` has the same in torch functions."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels.aggregate import gine_messages as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.aggregate.operators import PIECE, WIDE_KINDS, is_wide
from pyg_direct.ops.run_kernel import grid_of, is_heard, run_gpu, runs_on_gpu


def is_fused(x: Tensor, edge_rows: Tensor, num_targets: int, max_degree: int | None) -> bool:
    """Report whether rows of sources `[N, C]` and of edges `[E, C]` are read in pieces of 16 bytes on a GPU. No target
    may have many edges, because one thread adds up all edges of a target.
    """
    most, num_edges = max(len(x), len(edge_rows)), len(edge_rows)
    return (
        runs_on_gpu(x)
        and x.dtype == edge_rows.dtype
        and x.is_contiguous()
        and edge_rows.is_contiguous()
        and min(num_edges, num_targets, x.shape[1]) > 0
        and (num_edges <= LONG_ROW or (max_degree is not None and max_degree <= LONG_ROW))
        and all(is_wide(rows, rows.shape[1], most) for rows in (x, edge_rows))
        and not is_heard(x)
    )


def sum_fused(x: Tensor, edge_rows: Tensor, indptr: Tensor, row: Tensor, num_targets: int, *, mean: bool, keeps: bool
              ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return relu(x[row] + edge_rows) reduced over the edges of each target, `[T, C]`, if `is_fused`. If `keeps`, also
    return the bits of the messages that `pull_fused` needs, uint8 `[E, P]` for rows of P pieces of 16 bytes.
    """
    out, pieces = x.new_empty(num_targets, x.shape[1]), x.shape[1] * x.element_size() // PIECE
    kept = torch.empty(len(edge_rows), pieces, dtype=torch.uint8, device=x.device) if keeps else None
    indptr, row = indptr.contiguous(), row.contiguous()
    run_gpu(kernels.sum_messages_gpu, grid_of(num_targets * pieces, 0), x.data_ptr(), edge_rows.data_ptr(),
            row.data_ptr(), row.element_size(), indptr, row.numel(), num_targets, pieces, int(mean),
            WIDE_KINDS[x.dtype], 0 if kept is None else kept.data_ptr(), out.data_ptr())  # fmt: skip
    return out, kept


def pull_fused(grad: Tensor, kept: Tensor, row: Tensor, target: Tensor, num_rows: int, *, to_edges: bool, to_x: bool
               ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the requested gradients of the rows of edges, `[E, C]`, and of sources, `[N, C]`, added up in any order.

    Args:
        grad: Gradients of the sums, `[T, C]`, times the scale of means.
        kept: See `sum_fused`.
        row, target: Source and target of each edge, `[E]`.
        num_rows: N.
    """
    grad, (num_edges, pieces) = grad.contiguous(), kept.shape
    if grad.data_ptr() % PIECE:
        grad = grad.clone()
    of_edges = grad.new_empty(num_edges, grad.shape[1]) if to_edges else None
    of_x = grad.new_zeros(num_rows, grad.shape[1], dtype=torch.float32) if to_x else None
    run_gpu(kernels.pull_messages_gpu, grid_of(num_edges * pieces, 0), grad.data_ptr(), kept.data_ptr(),
            row.contiguous(), target.to(row.dtype).contiguous(), num_edges, pieces, grad.element_size(),
            WIDE_KINDS[grad.dtype], 0 if of_edges is None else of_edges.data_ptr(),
            0 if of_x is None else of_x.data_ptr())  # fmt: skip
    return of_edges, None if of_x is None else of_x.to(grad.dtype)


def unpack_kept(kept: Tensor, width: int) -> Tensor:
    """Unpack the bits that `sum_fused` keeps, as bool `[E, C]`."""
    bits = torch.arange(width // kept.shape[1], dtype=torch.uint8, device=kept.device)
    return (kept.unsqueeze(2) >> bits & 1).bool().view(len(kept), width)
