"""One hop of neighbor sampling, out of place (see `kernels/sampling/uniform.py` and `kernels/sampling/labor.py`); whole
batches go through a plan.

`spread_values` sums row values over the nodes that the rows list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import CpuKernel, GpuKernel
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels.batch_counters import EDGES, KEY, NODES, STATE
from pyg_direct.kernels.sampling import labor, uniform as kernels
from pyg_direct.ops.argument_checks import check_choice, check_fanouts, check_ids, check_key, check_same_device
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.progress import Bar

SAMPLINGS = ("uniform", "labor")


class Neighbors(NamedTuple):
    """Picks of a list of seeds, row after row.

    Attributes:
        nodes: Picked neighbors, dtype of `indices`, `[E']`.
        counts: Picks of each seed, int64 `[B]`.
        ids: Id of each pick's edge, int64 `[E']`: its position in `indices` if no ids are given.
    """

    nodes: Tensor
    counts: Tensor
    ids: Tensor


def sample_neighbors(indptr: Tensor, indices: Tensor, seeds: Tensor, *, fanout: int, key: int, hop: int = 0,
                     replace: bool = False, edge_ids: Tensor | None = None, pairs: Tensor | None = None,
                     sampling: str = "uniform", layer_dependency: bool = False) -> Neighbors:  # fmt: skip
    """Draw up to `fanout` neighbors of every seed; equal keys give equal picks on any device.

    Args:
        indptr: Row offsets, int64 `[N + 1]`.
        indices: Neighbors, int32 or int64 `[E]`.
        seeds: Nodes to expand, int64 or int32 `[B]`, on the device of the topology.
        fanout: Neighbors a node; -1 takes all.
        key: Unsigned 64-bit key of the batch.
        hop: Number of the hop; hops of one key draw independently.
        edge_ids: Edge ids by position, int32 or int64 `[E]`; empty or None: the position is the id.
        pairs: On a GPU, instead of reading `indices` and `edge_ids`: both in one word, see `PlacedTopology`.
        sampling: `uniform`: rows draw independently; `labor`: rows that list the same nodes pick the same ones.
        layer_dependency: With `labor`: the hops of a key pick the same nodes too.
    """
    check_sampling(sampling, replace, layer_dependency)
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
    none = torch.empty(0, dtype=torch.int64, device=nodes.device)
    edge_ids = none if edge_ids is None else edge_ids
    if not runs_on_gpu(nodes):
        pick, option = cpu_picks(fanout, replace, sampling, layer_dependency)
        return _sample_on_cpu(indptr, indices, edge_ids, nodes, fanout, key, hop, replace, pick, option)
    pairs = none if pairs is None else pairs
    kernel, flag = gpu_picks(fanout, replace, sampling, layer_dependency)
    return _sample_on_gpu(indptr, indices, edge_ids, pairs, nodes, fanout, key, hop, replace, kernel, flag)


def _sample_on_cpu(indptr: Tensor, indices: Tensor, edge_ids: Tensor, nodes: Tensor, fanout: int, key: int, hop: int,
                   replace: bool, kernel: CpuKernel, option: bool) -> Neighbors:  # fmt: skip
    chunks = cpu_chunks()
    offsets = torch.empty(nodes.numel() + 1, dtype=torch.int64, device="cpu")
    run_cpu(kernels.count_picks_cpu, indptr, nodes, fanout, replace, np.empty(chunks, np.int64), offsets)
    sources = indices.new_empty(int(offsets[-1]))
    positions = torch.empty(sources.numel(), dtype=torch.int64, device="cpu")
    run_cpu(kernel, indptr, indices, nodes, offsets, np.uint64(key), hop, fanout, option, chunks, sources, positions)
    return Neighbors(sources, offsets.diff(), edge_ids[positions].long() if edge_ids.numel() else positions)


def _sample_on_gpu(indptr: Tensor, indices: Tensor, edge_ids: Tensor, pairs: Tensor, nodes: Tensor, fanout: int,
                   key: int, hop: int, replace: bool, kernel: GpuKernel, option: int) -> Neighbors:  # fmt: skip
    state = torch.zeros(STATE, dtype=torch.int64, device="cpu")
    state[KEY] = key - (key >> 63 << 64)
    state[NODES + hop] = nodes.numel()
    state = state.to(nodes.device)
    grid = full_grid(nodes)
    block_sums = state.new_empty(grid)
    no_table, no_bits, no_flags = (torch.empty(0, dtype=d, device=nodes.device)
                                   for d in (torch.int32, torch.uint32, torch.uint8))  # fmt: skip
    run_gpu(kernels.count_picks_gpu, grid, state, indptr, nodes, hop, fanout, int(replace), 1, no_table, block_sums)
    total = int(block_sums.sum())
    sources = nodes.new_empty(total)
    ids = torch.empty(total, dtype=edge_ids.dtype, device=nodes.device)
    targets = torch.empty(total, dtype=torch.int32, device=nodes.device)
    run_gpu(kernel, grid, state, indptr, indptr, indices, edge_ids, pairs, nodes, block_sums, hop, fanout,
            option, 1, total, sources, ids, targets, no_bits, no_flags)  # fmt: skip
    assert int(state[EDGES + hop + 1]) == total
    return Neighbors(sources, torch.bincount(targets, minlength=nodes.numel()), ids.long())


def check_sampling(sampling: str, replace: bool, layer_dependency: bool) -> None:
    """Check that a way of sampling is known and has these options."""
    check_choice("sampling", sampling, SAMPLINGS)
    if sampling == "labor" and replace:
        raise ArgumentError("replace must be False with sampling='labor', got True")
    if sampling != "labor" and layer_dependency:
        raise ArgumentError(f"layer_dependency must be False with sampling={sampling!r}, got True")


def cpu_picks(fanout: int, replace: bool, sampling: str, layer_dependency: bool) -> tuple[CpuKernel, bool]:
    """Return the CPU loop that serves a fanout, and the option it takes."""
    if sampling == "labor" and fanout >= 0:
        return labor.pick_labor_cpu, layer_dependency
    return kernels.pick_neighbors_cpu, replace


def gpu_picks(fanout: int, replace: bool, sampling: str, layer_dependency: bool) -> tuple[GpuKernel, int]:
    """Return the GPU kernel that serves a fanout, and the option it takes."""
    if sampling == "labor" and fanout >= 0:
        return labor.pick_labor_gpu, int(layer_dependency)
    if fanout > kernels.TILE_EDGES:
        return kernels.pick_many_neighbors_gpu, int(replace)
    return kernels.pick_neighbors_gpu, int(replace)


# Edges read together.
_EDGES_AT_ONCE = 1 << 24


def spread_values(indptr: Tensor, indices: Tensor, values: Tensor, bar: Bar | None = None,
                  num_nodes: int | None = None) -> Tensor:  # fmt: skip
    """Return the sum over the rows that list a node of their values, float32 `[N]`, once for each listing.

    Args:
        indptr, indices: Rows, int64 `[S + 1]` and int32 or int64 `[E]` within [0, N), which is not checked;
            on a GPU other ids are left out.
        values: Value of each row, float32 `[S]`, on the device of the rows.
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
