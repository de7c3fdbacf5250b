"""Compressed rows (CSR, or CSC by swapping the arguments) from an edge list."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, MemoryLimitError
from pyg_direct.kernels import compress as kernels
from pyg_direct.ops.check import INDEX_DTYPES
from pyg_direct.ops.launch import cpu_chunks, run_cpu, threads_for
from pyg_direct.progress import show_wait
from pyg_direct.runtime.host import total_bytes
from pyg_direct.runtime.pages import use_large_pages

# As many, and more, are numbered in 64 bits.
_MOST = 2**31
# Edges that a GPU puts in order at once: torch sorts no 2**31, and each takes 24 bytes meanwhile.
_SORTED = 2**30
# Nodes up to which offsets are small.
_ASKED = 2**24


class Compressed(NamedTuple):
    """Rows of edges.

    Attributes:
        indptr: int64 `[N + 1]`.
        indices: Columns, int32 when N < 2**31, else int64; `[E]`; the edges of a row in the order given.
        edge_ids: Position of every edge in the list given, int32 when E < 2**31, else int64; `[E]`.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor


def compress(rows: Tensor, columns: Tensor, num_nodes: int, *, name: str | None = None) -> Compressed:
    """Group edges by row; stable, keeping parallel edges, self loops, and rows without edges.

    Args:
        rows, columns: int32 or int64 `[E]` on one device, values in [0, num_nodes).
        num_nodes: N.
        name: What the user calls the list that both are of.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        MemoryLimitError: no memory of the host holds an offset of each node.
    """
    for part, ids in ((name or "rows", rows), (name or "columns", columns)):
        if ids.dtype not in INDEX_DTYPES:
            raise ArgumentTypeError(f"{part} must have dtype int64 or int32, got {ids.dtype}")
        if ids.dim() != 1 or ids.shape != rows.shape:
            raise ArgumentError(f"{part} must have shape [E] = {tuple(rows.shape)}, got {tuple(ids.shape)}")
        if ids.numel() > 0:
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < 0 or high >= num_nodes:
                raise IdError(f"{part} must lie in [0, {num_nodes}) (num_nodes), got {low if low < 0 else high}")
    if rows.device != columns.device:
        raise ArgumentError(f"columns must be on the device of rows ({rows.device}), got {columns.device}")
    node_dtype = torch.int32 if num_nodes < _MOST else torch.int64
    edge_dtype = torch.int32 if rows.numel() < _MOST else torch.int64
    if rows.is_cuda:
        return _compress_on_gpu(rows, columns, num_nodes, node_dtype, edge_dtype)
    if num_nodes > _ASKED and (most := total_bytes()) < 8 * num_nodes:
        # Systems that promise more than they have would end the process where it is written.
        raise MemoryLimitError(f"num_nodes must be at most {most // 8}, as host memory holds no more offsets, got "
                               f"{num_nodes}: nodes are all ids from 0, those without edges too")  # fmt: skip
    with show_wait("sorting edges by row", items=rows.numel()), threads_for(rows.numel()):
        return _compress_on_cpu(rows.contiguous(), columns.contiguous(), num_nodes, node_dtype, edge_dtype)


def _compress_on_cpu(rows: Tensor, columns: Tensor, num_nodes: int, node_dtype: torch.dtype,
                     edge_dtype: torch.dtype) -> Compressed:  # fmt: skip
    # Chunks re-read the edge list; twice as many as threads keep each one's cursors nearer to the cache.
    chunks = 2 * cpu_chunks()
    indptr = use_large_pages(torch.empty(num_nodes + 1, dtype=torch.int64, device="cpu")).zero_()
    run_cpu(kernels.count_rows_cpu, rows, chunks, indptr[1:])
    torch.cumsum(indptr[1:], 0, out=indptr[1:])
    indices = use_large_pages(torch.empty(rows.numel(), dtype=node_dtype, device="cpu"))
    edge_ids = use_large_pages(torch.empty(rows.numel(), dtype=edge_dtype, device="cpu"))
    run_cpu(kernels.place_edges_cpu, rows, columns, chunks, indptr[:-1].clone(), indices, edge_ids)
    return Compressed(indptr, indices, edge_ids)


def order_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(offsets int64 `[R + 1]`, positions of the edges row after row, in the order given within each) on the CPU.

    Args:
        rows: int32 or int64 `[E]`, values in [0, num_rows).
        num_rows: R.
    """
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64, device="cpu")
    edge_dtype = torch.int32 if rows.numel() < _MOST else torch.int64
    order = use_large_pages(torch.empty(rows.numel(), dtype=edge_dtype, device="cpu"))
    with show_wait("sorting edges by row", items=rows.numel()), threads_for(rows.numel()):
        chunks = 2 * cpu_chunks()
        run_cpu(kernels.count_rows_cpu, rows, chunks, indptr[1:])
        torch.cumsum(indptr[1:], 0, out=indptr[1:])
        run_cpu(kernels.order_edges_cpu, rows, chunks, indptr[:-1].clone(), order)
    return indptr, order


def _compress_on_gpu(rows: Tensor, columns: Tensor, num_nodes: int, node_dtype: torch.dtype,
                     edge_dtype: torch.dtype) -> Compressed:  # fmt: skip
    device, num_edges = rows.device, rows.numel()
    pieces = range(0, num_edges, _SORTED)
    # Edges of each row in each piece, and from there where each piece's edges of a row begin.
    counts = [torch.bincount(rows[begin : begin + _SORTED], minlength=num_nodes) for begin in pieces]
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=device)
    for count in counts:
        indptr[1:] += count
    torch.cumsum(indptr[1:], 0, out=indptr[1:])
    if len(pieces) <= 1:
        order = torch.sort(rows.to(node_dtype), stable=True).indices
        return Compressed(indptr, columns[order].to(node_dtype), order.to(edge_dtype))
    indices = torch.empty(num_edges, dtype=node_dtype, device=device)
    edge_ids = torch.empty(num_edges, dtype=edge_dtype, device=device)
    starts = indptr[:-1].clone()
    for begin, count in zip(pieces, counts, strict=True):
        part = slice(begin, begin + _SORTED)
        # A piece's edges lie in order; those of a row follow what the pieces before have of it.
        ordered, order = torch.sort(rows[part].to(node_dtype), stable=True)
        places = torch.arange(order.numel(), device=device)
        places += (starts - (count.cumsum(0) - count)).index_select(0, ordered)
        indices.index_copy_(0, places, columns[part].to(node_dtype).index_select(0, order))
        edge_ids.index_copy_(0, places, order.add_(begin).to(edge_dtype))
        starts += count
        del ordered, order, places
    return Compressed(indptr, indices, edge_ids)
