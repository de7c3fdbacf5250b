"""One hop over a work list of many relations (see `kernels/sampling/hetero.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import THREADS
from pyg_direct.kernels.sampling import hetero as kernels, weighted_gpu
from pyg_direct.kernels.sampling.excluded_edges import find_edges_cpu, find_edges_gpu
from pyg_direct.kernels.sampling.weighted import sum_weights_cpu
from pyg_direct.kernels.sampling.worklist import COLUMNS, FANOUT, FIRST, FLAGS, SHARED
from pyg_direct.ops.argument_checks import check_below
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu

# Items of a block in a small hop, so that all multiprocessors have work.
_ITEMS_PER_BLOCK = 8
# Edges above which a wait for their number is cheaper than memory for the worst case.
_LARGE_BOUND = 1 << 24


class Rows(NamedTuple):
    """Rows of all relations, on one device; an unused array is empty.

    Attributes:
        indptr: int64 `[S + 1]`, S rows of all relations, relation after relation.
        indices: Neighbors in the id space of all types, int32 or int64 `[E]`.
        edge_ids: Edge ids within the relation, int32 or int64 `[E]`; empty: the position in the relation.
        node_time: int64 `[N]`, N the size of the id space.
        edge_time: int64 `[E]`. Rows of timed relations are sorted by time.
        edge_weight: float32 or float64 `[E]`.
        weight_before: Sum of the weights before each edge in its row, float64 `[E]`; for draws with replacement.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    node_time: Tensor
    edge_time: Tensor
    edge_weight: Tensor
    weight_before: Tensor


class Frontier(NamedTuple):
    """Nodes to expand, type after type.

    Attributes:
        rows: Ids within their types, int64 `[F]`.
        trees: Trees they belong to, int64 `[F]`; empty without disjoint trees.
        seed_times: Time of each tree, or of each node if flags have `BY_PLACE`, int64; empty without times.
        tree_shift: Position of the tree among the bits of an identity.
        places: Positions of these nodes' rows among the rows of their relation, int64 `[F]`, if the relation has rows
            of some nodes only; None: at their ids.
    """

    rows: Tensor
    trees: Tensor
    seed_times: Tensor
    tree_shift: int
    places: Tensor | None = None


class Rules(NamedTuple):
    """How edges are chosen: with replacement; the last ones by time; strictly before the seed; window, -1 for none."""

    replace: bool
    last: bool
    strict: bool
    window: int


class Picked(NamedTuple):
    """Edges in the order of the work list; only the first ends[-1] items of the arrays are edges.

    Attributes:
        sources: Neighbors as identities (`kernels/sampling/worklist.py`), int64 `[at least E']`.
        ids: Edge ids within the relation, int64 `[at least E']`.
        targets: Local ids of the nodes expanded, int64 `[at least E']`.
        ends: First edge of each entry of the work list, and the end of the last, int64 `[A + 1]`.
        offsets: The same for each item, int64 `[I + 1]`; None if not available.
    """

    sources: Tensor
    ids: Tensor
    targets: Tensor
    ends: Tensor
    offsets: Tensor | None = None


class Lists(Protocol):
    """Neighbors and edge ids that are read by position, from files; `edge_ids` is None if positions are the ids."""

    @property
    def indices(self) -> Any:
        """Neighbors, `[E]`: `take` returns the numbers at positions."""

    @property
    def edge_ids(self) -> Any:
        """Edge ids, likewise."""


def pick_edges(rows: Rows, work: np.ndarray, frontier: Frontier, rules: Rules, *, hop: int,
               entries: Tensor | None = None, excluded: Tensor | None = None, lists: Lists | None = None
               ) -> Picked:  # fmt: skip
    """Pick edges of every item of a work list; equal keys in it give equal picks on any device.

    Waits for the GPU only if the number of edges has no bound, or a large one.

    Args:
        work: The work list, int64 `[(A + 1) * COLUMNS]`, on the host.
        hop: Number of the hop; hops of one key draw independently.
        entries: The work list on the device, if it is there already.
        excluded: Edges that no item picks, as `find_edges` lists them; None for none.
        lists: On a CPU: neighbors and edge ids of one relation, if they are not read from `rows`.

    Raises:
        FileError: the files of `lists` cannot be read.
        IdError: a neighbor in them is invalid.
    """
    device, num_items = frontier.rows.device, int(work[-COLUMNS])
    entries = upload(work, device) if entries is None else entries
    replace = int(rules.replace)
    places = frontier.rows if frontier.places is None else frontier.places
    weights, is_on_gpu = rows.edge_weight, runs_on_gpu(frontier.rows)
    if excluded is None and (is_on_gpu or weights.numel() > 0):
        excluded = frontier.rows[:0]
    counted = (entries, rows.indptr, rows.indices, rows.node_time, rows.edge_time,
               weights if is_on_gpu or weights.numel() > 0 else None, places, frontier.trees, frontier.seed_times,
               excluded, replace, int(rules.last), int(rules.strict), rules.window)  # fmt: skip
    if not is_on_gpu:
        return _pick_on_cpu(rows, work, frontier, counted, hop, replace, entries, excluded, lists)
    starts, sizes, counts = torch.empty(3, num_items, dtype=torch.int64, device=device).unbind()
    run_gpu(kernels.count_items_gpu, grid_for(num_items, starts), *counted, starts, sizes, counts, starts[:0])
    offsets = torch.zeros(num_items + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=offsets[1:])
    ends = offsets.index_select(0, entries[::COLUMNS])
    most = _bound_edges(work)
    capacity = int(offsets[-1]) if most is None else most
    draws, sources, ids, targets = torch.empty(4, capacity, dtype=torch.int64, device=device).unbind()
    if capacity == 0:
        return Picked(sources, ids, targets, ends, offsets)
    if rows.edge_weight.numel() > 0:
        weighted_grid = max(1, min(full_grid(starts), num_items))
        run_gpu(weighted_gpu.pick_weighted_gpu, weighted_grid, hop, replace, entries, rows.edge_weight,
                rows.weight_before, excluded, frontier.rows, frontier.trees, starts, sizes, offsets,
                draws)  # fmt: skip
        if not rules.replace:
            scores = torch.empty(capacity, dtype=torch.float64, device=device)
            run_gpu(weighted_gpu.pick_long_rows_gpu, weighted_grid, hop, entries, rows.edge_weight, excluded,
                    frontier.rows, frontier.trees, starts, sizes, offsets, scores, draws)  # fmt: skip
    if shares_keys(work):
        run_gpu(kernels.pick_labor_items_gpu, max(1, min(full_grid(starts), num_items)), hop, entries,
                rows.indices, excluded, starts, sizes, offsets, draws)  # fmt: skip
    repeats, none = torch.empty(capacity, dtype=torch.uint8, device=device), ends[:0].view(torch.int32)
    grid = max(1, min(full_grid(starts), -(-num_items // min(_ITEMS_PER_BLOCK, THREADS))))
    run_gpu(kernels.pick_items_gpu, grid, hop, replace, frontier.tree_shift, entries, rows.indices, rows.edge_ids,
            excluded, frontier.rows, frontier.trees, starts, sizes, offsets, draws, repeats, sources, ids, targets,
            none.view(torch.uint32), repeats[:0], 0, none, none)  # fmt: skip
    return Picked(sources, ids, targets, ends, offsets)


def _pick_on_cpu(rows: Rows, work: np.ndarray, frontier: Frontier, counted: tuple[Any, ...], hop: int, replace: int,
                 entries: Tensor, excluded: Tensor | None, lists: Lists | None) -> Picked:  # fmt: skip
    """Pick edges as `pick_edges` does; `counted` are the arguments of the loop that counts the edges of each item.

    `excluded` may only be None without weights.
    """
    num_items = int(work[-COLUMNS])
    starts, sizes, counts = np.empty((3, num_items), np.int64)
    run_cpu(kernels.count_items_cpu, *counted, cpu_chunks(), starts, sizes, counts)
    offsets = np.empty(num_items + 1, np.int64)
    offsets[0] = 0
    np.cumsum(counts, out=offsets[1:])
    capacity = int(offsets[-1])
    positions, *made = np.empty((4, capacity), np.int64)
    weighted: tuple[Any, ...] = (None, None, None)
    if rows.edge_weight.numel() > 0:
        weighted = (rows.edge_weight, rows.weight_before, np.empty(capacity, np.float64))
    longest = int(sizes.max(initial=0)) if shares_keys(work) else None
    # The loop then picks positions alone, whose neighbors are read together.
    neighbors = rows.indices if lists is None else rows.indices.new_zeros(1).expand(rows.indices.numel())
    run_cpu(kernels.pick_items_cpu, hop, replace, frontier.tree_shift, entries, neighbors, rows.edge_ids,
            *weighted, excluded, frontier.rows, frontier.trees, starts, sizes, offsets, longest,
            cpu_chunks(), positions, *made)  # fmt: skip
    if lists is not None:
        found = lists.indices.take(positions)
        check_below("neighbors in the file", found, rows.indptr.numel() - 1)
        made[0] += found
        if lists.edge_ids is not None:
            made[1][:] = lists.edge_ids.take(positions)
    return Picked(*(torch.from_numpy(part) for part in (*made, offsets[work[::COLUMNS]], offsets)))


def shares_keys(work: np.ndarray) -> bool:
    """Check whether the rows of a work list share the keys of their sources, as all of its entries then do."""
    return bool(work.size > COLUMNS and work[FLAGS] & SHARED)


def _bound_edges(work: np.ndarray) -> int | None:
    """Return the most edges that a work list can give; None if that has no bound, or one not worth its memory."""
    table = work.reshape(-1, COLUMNS)
    picks = table[:-1, FANOUT]
    bound = int(np.dot(np.diff(table[:, FIRST]), picks))
    return bound if picks.size and picks.min() >= 0 and bound <= _LARGE_BOUND else None


class PairList(NamedTuple):
    """Pairs of a row and a neighbor, ascending, whose edges are left out.

    Attributes:
        keys: Number of the batch times the number of all rows, plus the row, int64 `[P]`.
        neighbors: In the id space of all types, int64 `[P]`; pairs may repeat.
    """

    keys: Tensor
    neighbors: Tensor


def sort_pairs(rows: Rows, segments: Tensor, neighbors: Tensor, batches: Tensor) -> PairList:
    """Sort pairs, without a wait.

    Args:
        segments: Row of each pair, int64 `[P]`; pairs may repeat.
        neighbors: Neighbor of each pair, in the id space of all types, int64 `[P]`.
        batches: Number of the batch of each pair, int64 `[P]`.
    """
    order = neighbors.argsort()
    keys, by_row = (batches * (rows.indptr.numel() - 1) + segments)[order].sort(stable=True)
    return PairList(keys, neighbors[order[by_row]])


def write_edges(rows: Rows, pairs: PairList, counter: Tensor, place: int, out: Tensor) -> None:
    """Write the edges of rows that lead to neighbors in the form that `pick_edges` reads, without a wait for the GPU.

    Args:
        counter: int64 on the GPU; `counter[place]`, 0 before, receives the number of edges.
        out: batch * E + position of each edge, ascending, then padded with the largest int64, int64 `[room]`; if there
            are more edges than room, any of them.
    """
    found = torch.full_like(out, 2**63 - 1)
    if pairs.keys.numel():
        grid = max(1, min(full_grid(out), pairs.keys.numel()))
        run_gpu(find_edges_gpu, grid, rows.indptr.numel() - 1, rows.indptr, rows.indices, *pairs, counter, place, found)
        out.copy_(found.sort().values)
    else:
        out.copy_(found)


def find_edges(rows: Rows, pairs: PairList) -> Tensor:
    """Find the edges of rows that lead to neighbors, including parallel ones, for `pick_edges` to leave out.

    Returns:
        batch * E + position of each edge, ascending, int64 `[X]`. Waits for a GPU.
    """
    count, device = pairs.keys.numel(), pairs.keys.device
    if runs_on_gpu(pairs.keys):
        room = count
        while True:
            counter, out = (torch.zeros(size, dtype=torch.int64, device=device) for size in (1, room))
            write_edges(rows, pairs, counter, 0, out)
            found = int(counter)
            if found <= room:
                return out[:found]
            room = found
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(count, dtype=torch.int64, device=device)
    arguments = rows.indptr.numel() - 1, rows.indptr, rows.indices, *pairs, offsets, counts
    # Counted, then listed.
    run_cpu(find_edges_cpu, *arguments, offsets[:0])
    torch.cumsum(counts, 0, out=offsets[1:])
    listed = torch.empty(int(offsets[-1]), dtype=torch.int64, device=device)
    if listed.numel():
        run_cpu(find_edges_cpu, *arguments, listed)
    return listed


def sum_weights(indptr: Tensor, edge_weight: Tensor) -> Tensor:
    """Return the sum of the weights before each edge in its row, float64 `[E]` on the CPU, equal for every device."""
    weight_before = torch.empty(edge_weight.numel(), dtype=torch.float64, device="cpu")
    run_cpu(sum_weights_cpu, indptr.cpu(), edge_weight.cpu(), weight_before)
    return weight_before
