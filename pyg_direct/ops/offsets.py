"""Offsets of the runs of ascending ids, and back; and the order of edges on a CPU (see `kernels/offsets.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.offsets import find_offsets_gpu, mark_edges_cpu, read_hops_cpu
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


def mark_edges(edge_index: Tensor) -> int:
    """A number that tells edges `[2, E]` on a CPU from any others, and from the same in another order.

    To read 100,000 edges takes 20 us, of the milliseconds that a layer takes for them.
    """
    out = np.empty(1, np.uint64)
    # Others are woken for longer than this takes.
    with threads_for(0):
        run_cpu(mark_edges_cpu, *edge_index.unbind(0), out)
    return int(out[0])


def read_hops(edge_index: Tensor, hops: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """`mark_edges` of those up to the end of each hop; None where targets descend, or ends of edges are out of bounds.

    Args:
        edge_index: Edges `[2, E]`, hop after hop. A GPU is waited for, and gives no marks.
        hops: Where each ends, and what its sources and targets lie below.
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
