"""Values of rows added up over the nodes that the rows list (see `kernels/expected.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels import expected as kernels
from pyg_direct.ops.launch import cpu_chunks, run_cpu
from pyg_direct.progress import Bar

# Edges looked at together.
_PIECE = 1 << 24


def spread_values(indptr: Tensor, indices: Tensor, values: Tensor, bar: Bar | None = None) -> Tensor:
    """Sum over the rows that list a node of their values, float32 `[N]`, once for each listing.

    Args:
        indptr, indices: Rows, int64 `[N + 1]` and int32 or int64 `[E]` within [0, N), which is not checked.
        values: Of each row, float32 `[N]`, on the device of the rows.
        bar: What is told of edges that were looked at.
    """
    num_nodes, num_edges = indptr.numel() - 1, indices.numel()
    if values.is_cuda:
        return _spread_in_pieces(indptr, indices, values, bar)
    # Threads add to sums of their own, which together take no more memory than the edges.
    parts = max(1, min(cpu_chunks(), num_edges // max(1, num_nodes)))
    sums = torch.zeros(parts, num_nodes)
    step = _PIECE * parts
    for begin in range(0, num_edges, step):
        end = min(num_edges, begin + step)
        shares = torch.arange(parts + 1) * (end - begin) // parts + begin
        # A row is in the part that its first edge is in.
        firsts = torch.searchsorted(indptr, shares)
        run_cpu(kernels.spread_values_cpu, indptr, indices.contiguous(), values, firsts, sums)
        if bar is not None:
            bar.update(end - begin)
    return sums[0] if parts == 1 else sums.sum(0)


def _spread_in_pieces(indptr: Tensor, indices: Tensor, values: Tensor, bar: Bar | None) -> Tensor:
    sums = torch.zeros_like(values)
    num_nodes, num_edges = indptr.numel() - 1, indices.numel()
    # So many rows have a piece's edges on average.
    step = max(1, _PIECE * num_nodes // max(1, num_edges))
    firsts = list(range(0, num_nodes, step))
    begins = indptr[torch.tensor(firsts, dtype=torch.int64, device=indptr.device)].tolist()
    for row, begin, end in zip(firsts, begins, [*begins[1:], num_edges], strict=True):
        rows = slice(row, row + step)
        counts = indptr[1:][rows] - indptr[:-1][rows]
        sums.index_add_(0, indices[begin:end].long(), values[rows].repeat_interleave(counts, output_size=end - begin))
        if bar is not None:
            bar.update(end - begin)
    return sums
