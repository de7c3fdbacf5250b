"""Union of several lists of ids, and the positions of ids (see `kernels/local_ids/bitmap.py`).

`unite` returns the union and the positions in it. `locate_ids` returns positions in a table that holds the rows of some
ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.batch_counters import NODES, STATE
from pyg_direct.kernels.local_ids import bitmap as kernels, new_nodes
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.local_ids.relabel import choose_method, cpu_bitmaps, num_words
from pyg_direct.ops.rows.gather import Directory
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu


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
            run_gpu(kernels.rank_items_gpu, grid_for(ids.numel(), ids), ids, *self._directory, out)
        else:
            run_cpu(kernels.rank_items_cpu, ids, *self._directory, out)
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
    run_cpu(kernels.rank_words_cpu, seen, ranks, sums)
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
    run_gpu(kernels.sum_words_gpu, grid, seen, block_sums)
    run_gpu(kernels.rank_words_gpu, grid, seen, block_sums, ranks)
    return Union(nodes[: int(state[NODES + 1])], Directory(seen, ranks))


def locate_ids(ids: Tensor, directory: Directory, num_ids: int) -> Tensor:
    """Return the rank of each id in a directory, int64 `[n]`; -1 if it is not there, or outside [0, num_ids).

    Args:
        ids: int32 or int64 `[n]`, on the device of the directory.
        directory: Ids that are there.
        num_ids: N, the ids that the directory covers.
    """
    ids = check_ids("ids", ids)
    out = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    if ids.numel() == 0:
        return out
    if runs_on_gpu(ids):
        run_gpu(kernels.locate_items_gpu, grid_for(ids.numel(), ids), ids, num_ids, *directory, out)
    else:
        run_cpu(kernels.locate_items_cpu, ids, num_ids, *directory, out)
    return out
