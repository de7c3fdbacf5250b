"""Local ids of a batch: seeds in their order, then new nodes ascending (see `kernels/local_ids/relabel.py`).

`unite` returns the union of several lists of ids and the positions in it. `locate_ids` returns positions in a table
that holds the rows of some ids. Both use the bitmaps of `kernels/local_ids/bitmap.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels.batch_counters import BAD_SEED, FAR, NO_POSITION, NODES, NUM_SEEDS, SEEDS_ON_GPU, STATE
from pyg_direct.kernels.local_ids import bitmap, new_nodes, relabel as kernels
from pyg_direct.ops.argument_checks import check_ids, check_same_device
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu

# More threads than this share each bitmap.
_BITMAPS = 4


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
        method: `bitmap` (N / 4 bytes of scratch, on a CPU up to 5 N / 8), `sort` (scratch by the batch), or `auto`.
            `auto` takes the bitmap unless its scan would cost more than sorting the batch. Both give the same result.
    """
    seeds = check_ids("seeds", seeds, num_nodes)
    neighbors = check_ids("neighbors", neighbors, num_nodes).to(seeds.dtype)
    check_same_device("neighbors", neighbors, "seeds", seeds)
    if method not in ("auto", "bitmap", "sort"):
        raise ArgumentError(f"method must be 'auto', 'bitmap' or 'sort', got {method!r}")
    if method == "auto":
        method = choose_method(num_nodes, seeds.numel() + neighbors.numel())
    if seeds.numel() + neighbors.numel() == 0:
        empty = seeds.new_empty(0, dtype=torch.int64)
        return Relabelled(empty, empty)
    for name, ids in (("seeds", seeds), ("neighbors", neighbors)):
        if ids.is_cuda and ids.numel() > 0:
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < 0 or high >= num_nodes:
                raise IdError(f"{name} must lie in [0, {num_nodes}), got {low if low < 0 else high}")
    if method == "sort":
        return _by_sorting(seeds, neighbors)
    return (_by_bitmap_on_gpu if runs_on_gpu(seeds) else _by_bitmap_on_cpu)(seeds, neighbors, num_nodes)


def choose_method(num_nodes: int, num_items: int) -> str:
    """Return `bitmap` while its words are at most 64 times the items of the batch (and always up to 2**24 nodes)."""
    return "bitmap" if num_nodes <= max(1 << 24, 2048 * num_items) else "sort"


def _by_sorting(seeds: Tensor, neighbors: Tensor) -> Relabelled:
    keys = torch.unique(torch.cat([seeds, neighbors]))
    rank_of_seed = torch.searchsorted(keys, seeds)
    is_new = torch.ones_like(keys, dtype=torch.bool)
    is_new[rank_of_seed] = False
    local_of_rank = is_new.long().cumsum(0) + (seeds.numel() - 1)
    order = torch.arange(seeds.numel(), device=seeds.device)
    first = torch.full_like(local_of_rank, seeds.numel()).scatter_reduce(0, rank_of_seed, order, "amin")
    local_of_rank = torch.where(is_new, local_of_rank, first)
    n_id = torch.cat([seeds, keys[is_new]]).long()
    return Relabelled(n_id, local_of_rank[torch.searchsorted(keys, neighbors)])


def num_words(num_nodes: int) -> int:
    """Return the words of a bitmap over `num_nodes` ids."""
    return -(-num_nodes // bitmap.WORD)


def cpu_bitmaps(num_nodes: int) -> np.ndarray:
    """Return empty bitmaps for the threads that mark ids on a CPU in parallel, uint32 `[G, W]`: memory is taken at the
    first mark.
    """
    return np.zeros((min(cpu_chunks(), _BITMAPS), num_words(num_nodes)), np.uint32)


def _by_bitmap_on_cpu(seeds: Tensor, neighbors: Tensor, num_nodes: int) -> Relabelled:
    chunks = cpu_chunks()
    seen = torch.zeros(num_words(num_nodes), dtype=torch.uint32, device="cpu")
    fresh, ranks = cpu_bitmaps(num_nodes), torch.empty(seen.numel(), dtype=torch.int32, device="cpu")
    sums = np.zeros(chunks, np.int64)
    run_cpu(new_nodes.mark_fresh_cpu, seeds, seen[None], chunks)
    used = run_cpu(new_nodes.mark_fresh_cpu, neighbors, fresh, chunks)
    nodes = torch.cat([seeds, seeds.new_empty(neighbors.numel())])
    run_cpu(new_nodes.emit_fresh_cpu, fresh[:used], seen, sums, nodes, seeds.numel())
    nodes = nodes[: seeds.numel() + int(sums.sum())]
    run_cpu(bitmap.rank_words_cpu, seen, ranks, sums)
    locals_of_rank = torch.empty(nodes.numel(), dtype=torch.int32, device="cpu")
    n_id = torch.empty(nodes.numel(), dtype=torch.int64, device="cpu")
    run_cpu(kernels.locate_nodes_cpu, nodes, seeds.numel(), seen, ranks, locals_of_rank, n_id)
    local = torch.empty(neighbors.numel(), dtype=torch.int64, device="cpu")
    run_cpu(kernels.look_up_cpu, neighbors, seen, ranks, locals_of_rank, local)
    return Relabelled(n_id, local)


def _by_bitmap_on_gpu(seeds: Tensor, neighbors: Tensor, num_nodes: int) -> Relabelled:
    device, grid = seeds.device, full_grid(seeds)
    inbox = torch.zeros(STATE, dtype=torch.int64, device="cpu")
    inbox[NUM_SEEDS], inbox[BAD_SEED], inbox[SEEDS_ON_GPU] = seeds.numel(), NO_POSITION, 1
    inbox = inbox.to(device)
    state = inbox.clone()
    bits = torch.zeros(2, num_words(num_nodes), dtype=torch.int32, device=device).view(torch.uint32)
    seen, fresh = bits[0], bits[1]
    no_table, no_flags = (torch.empty(0, dtype=d, device=device) for d in (torch.int32, torch.uint8))
    block_sums = state.new_empty(grid)
    nodes = seeds.new_empty(seeds.numel() + neighbors.numel())
    run_gpu(kernels.load_seeds_gpu, grid_for(seeds.numel(), seeds), state, inbox, seeds.long(), seen, no_table, nodes,
            num_nodes)  # fmt: skip
    run_gpu(new_nodes.mark_fresh_gpu, grid_for(neighbors.numel(), seeds), neighbors, fresh)
    run_gpu(new_nodes.count_fresh_gpu, grid, fresh, seen, no_flags, block_sums)
    run_gpu(new_nodes.emit_fresh_gpu, grid, state, 0, 0, fresh, seen, no_flags, block_sums, no_table, nodes)
    ranks = torch.empty(seen.numel(), dtype=torch.int32, device=device)
    run_gpu(bitmap.sum_words_gpu, grid, seen, block_sums)
    run_gpu(bitmap.rank_words_gpu, grid, seen, block_sums, ranks)
    locals_of_rank = torch.full((nodes.numel(),), FAR, dtype=torch.int32, device=device)
    run_gpu(kernels.locate_nodes_gpu, grid, state, 1, nodes, seen, ranks, locals_of_rank)
    local = torch.empty(neighbors.numel(), dtype=torch.int64, device=device)
    if neighbors.numel() > 0:
        run_gpu(kernels.look_up_gpu, grid_for(neighbors.numel(), seeds), neighbors, seen, ranks, locals_of_rank, local)
    return Relabelled(nodes[: int(state[NODES + 1])].long(), local)


class Union:
    """Union of several lists of ids.

    Attributes:
        ids: Each id once, ascending, int64 `[U]`.
    """

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
        num_nodes: N.
        method: `bitmap` (scratch of 3 N / 8 bytes), `sort`, or `auto`, as in `relabel`.
    """
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
