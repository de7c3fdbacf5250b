"""The neighbor lists of hot rows in GPU memory, while all lists lie on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.graph.placed import PlacedTopology

_STEP = 1 << 26
# A read over the link fetches a sector whole.
_SECTOR_BYTES = 32
# Picks a row, and how many times the mean a node must be listed to be met in nearly every batch: typical values, which
# only decide which rows are cached.
_PICKS = 8
_ALWAYS = 20.0


def cache_rows(topology: PlacedTopology, num_bytes: int) -> PlacedTopology:
    """The topology with copies of rows worth `num_bytes` in GPU memory, where kernels then find them.

    A row of the result begins at `lists[starts[r]]` wherever it lies: the offsets of one array reach into the other,
    as both have addresses that the GPU reads. The copies and `starts`, 8 bytes a node, are all that is added.
    """
    indptr, indices = topology.indptr, topology.indices
    hot_rows = choose_rows(indptr, indices, num_bytes // indices.element_size())
    if hot_rows.numel() == 0:
        return topology
    hot, offsets = copy_rows(indptr, indices, hot_rows)
    distance = (indices.data_ptr() - hot.data_ptr()) // indices.element_size()
    starts = indptr[:-1].clone()
    # Offsets from the array that comes first in memory, so that none is negative.
    if distance > 0:
        starts += distance
        starts[hot_rows] = offsets
    else:
        starts[hot_rows] = offsets - distance
    return PlacedTopology(indptr, indices, topology.edge_ids, topology.placement, topology.blocks, starts=starts,
                          lists=hot if distance > 0 else indices, cached=hot)  # fmt: skip


def choose_rows(indptr: Tensor, indices: Tensor, num_edges: int) -> Tensor:
    """Rows to cache, ascending, int64: those that save the most reads over the link for their size.

    A row is read as often as it is listed, but at most once a batch, and each time from as many sectors as its picks
    fall into; long rows of hubs are therefore not the best ones.
    """
    degree = indptr.diff()
    listed = torch.zeros(degree.numel(), device=indptr.device)
    for begin in range(0, indices.numel(), _STEP):
        listed += torch.bincount(indices[begin : begin + _STEP], minlength=degree.numel())
    rate = -torch.expm1(-listed / (_ALWAYS * listed.mean()))
    sectors = (degree * indices.element_size() / _SECTOR_BYTES).ceil().clamp(min=1)
    reads = sectors * (1 - (1 - 1 / sectors) ** degree.clamp(max=_PICKS))
    score = rate * reads / degree.clamp(min=1)
    order = score.sort(descending=True, stable=True).indices
    order = order[degree[order] > 0]
    fitting = int(torch.searchsorted(degree[order].cumsum(0), num_edges, right=True))
    return order[:fitting].sort().values


def copy_rows(indptr: Tensor, indices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(neighbors of `rows` one after the other, where each row begins, int64) in GPU memory."""
    lengths = indptr[rows + 1] - indptr[rows]
    ends = lengths.cumsum(0)
    offsets = ends - lengths
    out = torch.empty(int(ends[-1]), dtype=indices.dtype, device=indptr.device)
    for begin in range(0, out.numel(), _STEP):
        items = torch.arange(begin, min(begin + _STEP, out.numel()), device=indptr.device)
        row = torch.searchsorted(ends, items, right=True)
        out[begin : begin + items.numel()] = indices[indptr[rows[row]] + items - offsets[row]]
    return out, offsets
