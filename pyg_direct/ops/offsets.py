"""Offsets of the runs of ascending ids, and back; and the order of edges on a CPU (see `kernels/offsets.py`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.offsets import find_offsets_gpu, mark_edges_cpu, read_order_cpu
from pyg_direct.ops.launch import grid_for, is_heard, run_cpu, run_gpu, runs_on_gpu, threads_for

# So few numbers are repeated on a CPU by one thread: torch wakes all, however few there are.
_FEW = 2**16

_library = torch.library.Library("pyg_direct", "FRAGMENT")


def compress(ordered: Tensor, num_rows: int) -> Tensor:
    """Offsets `[num_rows + 1]` of the runs of ascending ids, int32 or int64 in [0, num_rows), in their dtype."""
    if ordered.is_cuda and not (torch.compiler.is_compiling() or is_heard(ordered)):
        return find_offsets(ordered, num_rows)
    made: Tensor = torch.ops.pyg_direct.find_offsets.default(ordered, num_rows)
    return made


def expand(indptr: Tensor, num_edges: int) -> Tensor:
    """Ids `[num_edges]` of runs, the inverse of `compress`; offsets above `num_edges` are cut."""
    bounds = indptr.clamp(max=num_edges)
    targets = torch.arange(indptr.numel() - 1, dtype=indptr.dtype, device=indptr.device)
    return torch.repeat_interleave(targets, bounds.diff(), output_size=num_edges)


def repeat_each(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """`values[i]` so many times as `counts[i]` says, `total` in all; a GPU is not waited for."""
    if values.is_cuda or total > _FEW:
        return torch.repeat_interleave(values, counts, output_size=total)
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def mark_edges(edge_index: Tensor, first: int = 0) -> int:
    """A number that tells edges `[2, E]` on a CPU from any others, and from the same in another order.

    Those of parts, each with the number of its `first` edge, add up to that of all, modulo 2**64. To read 100,000 edges
    takes 20 us, of the milliseconds that a layer takes for them.
    """
    out = np.empty(1, np.uint64)
    # Others are woken for longer than this takes.
    with threads_for(0):
        run_cpu(mark_edges_cpu, *edge_index.unbind(0), first, out)
    return int(out[0])


def is_in_order(edge_index: Tensor, num_sources: int, num_targets: int) -> bool:
    """Whether edges `[2, E]` are sorted by target, and their ends lie below these numbers; a GPU is waited for."""
    if edge_index.is_cuda:
        row, target = edge_index.unbind(0)
        wrong = [(row < 0) | (row >= num_sources), (target < 0) | (target >= num_targets), target[1:] < target[:-1]]
        return not bool(torch.cat(wrong).any())
    out = np.empty(3, np.uint64)
    with threads_for(0):
        run_cpu(read_order_cpu, *edge_index.unbind(0), out)
    falls, most_source, most_target = out.tolist()
    is_inside = most_source < num_sources and most_target < num_targets
    return edge_index.shape[1] == 0 or (falls == 0 and is_inside)


def find_offsets(ordered: Tensor, num_rows: int) -> Tensor:
    """See `compress`."""
    if not runs_on_gpu(ordered):
        return torch._convert_indices_from_coo_to_csr(ordered, num_rows, out_int32=ordered.dtype == torch.int32)
    # There one thread of torch's writes all offsets behind the last id: 1.4 ms of a batch of 400,000 nodes.
    out = ordered.new_empty(num_rows + 1)
    run_gpu(find_offsets_gpu, grid_for(out.numel(), out), ordered.contiguous(), out)
    return out


_library.define("find_offsets(Tensor ordered, SymInt num_rows) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("find_offsets", find_offsets, _key)
_library.impl("find_offsets", lambda ordered, num_rows: ordered.new_empty(num_rows + 1), "Meta")
