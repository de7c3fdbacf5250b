"""Compressed rows (CSR, or CSC with swapped arguments) from an edge list (see `kernels/local_ids/csr.py`).

`compress_ids` and `expand` convert ascending ids to offsets of their runs and back. `order_rows` gives the order of
edges on a CPU. `regroup` moves arrays by hop to arrays by type: each segment goes to its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, MemoryLimitError
from pyg_direct.kernels.local_ids import csr as kernels
from pyg_direct.kernels.local_ids.csr import find_offsets_gpu, mark_edges_cpu, read_hops_cpu
from pyg_direct.ops.argument_checks import INDEX_DTYPES
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, grid_for, is_heard, run_cpu, run_gpu, runs_on_gpu, threads_for
from pyg_direct.progress import show_wait
from pyg_direct.runtime.host.host_memory import total_bytes, use_large_pages

# So many items, or more, are numbered in 64 bits.
_MOST = 2**31
# Edges that a GPU sorts at once: torch cannot sort 2**31, and each takes 24 bytes meanwhile.
_SORTED = 2**30
# Nodes up to which offsets are small.
_ASKED = 2**24


class Compressed(NamedTuple):
    """Rows of edges.

    Attributes:
        indptr: int64 `[N + 1]`.
        indices: Columns, int32 if N < 2**31, otherwise int64; `[E]`; the edges of a row in the given order.
        edge_ids: Position of every edge in the given list, int32 if E < 2**31, otherwise int64; `[E]`.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor


def compress(rows: Tensor, columns: Tensor, num_nodes: int, *, name: str | None = None) -> Compressed:
    """Group edges by row; stable, keeping parallel edges, self loops, and rows without edges.

    Args:
        rows, columns: int32 or int64 `[E]` on one device, values in [0, num_nodes).
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
        # A system that overcommits memory would end the process at the first write.
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
    """Return (offsets int64 `[R + 1]`, positions of the edges row after row, in the given order within each) on the
    CPU.

    Args:
        rows: int32 or int64 `[E]`, values in [0, num_rows).
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
    # Edges of each row in each piece, then the first position of each piece's edges of a row.
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
        # A piece's edges are in order; its edges of a row follow the edges of the pieces before.
        ordered, order = torch.sort(rows[part].to(node_dtype), stable=True)
        places = torch.arange(order.numel(), device=device)
        places += (starts - (count.cumsum(0) - count)).index_select(0, ordered)
        indices.index_copy_(0, places, columns[part].to(node_dtype).index_select(0, order))
        edge_ids.index_copy_(0, places, order.add_(begin).to(edge_dtype))
        starts += count
        del ordered, order, places
    return Compressed(indptr, indices, edge_ids)


# So few numbers are repeated by one CPU thread: torch wakes all threads, however few there are.
_FEW = 2**16

_library = torch.library.Library("pyg_direct", "FRAGMENT")


def compress_ids(ordered: Tensor, num_rows: int) -> Tensor:
    """Return offsets `[num_rows + 1]` of the runs of ascending ids, int32 or int64 in [0, num_rows), in their dtype."""
    if ordered.is_cuda and not (torch.compiler.is_compiling() or is_heard(ordered)):
        return find_offsets(ordered, num_rows)
    made: Tensor = torch.ops.pyg_direct.find_offsets.default(ordered, num_rows)
    return made


def expand(indptr: Tensor, num_edges: int) -> Tensor:
    """Return ids `[num_edges]` of runs, the inverse of `compress_ids`; offsets above `num_edges` are cut."""
    bounds = indptr.clamp(max=num_edges)
    targets = torch.arange(indptr.numel() - 1, dtype=indptr.dtype, device=indptr.device)
    return torch.repeat_interleave(targets, bounds.diff(), output_size=num_edges)


def repeat_each(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Repeat `values[i]` `counts[i]` times, `total` in all, without a wait for a GPU."""
    if values.is_cuda or total > _FEW:
        return torch.repeat_interleave(values, counts, output_size=total)
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def mark_edges(edge_index: Tensor) -> int:
    """Return a hash of edges `[2, E]` on a CPU, which depends on their order.

    Reading 100,000 edges takes 20 us, compared with the milliseconds that a layer takes for them.
    """
    out = np.empty(1, np.uint64)
    # Waking other threads takes longer than this loop.
    with threads_for(0):
        run_cpu(mark_edges_cpu, *edge_index.unbind(0), out)
    return int(out[0])


def read_hops(edge_index: Tensor, hops: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """Return `mark_edges` of the edges up to the end of each hop; None if targets descend, or ends of edges are out of
    bounds.

    Args:
        edge_index: Edges `[2, E]`, hop after hop. On a GPU this waits, and returns no marks.
        hops: End of each hop, and the bounds of its sources and targets.
    """
    if edge_index.is_cuda:
        row, target = edge_index.unbind(0)
        wrong, begin = [target[1:] < target[:-1]], 0
        for end, sources, targets in hops:
            for ids, bound in ((row[begin:end], sources), (target[begin:end], targets)):
                wrong.append((ids < 0) | (ids >= bound))
            begin = end
        return None if bool(torch.cat(wrong).any()) else []
    marks = np.empty(len(hops) + 1, np.uint64)
    with threads_for(0):
        run_cpu(read_hops_cpu, *edge_index.unbind(0), np.array(hops, np.int64).reshape(-1, 3), marks)
    *made, wrong_edges = marks.tolist()
    return None if wrong_edges else made


def find_offsets(ordered: Tensor, num_rows: int) -> Tensor:
    """Return offsets; see `compress`."""
    if not runs_on_gpu(ordered):
        return torch._convert_indices_from_coo_to_csr(ordered, num_rows, out_int32=ordered.dtype == torch.int32)
    # One torch thread writes all offsets after the last id: 1.4 ms for a batch of 400,000 nodes.
    out = ordered.new_empty(num_rows + 1)
    run_gpu(find_offsets_gpu, grid_for(out.numel(), out), ordered.contiguous(), out)
    return out


_library.define("find_offsets(Tensor ordered, SymInt num_rows) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("find_offsets", find_offsets, _key)
_library.impl("find_offsets", lambda ordered, num_rows: ordered.new_empty(num_rows + 1), "Meta")


_NONE = np.zeros(0, np.int64)
_ITEM_BYTES = 8


class Piece(NamedTuple):
    """An array whose segments, one after the other, each go to their own place.

    Attributes:
        items: int64 `[n]`.
        counts: Items of each segment, int64 `[S]`.
        places: First position of each segment in the output, int64 `[S]`.
    """

    items: Tensor
    counts: np.ndarray
    places: np.ndarray
    output: int


def regroup(pieces: Sequence[Piece], outputs: Sequence[Tensor]) -> None:
    """Copy the segments of all pieces into the outputs, int64; the tables of a GPU's kernels travel together."""
    pieces = [piece for piece in pieces if piece.items.numel() > 0]
    if not pieces:
        return
    none = outputs[0][:0]
    if not runs_on_gpu(none):
        run_cpu(kernels.copy_runs_cpu, _list_runs(pieces, outputs))
        return
    # Once for each output.
    groups = [[piece for piece in pieces if piece.output == number] for number in range(len(outputs))]
    tables = []
    for group in groups:
        begins = _begin(np.concatenate([_NONE, *(piece.counts for piece in group)]))
        places = np.concatenate([_NONE, *(piece.places for piece in group)])
        tables += [begins, places - begins[:-1]]
    words = upload(np.concatenate(tables), none.device).split([len(table) for table in tables])
    for number, group in enumerate(groups):
        if not group:
            continue
        items = torch.cat([piece.items for piece in group])
        run_gpu(kernels.move_segments_gpu, grid_for(items.numel(), items), *words[2 * number : 2 * number + 2], items,
                outputs[number])  # fmt: skip


def _list_runs(pieces: Sequence[Piece], outputs: Sequence[Tensor]) -> np.ndarray:
    """Return the segments of all pieces as runs of bytes, int64 `[n, 3]`; see `copy_runs_cpu`."""
    tensors = [*outputs, *(piece.items for piece in pieces)]
    assert all(own.dtype == torch.int64 and own.is_contiguous() for own in tensors), "runs are copied as they lie"
    sizes = [len(piece.counts) for piece in pieces]
    runs = np.empty((sum(sizes), 3), np.int64)
    addresses = np.array([[outputs[piece.output].data_ptr(), piece.items.data_ptr()] for piece in pieces])
    np.concatenate([piece.places for piece in pieces], out=runs[:, 0])
    np.concatenate([np.cumsum(piece.counts) - piece.counts for piece in pieces], out=runs[:, 1])
    np.concatenate([piece.counts for piece in pieces], out=runs[:, 2])
    runs *= _ITEM_BYTES
    runs[:, :2] += np.repeat(addresses, sizes, axis=0)
    return runs


def _begin(counts: np.ndarray) -> np.ndarray:
    """Return the first position of segments of so many items, and the end of the last, int64 `[S + 1]`."""
    begins = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins
