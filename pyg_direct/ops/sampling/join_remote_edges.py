"""Nodes grouped by the parts that own them, answers of owners as bytes, and the edges of a hop from all answers.

See `kernels/sampling/remote_edges.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.sampling import remote_edges as kernels
from pyg_direct.kernels.sampling.remote_edges import group_buckets_cpu
from pyg_direct.kernels.sampling.worklist import COLUMNS, FIRST, FRONT
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.sampling.sample_hetero import Picked
from pyg_direct.runtime.host.tensor_views import align


class Wire(NamedTuple):
    """Dtypes of answers: of the numbers of edges, uint8 or int32; of neighbors and edge ids, int32 or int64."""

    counts: torch.dtype
    words: torch.dtype


class Layout(NamedTuple):
    """Position of several answers in one memory, one after the other.

    Attributes:
        table: See `kernels/sampling/remote_edges.py`.
        sizes: Bytes of each answer.
    """

    table: np.ndarray
    sizes: np.ndarray
    num_items: int
    num_edges: int

    @classmethod
    def of(cls, num_items: np.ndarray, num_edges: np.ndarray, wire: Wire) -> Layout:
        """Make the layout of answers with so many items and edges, int64 `[P]`."""
        counted, listed = align(num_items * wire.counts.itemsize), align(num_edges * wire.words.itemsize)
        sizes = counted + 2 * listed
        table = np.zeros((len(sizes) + 1, kernels.PLACES), np.int64)
        np.cumsum(num_items, out=table[1:, kernels.ITEM])
        np.cumsum(num_edges, out=table[1:, kernels.EDGE])
        begins = np.cumsum(sizes) - sizes
        table[:-1, kernels.COUNTS] = begins // wire.counts.itemsize
        table[:-1, kernels.SOURCES] = (begins + counted) // wire.words.itemsize
        table[:-1, kernels.IDS] = (begins + counted + listed) // wire.words.itemsize
        return cls(table, sizes, int(table[-1, kernels.ITEM]), int(table[-1, kernels.EDGE]))


def pack_edges(picked: Picked, trees: Tensor, layout: Layout, wire: Wire, out: Tensor) -> None:
    """Write picked edges as answers.

    Args:
        trees: Number that is subtracted from the sources, by target, int64; empty for zeros.
        layout: Positions of the answers, by asker; items and edges of the picked.
        out: uint8, the sizes of the layout together.
    """
    if layout.num_items == 0:
        return
    assert picked.offsets is not None
    arguments = (upload(layout.table.reshape(-1), out.device), picked.offsets, picked.sources, picked.ids,
                 picked.targets, trees)  # fmt: skip
    views = out.view(wire.counts), out.view(wire.words)
    if runs_on_gpu(out):
        grid = grid_for(max(layout.num_items, layout.num_edges), out)
        run_gpu(kernels.pack_edges_gpu, grid, *arguments, layout.num_edges, *views)
    else:
        run_cpu(kernels.pack_edges_cpu, *arguments, cpu_chunks(), *views)


class Asked(NamedTuple):
    """Questions that owners were asked.

    Attributes:
        types: Type that each entry of it expands, int64 `[A]`.
        counts: Nodes that each owner has of each type, int64 `[P, T]`.
        order: Their positions in the frontier, owner after owner and type after type within each, int64 `[F]`.
        trees: Trees of the frontier, int64 `[F]`, or empty.
    """

    work: np.ndarray
    types: np.ndarray
    counts: np.ndarray
    order: Tensor
    trees: Tensor
    tree_shift: int

    @property
    def num_items(self) -> np.ndarray:
        """Items of each owner, int64 `[P]`."""
        return self.counts[:, self.types].sum(1)

    def segments(self, layout: Layout) -> np.ndarray:
        """Return segments of the answers' items (see `kernels/sampling/remote_edges.py`)."""
        sizes, entries = self.counts[:, self.types], self.work.reshape(-1, COLUMNS)[:-1]
        begins = (np.cumsum(self.counts) - self.counts.reshape(-1)).reshape(self.counts.shape)[:, self.types]
        found = np.zeros((sizes.size + 1, kernels.SEGMENT), np.int64)
        np.cumsum(sizes, out=found[1:, kernels.BEGIN])
        found[:-1, kernels.ORDER] = begins.reshape(-1)
        found[:-1, kernels.SHIFT] = np.tile(entries[:, FIRST] - entries[:, FRONT], len(sizes))
        shifts = layout.table[:-1, kernels.COUNTS] - layout.table[:-1, kernels.ITEM]
        found[:-1, kernels.AT] = found[:-1, kernels.BEGIN] + shifts.repeat(sizes.shape[1])
        return found.reshape(-1)


def join_edges(asked: Asked, layout: Layout, wire: Wire, answers: Tensor) -> Picked:
    """Join the edges of all answers in the order of the work list.

    Args:
        answers: uint8, the sizes of the layout together.
    """
    device, num_items = answers.device, layout.num_items
    # Items in the order of the answers, and in the order of the work list.
    numbers = torch.zeros(2, num_items + 1, dtype=torch.int64, device=device)
    items = torch.empty(num_items, dtype=torch.int64, device=device)
    sources, ids, targets = torch.empty(3, layout.num_edges, dtype=torch.int64, device=device).unbind()
    if num_items == 0:
        return Picked(sources, ids, targets, numbers[1][:1], numbers[1])
    # They travel together.
    tables = asked.work, asked.segments(layout), layout.table.reshape(-1)
    work, segments, table = upload(np.concatenate(tables), device).split([len(words) for words in tables])
    place = segments, asked.order, answers.view(wire.counts), *numbers.unbind(), items
    on_gpu = runs_on_gpu(answers)
    if on_gpu:
        run_gpu(kernels.place_counts_gpu, grid_for(num_items, answers), *place)
    else:
        run_cpu(kernels.place_counts_cpu, *place)
    before, offsets = numbers.cumsum(1).unbind()
    ends = offsets[work[FIRST::COLUMNS]]
    if layout.num_edges > 0:
        join = (table, before, offsets, items, work, asked.trees, asked.tree_shift,
                answers.view(wire.words))  # fmt: skip
        if on_gpu:
            run_gpu(kernels.join_edges_gpu, grid_for(layout.num_edges, answers), *join, sources, ids, targets)
        else:
            run_cpu(kernels.join_edges_cpu, *join, cpu_chunks(), sources, ids, targets)
    return Picked(sources, ids, targets, ends, offsets)


def make_keys(num_ids: int, num_buckets: int, device: torch.device) -> Tensor:
    """Allocate the keys of ids that fall into so many buckets, uint8 or int32 `[num_ids]`."""
    return torch.empty(num_ids, dtype=torch.uint8 if num_buckets <= 255 else torch.int32, device=device)


def find_buckets(ids: Tensor, num_parts: int, bounds: Tensor, table: Tensor, own: int, scale: int, add: int,
                 keys: Tensor) -> None:  # fmt: skip
    """Write the key of the bucket of each id.

    Args:
        ids: int64 `[n]`; one outside the table counts as one of part 0.
        bounds: First ids of all parts but the first, int64 `[P - 1]`; empty without ranges.
        table: Part of each id, uint8 or int16 `[N]`; empty without a table. Without both a hash decides.
        own: The part that asks, whose bucket is the last; -1 for none.
        keys: Output, `[n]` of `make_keys`.
    """
    if ids.numel() == 0:
        return
    arguments = ids, num_parts, bounds, table, own, scale, add, keys
    if runs_on_gpu(ids):
        run_gpu(kernels.find_buckets_gpu, grid_for(ids.numel(), ids), *arguments)
    else:
        run_cpu(kernels.find_buckets_cpu, *arguments)


def group_keys(keys: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Return (positions of the keys, bucket after bucket, int64 `[n]`; first position of each bucket, and the end,
    int64 `[B + 1]`).

    Within a bucket they keep their order.
    """
    device = keys.device
    if runs_on_gpu(keys):
        ordered, order = keys.sort(stable=True)
        return order, torch.searchsorted(ordered, _count_up(num_buckets + 1, keys.dtype, device))
    chunks = cpu_chunks()
    counts = torch.zeros(chunks, num_buckets, dtype=torch.int64, device="cpu")
    order = torch.empty(keys.numel(), dtype=torch.int64, device="cpu")
    bounds = torch.zeros(num_buckets + 1, dtype=torch.int64, device="cpu")
    if keys.numel() > 0:
        run_cpu(group_buckets_cpu, keys, counts, order)
        # Each count has become the end of its bucket.
        bounds[1:] = counts[-1]
    return order, bounds


@functools.cache
def _count_up(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)
