"""Local ids of a batch: seeds in their order, then new nodes ascending.

`unite` returns the union of several lists of ids and the positions in it. `locate_ids` returns positions in a table
that holds the rows of some ids. Both use the bitmaps of `kernels/local_ids/bitmap.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import IdError
from pyg_direct.kernels.batch_counters import NODES, STATE
from pyg_direct.kernels.local_ids import bitmap, new_nodes
from pyg_direct.ops.argument_checks import check_choice, check_ids, check_same_device
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu

# More threads than this share each bitmap.
_BITMAPS = 4
METHODS = ("auto", "bitmap", "sort")


class Relabelled(NamedTuple):
    """Local numbering of a hop.

    Attributes:
        n_id: Global ids by local id: the seeds, then the new nodes; int64 `[M]`.
        local: Local id of every neighbor, int64 `[E']`; of a repeated seed, its first position.
    """

    n_id: Tensor
    local: Tensor


def relabel(seeds: Tensor, neighbors: Tensor, num_nodes: int, *, method: str = "auto") -> Relabelled:
    """Number the nodes of a hop.

    Args:
        seeds: int32 or int64 `[B]`; repeats keep their places.
        neighbors: int32 or int64 `[E']`.
        num_nodes: N; all ids lie in [0, N).
        method: As in `unite`.
    """
    seeds = check_ids("seeds", seeds, num_nodes)
    neighbors = check_ids("neighbors", neighbors, num_nodes)
    check_same_device("neighbors", neighbors, "seeds", seeds)
    for name, ids in (("seeds", seeds), ("neighbors", neighbors)):
        if ids.is_cuda and ids.numel() > 0:
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < 0 or high >= num_nodes:
                raise IdError(f"{name} must lie in [0, {num_nodes}), got {low if low < 0 else high}")
    seeds, neighbors = seeds.long(), neighbors.long()
    union = unite([seeds, neighbors], num_nodes, method=method)
    rank_of_seed = union.find(seeds)
    is_new = torch.ones_like(union.ids, dtype=torch.bool)
    is_new[rank_of_seed] = False
    local_of_rank = is_new.cumsum(0).add_(seeds.numel() - 1)
    places = torch.arange(seeds.numel(), device=seeds.device)
    local_of_rank.scatter_reduce_(0, rank_of_seed, places, "amin", include_self=False)
    return Relabelled(torch.cat([seeds, union.ids[is_new]]), local_of_rank[union.find(neighbors)])


def choose_method(num_nodes: int, num_items: int) -> str:
    """Return `bitmap` while its words are at most 64 times the items of the batch (and always up to 2**24 nodes)."""
    return "bitmap" if num_nodes <= max(1 << 24, 2048 * num_items) else "sort"


def num_words(num_nodes: int) -> int:
    """Return the words of a bitmap over `num_nodes` ids."""
    return -(-num_nodes // bitmap.WORD)


def cpu_bitmaps(num_nodes: int) -> np.ndarray:
    """Return empty bitmaps, uint32 `[G, W]`, for threads that mark ids; memory is taken at the first mark."""
    return np.zeros((min(cpu_chunks(), _BITMAPS), num_words(num_nodes)), np.uint32)


class Union:
    """Union of several lists of ids. `ids`: Each id once, ascending, int64 `[U]`."""

    def __init__(self, ids: Tensor, directory: Directory | None) -> None:
        self.ids, self._directory = ids, directory

    def find(self, ids: Tensor) -> Tensor:
        """Return the position of each id in `self.ids`, int64 `[n]`; all of them must be there."""
        if self._directory is None:
            return torch.searchsorted(self.ids, ids)
        out = torch.empty_like(ids)
        if ids.numel() == 0:
            return out
        if runs_on_gpu(ids):
            run_gpu(bitmap.rank_items_gpu, grid_for(ids.numel(), ids), ids, *self._directory, out)
        else:
            run_cpu(bitmap.rank_items_cpu, ids, *self._directory, out)
        return out


def unite(lists: Sequence[Tensor], num_nodes: int, *, method: str = "auto") -> Union:
    """Return the union of lists of ids; waits for their device once.

    Args:
        lists: int64 `[n]` each, contiguous, on one device; values in [0, num_nodes), which is not checked.
        method: `bitmap` (scratch of 3 N / 8 bytes), `sort` (scratch by the lists), or `auto`. `auto` takes the bitmap
            unless its scan would cost more than sorting the lists. Both give the same result.
    """
    check_choice("method", method, METHODS)
    if method == "auto":
        method = choose_method(num_nodes, sum(ids.numel() for ids in lists))
    lists = [ids for ids in lists if ids.numel() > 0] or [lists[0]]
    if method == "sort" or lists[0].numel() == 0:
        return Union(torch.unique(torch.cat(list(lists))), None)
    return (_unite_on_gpu if runs_on_gpu(lists[0]) else _unite_on_cpu)(lists, num_nodes)


def _unite_on_cpu(lists: Sequence[Tensor], num_nodes: int) -> Union:
    seen, fresh = torch.zeros(num_words(num_nodes), dtype=torch.uint32, device="cpu"), cpu_bitmaps(num_nodes)
    ranks = torch.empty(seen.numel(), dtype=torch.int32, device="cpu")
    used = max(run_cpu(new_nodes.mark_fresh_cpu, ids, fresh, cpu_chunks()) for ids in lists)
    nodes = lists[0].new_empty(min(num_nodes, sum(ids.numel() for ids in lists)))
    sums = np.zeros(cpu_chunks(), np.int64)
    run_cpu(new_nodes.emit_fresh_cpu, fresh[:used], seen, sums, nodes, 0)
    count = int(sums.sum())
    run_cpu(bitmap.rank_words_cpu, seen, ranks, sums)
    return Union(nodes[:count], Directory(seen, ranks))


def _unite_on_gpu(lists: Sequence[Tensor], num_nodes: int) -> Union:
    device, grid = lists[0].device, full_grid(lists[0])
    bits = torch.zeros(2, num_words(num_nodes), dtype=torch.int32, device=device).view(torch.uint32)
    seen, fresh = bits[0], bits[1]
    for ids in lists:
        run_gpu(new_nodes.mark_fresh_gpu, grid_for(ids.numel(), ids), ids, fresh)
    no_table, no_flags = (torch.empty(0, dtype=d, device=device) for d in (torch.int32, torch.uint8))
    state = torch.zeros(STATE, dtype=torch.int64, device=device)
    block_sums = state.new_empty(grid)
    nodes = state.new_empty(min(num_nodes, sum(ids.numel() for ids in lists)))
    run_gpu(new_nodes.count_fresh_gpu, grid, fresh, seen, no_flags, block_sums)
    run_gpu(new_nodes.emit_fresh_gpu, grid, state, 0, 0, fresh, seen, no_flags, block_sums, no_table, nodes)
    ranks = torch.empty(seen.numel(), dtype=torch.int32, device=device)
    run_gpu(bitmap.sum_words_gpu, grid, seen, block_sums)
    run_gpu(bitmap.rank_words_gpu, grid, seen, block_sums, ranks)
    return Union(nodes[: int(state[NODES + 1])], Directory(seen, ranks))


def locate_ids(ids: Tensor, directory: Directory, num_ids: int) -> Tensor:
    """Return the rank of each id in a directory, int64 `[n]`; -1 if it is not there, or outside [0, num_ids).

    Args:
        ids: int32 or int64 `[n]`, on the device of the directory.
        num_ids: N, the ids that the directory covers.
    """
    ids = check_ids("ids", ids)
    out = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    if ids.numel() == 0:
        return out
    if runs_on_gpu(ids):
        run_gpu(bitmap.locate_items_gpu, grid_for(ids.numel(), ids), ids, num_ids, *directory, out)
    else:
        run_cpu(bitmap.locate_items_cpu, ids, num_ids, *directory, out)
    return out
