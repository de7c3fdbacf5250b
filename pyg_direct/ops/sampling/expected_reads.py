"""Sums of row values over the nodes that the rows list (see `kernels/sampling/expected_reads.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels.sampling import expected_reads as kernels
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.progress import Bar

# Edges read together.
_EDGES_AT_ONCE = 1 << 24


def spread_values(indptr: Tensor, indices: Tensor, values: Tensor, bar: Bar | None = None,
                  num_nodes: int | None = None) -> Tensor:  # fmt: skip
    """Return the sum over the rows that list a node of their values, float32 `[N]`, once for each listing.

    Args:
        indptr, indices: Rows, int64 `[S + 1]` and int32 or int64 `[E]` within [0, N), which is not checked;
            on a GPU other ids are left out.
        values: Value of each row, float32 `[S]`, on the device of the rows.
        bar: Progress bar for the edges that were read.
        num_nodes: N, the nodes that rows may list; None if they are the rows.
    """
    num_edges = indices.numel()
    num_nodes = values.numel() if num_nodes is None else num_nodes
    if runs_on_gpu(values):
        sums = _spread_on_gpu(indptr, indices, values, num_nodes)
        if bar is not None:
            bar.update(num_edges)
        return sums
    # Threads add to private sums, which together take no more memory than the edges.
    parts = max(1, min(cpu_chunks(), num_edges // max(1, num_nodes)))
    sums = torch.zeros(parts, num_nodes, dtype=torch.float32, device="cpu")
    step = _EDGES_AT_ONCE * parts
    for begin in range(0, num_edges, step):
        end = min(num_edges, begin + step)
        shares = torch.arange(parts + 1, device="cpu") * (end - begin) // parts + begin
        # A row is in the part that its first edge is in.
        firsts = torch.searchsorted(indptr, shares)
        run_cpu(kernels.spread_values_cpu, indptr, indices.contiguous(), values, firsts, sums)
        if bar is not None:
            bar.update(end - begin)
    return sums[0] if parts == 1 else sums.sum(0)


def _spread_on_gpu(indptr: Tensor, indices: Tensor, values: Tensor, num_nodes: int) -> Tensor:
    sums, num_edges = values.new_zeros(num_nodes), indices.numel()
    if num_edges == 0 or sums.numel() == 0:
        return sums
    step = indices.stride(0) if num_edges > 1 else 1
    if step == 0:
        indices, step = indices.contiguous(), 1
    # Position of each beside the id of its edge.
    flat = indices if step == 1 else indices.as_strided(((num_edges - 1) * step + 1,), (1,))
    grid = min(full_grid(values), -(-num_edges // kernels.TURN))
    run_gpu(kernels.spread_values_gpu, grid, indptr.contiguous(), flat, step, values.contiguous(), sums)
    return sums
