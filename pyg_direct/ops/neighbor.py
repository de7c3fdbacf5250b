"""One hop of neighbor sampling, out of place (see `kernels/neighbor.py`); whole batches go through a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import IdError
from pyg_direct.kernels import neighbor as kernels
from pyg_direct.kernels.jit import GpuKernel
from pyg_direct.kernels.state import EDGES, KEY, NODES, STATE
from pyg_direct.ops.check import check_fanouts, check_ids, check_key, check_same_device
from pyg_direct.ops.launch import cpu_chunks, full_grid, run_cpu, run_gpu, runs_on_gpu


class Neighbors(NamedTuple):
    """Picks of a list of seeds, row after row.

    Attributes:
        nodes: Picked neighbors, dtype of `indices`, `[E']`.
        counts: Picks of each seed, int64 `[B]`.
        positions: Where each pick stands in `indices`, int64 `[E']`.
    """

    nodes: Tensor
    counts: Tensor
    positions: Tensor


def sample_neighbors(indptr: Tensor, indices: Tensor, seeds: Tensor, *, fanout: int, key: int, hop: int = 0,
                     replace: bool = False) -> Neighbors:  # fmt: skip
    """Draw up to `fanout` neighbors of every seed; equal keys give equal picks on any device.

    Args:
        indptr: Row offsets, int64 `[N + 1]`.
        indices: Neighbors, int32 or int64 `[E]`.
        seeds: Nodes to expand, int64 or int32 `[B]`, on the device of the topology.
        fanout: Neighbors a node; -1 takes all.
        key: Unsigned 64-bit key of the batch.
        hop: Number of the hop; hops of one key draw independently.
        replace: Draw with replacement.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    (fanout,) = check_fanouts("fanout", [fanout])
    check_key("key", key)
    seeds = check_ids("seeds", seeds, indptr.numel() - 1)
    check_same_device("seeds", seeds, "indptr", indptr)
    if seeds.is_cuda and seeds.numel() > 0:
        low, high = (int(v) for v in torch.aminmax(seeds))
        if low < 0 or high >= indptr.numel() - 1:
            raise IdError(f"seeds must lie in [0, {indptr.numel() - 1}), got {low if low < 0 else high}")
    nodes = seeds.to(indices.dtype)
    if nodes.numel() == 0:
        empty = nodes.new_empty(0, dtype=torch.int64)
        return Neighbors(nodes, empty, empty)
    sample = _sample_on_gpu if runs_on_gpu(nodes) else _sample_on_cpu
    return sample(indptr, indices, nodes, fanout, key, hop, replace)


def _sample_on_cpu(indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, hop: int,
                   replace: bool) -> Neighbors:  # fmt: skip
    chunks = cpu_chunks()
    offsets = torch.empty(nodes.numel() + 1, dtype=torch.int64)
    run_cpu(kernels.count_picks_cpu, indptr, nodes, fanout, replace, np.empty(chunks, np.int64), offsets)
    sources = indices.new_empty(int(offsets[-1]))
    positions = torch.empty(sources.numel(), dtype=torch.int64)
    run_cpu(kernels.pick_neighbors_cpu, indptr, indices, nodes, offsets, np.uint64(key), hop, fanout, replace, chunks,
            sources, positions)  # fmt: skip
    return Neighbors(sources, offsets.diff(), positions)


def _sample_on_gpu(indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, hop: int,
                   replace: bool) -> Neighbors:  # fmt: skip
    state = torch.zeros(STATE, dtype=torch.int64)
    state[KEY] = key - (key >> 63 << 64)
    state[NODES + hop] = nodes.numel()
    state = state.to(nodes.device)
    grid = full_grid(nodes)
    block_sums = state.new_empty(grid)
    empty = torch.empty(0, dtype=torch.uint32, device=nodes.device)
    run_gpu(kernels.count_picks_gpu, grid, state, indptr, nodes, hop, fanout, int(replace), 1, block_sums)
    total = int(block_sums.sum())
    sources = nodes.new_empty(total)
    positions = state.new_empty(total)
    targets = torch.empty(total, dtype=torch.int32, device=nodes.device)
    run_gpu(pick_kernel(fanout), grid, state, indptr, indices, nodes, block_sums, hop, fanout, int(replace), 1, total,
            sources, positions, targets, empty, empty)  # fmt: skip
    assert int(state[EDGES + hop + 1]) == total
    return Neighbors(sources, torch.bincount(targets, minlength=nodes.numel()), positions)


def pick_kernel(fanout: int) -> GpuKernel:
    """The GPU kernel that serves a fanout."""
    return kernels.pick_neighbors_gpu if fanout <= kernels.TILE_EDGES else kernels.pick_many_neighbors_gpu
